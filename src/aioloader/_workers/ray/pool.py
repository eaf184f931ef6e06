"""The loader's side of its Ray actors: requests, answers, deaths.

Everything runs in one thread, to which others post: consumers that want a batch, Ray
when it has an answer or reports a death, and the code that ends the pool. So there are
no locks and no polling. A batch is copied once, out of Ray's read-only store.
"""

import contextlib
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from aioloader._pipeline.batch_task import BatchResult, BatchTask
from aioloader._pipeline.cpu import CpuThread
from aioloader._pipeline.lifespan import Lifespan
from aioloader._pipeline.pipeline import Pipeline
from aioloader._pipeline.roles import LastingPool, Lease
from aioloader._pipeline.waiting import Latch
from aioloader._transport.codec import decode
from aioloader._workers.kept import Pools
from aioloader._workers.ray.actor import Ground, RayActor, copied, places
from aioloader._workers.ray.dispatcher import RayDispatcher, Seat, Ticket
from aioloader._workers.ray.errors import (
    died_too_early,
    died_with,
    meaning_of,
    waits_for_actor,
)
from aioloader._workers.ray.workers import RayWorkers
from aioloader._workers.remote_tasks import (
    Packed,
    opened,
    pack_request,
    pack_spec,
)
from aioloader._workers.worker_spec import WorkerSpec
from aioloader.errors import LoaderClosedError, WorkerError

# Seconds at the end: to leave a dataset's lifespan, then for actors to end.
_LEAVE, _GONE = 3.0, 5.0
# How long a stack may take, in seconds.
_STACK = 1.0
# How often a worker may die before it is ready, and how often a result may get lost.
_EARLY_DEATHS, _LOST = 3, 3

Done = Future[Any]


def lease_actors(
    pools: Pools, workers: RayWorkers, spec: WorkerSpec, *, keep: bool
) -> Lease:
    """Return a lease on Ray actors for one iteration.

    Args:
        pools: Where persistent actors are kept.
        workers: How many, and where.
        spec: What they do.
        keep: Whether they outlive the iteration and serve the next ones.
    """
    ground = Ground(list(sys.path), torch.get_default_dtype())

    def start() -> RayPool:
        ray, connection = workers.connect()
        return RayPool(ray, connection, spec, ground, workers.options())

    begin = partial(pools.open, start, keep=keep)
    return Lease(begin, reads=spec.reads, keep=keep)


class RayPool(LastingPool):
    """The actors of one loader; used from any thread.

    Args:
        ray: The module ``ray``, connected.
        connection: The connection, kept until the actors have ended.
        spec: What the actors do.
        ground: Settings of this process for the actors.
        options: Ray's options of each actor.

    Raises:
        WorkerStartError: If something they need cannot be pickled.
    """

    def __init__(
        self,
        ray: Any,
        connection: object,
        spec: WorkerSpec,
        ground: Ground,
        options: dict[str, Any],
    ) -> None:
        self._ray = ray
        self._connection: object = connection
        self._spec = spec
        self._ground = ground
        self._options = options
        self._shipped = ray.put(pack_spec(spec))
        self._make_actor = ray.remote(RayActor).options(**options)
        self._thread = CpuThread("aioloader-ray")
        self._ended = Latch()
        self._is_over = False
        self._error: BaseException | None = None  # ended the pool, not yet raised
        self._early_deaths = [0] * spec.num_workers
        at_once = places(spec)
        is_addressed = spec.is_addressed
        # None: not known before the user's init function has run.
        self._dispatcher = RayDispatcher(
            at_once, is_addressed=None if spec.worker_init_fn else is_addressed
        )
        self._thread.post(self._place)

    # -- for iterations, from any thread --------------------------------------------

    def submit(self, pipeline: Pipeline, task: BatchTask) -> None:
        """Take a task; its result is delivered by the thread."""
        if not self._thread.post(partial(self._enter, pipeline, task)):
            pipeline.fail(
                self._error or LoaderClosedError("the Ray workers have ended")
            )

    def forget(self, pipeline: Pipeline) -> None:
        """Drop the requests of ``pipeline``."""
        self._thread.post(partial(self._forget, pipeline))

    def explain(self, task: BatchTask) -> str:
        """Describe the actor that has ``task``, since when, and its stack."""
        ticket, seat = self._dispatcher.find(task)
        if ticket is None or seat is None or seat.begun is None:
            return waits_for_actor(self._ray, self._dispatcher.seats, self._options)
        seconds = time.monotonic() - ticket.since
        is_next = ticket is not seat.tickets[0]
        text = (
            f"has been {'queued at' if is_next else 'with'} Ray worker {seat.number} "
            f"(pid {seat.begun.pid} on {seat.begun.host}) for {seconds:.2f} s"
        )
        try:
            stack = self._ray.get(seat.actor.where.remote(), timeout=_STACK)
        except Exception:  # stuck in native code, or gone
            return f"{text}; it does not answer"
        return f"{text}, at:\n{stack}"

    def restart(self, task: BatchTask) -> bool:
        """Kill the actor that has ``task``; return whether there is one."""
        _, seat = self._dispatcher.find(task)
        if seat is not None:
            self._ray.kill(seat.actor)
        return seat is not None

    def is_open(self) -> bool:
        """Tell whether it takes tasks."""
        return not self._is_over

    def end(self) -> None:
        """End the actors in the background, from any thread or finalizer."""
        if not self._is_over:
            self._is_over = True
            self._thread.post(self._end)
            self._thread.stop(self._ended.set)

    def join(self) -> bool:
        """Wait, bounded, until the actors have ended; return whether they have."""
        is_gone = self._ended.wait(_LEAVE + _GONE + 1.0)
        if is_gone:
            self._thread.join(_GONE)
        return is_gone

    # -- in the thread: requests ----------------------------------------------------

    def _enter(self, pipeline: Pipeline, task: BatchTask) -> None:
        self._dispatcher.enter(pipeline, task)
        self._dispatch()

    def _dispatch(self) -> None:
        if self._is_over:
            return
        for seat, ticket in self._dispatcher.assign():
            self._send(seat, ticket)
        for seat, ticket in self._dispatcher.recall():
            seat.actor.return_unmade.remote(ticket.name)

    def _send(self, seat: Seat, ticket: Ticket) -> None:
        try:
            reads = self._spec.reads
            request = pack_request(ticket.pipeline, ticket.task, reads=reads)
        except Exception as error:  # the user's classes may raise when pickled
            seat.tickets.remove(ticket)
            self._deliver(ticket, BatchResult(error=error.with_traceback(None)))
            return
        answer = seat.actor.make.remote(ticket.name, request)
        self._when(answer, partial(self._take, seat, ticket))

    def _forget(self, pipeline: Pipeline) -> None:
        for ticket in self._dispatcher.forget(pipeline):
            for seat in self._dispatcher.seats:
                if ticket in seat.tickets[1:]:
                    seat.actor.return_unmade.remote(ticket.name)

    def _when(self, reference: Any, then: Callable[[Done], None]) -> None:
        """Call ``then`` in the thread when Ray has an answer."""
        # The callback runs in a thread of Ray's, which it must not block.
        reference.future().add_done_callback(
            lambda done: self._thread.post(partial(then, done))
        )

    # -- in the thread: answers -----------------------------------------------------

    def _take(self, seat: Seat, ticket: Ticket, done: Done) -> None:
        if self._is_over:
            return
        error = done.exception()
        meaning = meaning_of(error)
        if error is not None and meaning == "death":
            self._recover(seat, error)
            return
        if ticket in seat.tickets:
            seat.tickets.remove(ticket)
        if meaning == "loss" and ticket.losses < _LOST:
            ticket.losses += 1
            self._dispatcher.put_back(ticket)
        elif error is not None:
            self._deliver(ticket, BatchResult(error=error))
        else:
            self._open(seat, ticket, done.result())
        self._dispatch()

    def _open(self, seat: Seat, ticket: Ticket, packed: Packed | None) -> None:
        if packed is None:  # the actor has not started it
            self._dispatcher.put_back(ticket)
            return
        if not self._dispatcher.remove(ticket):
            return
        pipeline, task = ticket.pipeline, ticket.task
        try:
            answer = decode(*copied(packed, pipeline.maker.pool))
        except Exception as error:  # of a user's class
            text = f"a batch of worker {seat.number} could not be unpickled: {error!r}"
            problem = WorkerError(text, worker=seat.number)
            problem.__cause__ = error
            pipeline.receive(task, BatchResult(error=problem))
            return
        task.samples = []
        pipeline.receive(task, *opened(answer, task))

    def _deliver(self, ticket: Ticket, result: BatchResult) -> None:
        if self._dispatcher.remove(ticket):
            ticket.pipeline.receive(ticket.task, result)

    # -- in the thread: starts and deaths -------------------------------------------

    def _place(self) -> None:
        try:
            numbers = range(self._spec.num_workers)
            self._dispatcher.seats = [self._seat(number) for number in numbers]
        except Exception as error:  # of Ray: every iteration must learn of it
            self._fail(error)

    def _seat(self, number: int) -> Seat:
        """Let Ray place an actor as soon as there is room for it."""
        seat = Seat(number, self._make_actor.remote(number))
        begun = seat.actor.begin.remote(self._shipped, self._ground)
        self._when(begun, partial(self._begin, seat))
        self._when(seat.actor.stay.remote(), partial(self._lose, seat))
        return seat

    def _begin(self, seat: Seat, done: Done) -> None:
        error = done.exception()
        if self._is_over or error is not None:
            self._lose(seat, done)
            return
        begun = done.result()
        if begun.error is not None:
            self._fail(begun.error.raisable())
            return
        seat.begun = begun
        self._early_deaths[seat.number] = 0
        is_addressed = begun.seeds_itself or self._spec.is_addressed
        self._dispatcher.is_addressed = is_addressed
        self._dispatch()

    def _lose(self, seat: Seat, done: Done) -> None:
        error = done.exception()
        if error is not None and not self._is_over:
            if meaning_of(error) == "death":
                self._recover(seat, error)
            else:
                self._fail(error)

    def _recover(self, seat: Seat, error: BaseException) -> None:
        """Let Ray replace a dead actor, and recover its batches."""
        if self._dispatcher.seats[seat.number] is not seat:
            return
        if not self._ray.is_initialized():  # Ray would start a new cluster
            self._fail(error)
            return
        self._ray.kill(seat.actor)  # it may only be unreachable
        if seat.begun is None:
            self._early_deaths[seat.number] += 1
            if self._early_deaths[seat.number] >= _EARLY_DEATHS:
                self._fail(died_too_early(seat, error))
                return
        for ticket in self._dispatcher.recover(seat):
            problem = died_with(ticket, seat, error)
            ticket.pipeline.receive(ticket.task, BatchResult(error=problem))
        self._dispatcher.seats[seat.number] = self._seat(seat.number)
        self._dispatch()

    def _fail(self, error: BaseException) -> None:
        """End all iterations: no actor can make their batches."""
        tickets = self._dispatcher.tickets.values()
        pipelines = {ticket.pipeline for ticket in tickets}
        self._error = None if pipelines else error  # for the next pipeline that submits
        self.end()
        for pipeline in pipelines:
            pipeline.fail(error)

    # -- in the thread: the end -----------------------------------------------------

    def _end(self) -> None:
        # By now another cluster or none may be connected: Ray then refuses.
        with contextlib.suppress(Exception):
            if self._ray.is_initialized():
                self._end_actors()
        self._dispatcher.tickets.clear()
        self._shipped = self._connection = None

    def _end_actors(self) -> None:
        ray, seats = self._ray, self._dispatcher.seats
        if Lifespan(self._spec.dataset, self._spec.lifespan):
            self._await(
                [seat.actor.leave.remote() for seat in seats if seat.begun], _LEAVE
            )
        for seat in seats:
            ray.kill(seat.actor)
        # Calls to them fail when they are gone.
        self._await([seat.actor.where.remote() for seat in seats], _GONE)

    def _await(self, references: list[Any], seconds: float) -> None:
        if references:
            self._ray.wait(references, num_returns=len(references), timeout=seconds)
