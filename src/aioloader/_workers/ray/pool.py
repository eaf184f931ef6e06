"""The loader's side of its Ray actors: requests, answers and retries.

Ray places the actors, and restarts actors that die, alone or with their node. A batch
whose actor has died waits for an idle actor, and fails if that actor also dies.
The pool's state changes in one thread. Consumers post requests to this thread, Ray's
callbacks post answers, and ``end`` posts the end: there are no locks and no polling. A
batch is copied once, from Ray's read-only store.
"""

import bisect
import contextlib
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from aioloader._base.cpu_threads import CpuThread
from aioloader._base.waiting import Latch
from aioloader._pipeline.batch_task import BatchResult, BatchTask, shorten
from aioloader._pipeline.lasting_pool import LastingPool
from aioloader._pipeline.pipeline import Pipeline
from aioloader._workers.ray.actor import ActorStarted, RayActor
from aioloader._workers.ray.workers import RayWorkers
from aioloader._workers.remote_tasks import deliver, pack_request
from aioloader._workers.worker_spec import WorkerSpec
from aioloader.errors import LoaderClosedError, WorkerDiedError
from aioloader.protocols import own_datasets

# Seconds for actors to leave the dataset's lifespan, and then to end.
_LEAVE_SECONDS, _END_SECONDS = 3.0, 5.0
# Seconds to wait for an actor's stack.
_STACK_SECONDS = 1.0
# How many times Ray starts an actor that dies before it is ready.
_MAX_STARTS = 3
# Ray's concurrency group for calls that do not wait for batches.
_ASIDE = "aside"

Done = Future[Any]


@dataclass(eq=False, slots=True)
class _ActorSlot:
    """One worker of the pool, with its actor, which Ray may restart at any time."""

    number: int
    actor: Any
    begun: ActorStarted | None = None  # its process's report; None: not ready
    # The batches that were sent to it and not answered, oldest first.
    tickets: "list[_ActorTask]" = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _ActorTask:
    """A request for a batch, waiting here or sent to an actor."""

    number: int  # its position among all requests
    pipeline: Pipeline
    task: BatchTask
    has_failed: bool = False  # whether an actor has died with it
    seat: _ActorSlot | None = None  # the worker that it was sent to
    begun: ActorStarted | None = None  # the worker's process at that time
    since: float = 0.0  # when it was sent
    answer: Any = None  # Ray's reference to its answer; None while it waits


class RayPool(LastingPool):
    """The Ray actors of one loader; may be used from any thread."""

    def __init__(self, workers: RayWorkers, spec: WorkerSpec) -> None:
        self._ray, self._connection = workers.connect()  # kept until the end
        errors = self._ray.exceptions
        self._deaths = (
            *(errors.RayActorError, errors.NodeDiedError, errors.OutOfMemoryError),
            *(errors.WorkerCrashedError, errors.ObjectLostError),
        )
        self._spec, self._needs = spec, workers.resources
        at_once = 1 if spec.is_plain else spec.window
        # Queue a second batch at single-batch actors; an idle actor may steal it.
        self._depth = 2 if spec.is_plain else at_once
        self._recalls = spec.is_plain and not spec.is_addressed
        # The arguments of ``RayActor.begin``.
        self._settings: tuple[Any, ...] = (
            self._ray.put(spec.pickled()),
            [*sys.path],
            torch.get_default_dtype(),
        )
        self._make_actor = self._ray.remote(
            concurrency_groups={_ASIDE: 1},
            max_concurrency=at_once,
            max_restarts=-1,
            max_task_retries=_MAX_STARTS - 1,  # of ``begin``
            **workers.options(),
        )(RayActor)
        self._thread = CpuThread("aioloader-ray")
        self._ended = Latch()
        self._is_over = False
        self._error: BaseException | None = None  # ended the pool, not raised yet
        self._seats: list[_ActorSlot] = []
        self._waiting: list[_ActorTask] = []  # by number
        self._sent = 0
        self._thread.post(self._place)

    def submit(self, pipeline: Pipeline, task: BatchTask) -> None:
        if not self._thread.post(partial(self._enter, pipeline, task)):
            self._refuse(pipeline)

    def forget(self, pipeline: Pipeline) -> None:
        self._thread.post(partial(self._forget, pipeline))

    def explain(self, task: BatchTask) -> str:
        ticket = self._find(task)
        if ticket is None or ticket.seat is None or ticket.begun is None:
            return self._waits()
        seat, begun = ticket.seat, ticket.begun
        text = (
            f"has been {'with' if seat.tickets[:1] == [ticket] else 'queued at'} Ray "
            f"worker {seat.number} (pid {begun.pid} on {begun.host}) for "
            f"{time.monotonic() - ticket.since:.2f} s"
        )
        try:
            stack = self._ray.get(_aside(seat.actor.where), timeout=_STACK_SECONDS)
        except Exception:  # stuck in native code, or gone
            return f"{text}; it does not answer"
        return f"{text}, at:\n{stack}"

    def restart(self, task: BatchTask) -> bool:
        ticket = self._find(task)
        if ticket is None or ticket.seat is None:
            return False
        return self._thread.post(partial(self._replace, ticket.seat))

    def is_open(self) -> bool:
        return not self._is_over

    def end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._thread.post(self._end)
            self._thread.stop(self._ended.set)

    def join(self) -> bool:
        is_gone = self._ended.wait(_LEAVE_SECONDS + _END_SECONDS + 1.0)
        if is_gone:
            self._thread.join(_END_SECONDS)
        return is_gone

    def _find(self, task: BatchTask) -> _ActorTask | None:
        """Return the ``_ActorTask`` of ``task`` if an actor holds it, else None."""
        tickets = (ticket for seat in self._seats for ticket in seat.tickets[:])
        return next((ticket for ticket in tickets if ticket.task is task), None)

    def _refuse(self, pipeline: Pipeline) -> None:
        pipeline.fail(
            self._error
            or LoaderClosedError("the Ray workers have ended; iterate again")
        )

    def _waits(self) -> str:
        """Return a message that says why a batch waits for an actor."""
        number, ready = len(self._seats), sum(bool(seat.begun) for seat in self._seats)
        if ready == number:
            return f"waits for one of {ready} Ray actors to be free"
        free, total = self._ray.available_resources(), self._ray.cluster_resources()
        each = ", ".join(
            f"{amount:g} {name} ({free.get(name, 0):g} of {total.get(name, 0):g} free)"
            for name, amount in self._needs.items()
            if amount
        )
        return (
            f"waits for a Ray actor: {ready} of {number} are placed, the others wait "
            f"for room in the cluster; each needs {each}"
        )

    def _place(self) -> None:
        try:
            for number in range(self._spec.num_workers):
                self._seats.append(_ActorSlot(number, self._make_actor.remote(number)))
                self._begin(self._seats[-1])
        except Exception as error:  # of Ray: every iteration must raise it
            self._fail(error)

    def _replace(self, seat: _ActorSlot) -> None:
        # Ray would take a second to report the restart of this actor: use a new one.
        self._ray.kill(seat.actor)
        seat.actor = self._make_actor.remote(seat.number)

    def _begin(self, seat: _ActorSlot) -> None:
        """Call the actor's ``begin``, which runs once Ray has placed the actor."""
        seat.begun = None
        begun = seat.actor.begin.remote(*self._settings)
        self._when(begun, partial(self._has_begun, seat))

    def _has_begun(self, seat: _ActorSlot, done: Done) -> None:
        error = done.exception()
        if isinstance(error, self._deaths):
            self._fail(_died_too_early(seat, error))
        elif error is not None:
            self._fail(error)
        elif (begun := done.result()).error is not None:
            self._fail(begun.error.raisable())
        else:
            seat.begun = begun
            self._dispatch()

    def _fail(self, error: BaseException) -> None:
        """End the pool; iterations that wait for its batches raise ``error``."""
        held = [ticket for seat in self._seats for ticket in seat.tickets]
        waiting = {ticket.pipeline for ticket in (*held, *self._waiting)}
        pipelines = [pipeline for pipeline in waiting if not pipeline.is_closing]
        self._error = None if pipelines else error  # for the next pipeline that submits
        self.end()
        for pipeline in pipelines:
            pipeline.fail(error)

    def _when(self, reference: Any, then: Callable[[Done], None]) -> None:
        """Call ``then`` in the pool's thread when Ray answers, if the pool is open."""

        def call(done: Done) -> None:
            if not self._is_over:
                then(done)

        # The callback runs in one of Ray's threads and must not block it.
        reference.future().add_done_callback(
            lambda done: self._thread.post(partial(call, done))
        )

    def _enter(self, pipeline: Pipeline, task: BatchTask) -> None:
        if self._is_over:
            self._refuse(pipeline)
            return
        self._waiting.append(_ActorTask(self._sent, pipeline, task))
        self._sent += 1
        self._dispatch()

    def _dispatch(self) -> None:
        """Recall batches for idle actors; send waiting requests, oldest first."""
        if self._is_over:
            return
        free = [*filter(self._has_room, self._seats)]
        idle = sum(not seat.tickets for seat in free) if self._recalls else 0
        busy = [seat for seat in self._seats if len(seat.tickets) > 1]
        for seat, _ in zip(busy, range(idle - len(self._waiting)), strict=False):
            self._recall(seat, seat.tickets[-1])
        is_addressed = self._spec.is_addressed
        for ticket in self._waiting[:]:
            number = ticket.task.number % len(self._seats)
            mine = [seat for seat in free if not is_addressed or seat.number == number]
            able = [seat for seat in mine if not (ticket.has_failed and seat.tickets)]
            if able:
                self._waiting.remove(ticket)
                self._send(min(able, key=lambda seat: len(seat.tickets)), ticket)
            else:  # no later batch may overtake it, or it might wait forever
                free = [seat for seat in free if seat not in mine]
            free = [*filter(self._has_room, free)]

    def _has_room(self, seat: _ActorSlot) -> bool:
        is_shared = not any(ticket.has_failed for ticket in seat.tickets)
        return bool(seat.begun) and is_shared and len(seat.tickets) < self._depth

    def _send(self, seat: _ActorSlot, ticket: _ActorTask) -> None:
        try:
            request = pack_request(ticket.pipeline, ticket.task)
        except Exception as error:  # the user's classes may raise when pickled
            result = BatchResult(error=error.with_traceback(None))
            ticket.pipeline.receive(ticket.task, result)
            return
        ticket.seat, ticket.begun, ticket.since = seat, seat.begun, time.monotonic()
        answer = seat.actor.make.options(max_task_retries=0).remote(request)
        ticket.answer = answer
        seat.tickets.append(ticket)
        self._when(answer, partial(self._take, seat, ticket, answer))

    def _forget(self, pipeline: Pipeline) -> None:
        self._waiting = [t for t in self._waiting if t.pipeline is not pipeline]
        for seat in self._seats if not self._is_over else ():
            for ticket in seat.tickets[1:]:
                if ticket.pipeline is pipeline:
                    self._recall(seat, ticket)

    def _recall(self, seat: _ActorSlot, ticket: _ActorTask) -> None:
        """Cancel a batch that is queued at an actor, and queue it here again.

        Ray cancels a call that has not started; a started call's answer is dropped.
        """
        self._ray.cancel(ticket.answer)
        seat.tickets.remove(ticket)
        ticket.answer = None
        self._put_back(ticket)

    def _take(
        self, seat: _ActorSlot, ticket: _ActorTask, answer: Any, done: Done
    ) -> None:
        if ticket.answer is not answer:  # it was recalled
            return
        seat.tickets.remove(ticket)
        error = done.exception()
        pipeline, task = ticket.pipeline, ticket.task
        if isinstance(error, self._deaths) or (not error and done.result() is None):
            self._lose(seat, ticket, error)
        elif error is not None:
            pipeline.receive(task, BatchResult(error=error))
        else:
            deliver(pipeline, task, done.result(), seat.number)
        self._dispatch()

    def _lose(
        self, seat: _ActorSlot, ticket: _ActorTask, error: BaseException | None
    ) -> None:
        """Retry or fail a batch whose actor died, or restarted if ``error`` is None."""
        if not self._ray.is_initialized():  # Ray would start a new cluster
            self._fail(
                error or LoaderClosedError("the Ray workers have ended; iterate again")
            )
            return
        if seat.begun is ticket.begun:
            self._begin(seat)
        if error is not None and ticket.has_failed:
            problem = _died_with(ticket, seat, error)
            ticket.pipeline.receive(ticket.task, BatchResult(error=problem))
            return
        ticket.has_failed = ticket.has_failed or error is not None
        self._put_back(ticket)

    def _put_back(self, ticket: _ActorTask) -> None:
        if not ticket.pipeline.is_closing:
            bisect.insort(self._waiting, ticket, key=lambda waiting: waiting.number)

    def _end(self) -> None:
        # Meanwhile the process may have left the cluster: Ray then raises.
        with contextlib.suppress(Exception):
            if self._ray.is_initialized():
                self._end_actors()
        self._seats, self._waiting = [], []
        self._settings, self._connection = (), None

    def _end_actors(self) -> None:
        if self._spec.lifespan is not None or own_datasets(self._spec.dataset):
            begun = [seat for seat in self._seats if seat.begun]
            self._await([_aside(seat.actor.leave) for seat in begun], _LEAVE_SECONDS)
        for seat in self._seats:
            self._ray.kill(seat.actor)
        # These calls fail as soon as the actors are gone.
        self._await([_aside(seat.actor.where) for seat in self._seats], _END_SECONDS)

    def _await(self, references: list[Any], seconds: float) -> None:
        if references:
            self._ray.wait(references, num_returns=len(references), timeout=seconds)


def _aside(method: Any) -> Any:
    """Call an actor's method without queueing it after the actor's batches."""
    return method.options(concurrency_group=_ASIDE, max_task_retries=0).remote()


def _died_with(
    ticket: _ActorTask, seat: _ActorSlot, error: BaseException
) -> WorkerDiedError:
    """Return the error for a batch that was in hand when a second actor died."""
    task, begun = ticket.task, ticket.begun
    assert begun is not None
    who = f"(pid(s) {begun.pid} on {begun.host})"
    died = WorkerDiedError(
        f"DataLoader worker {who} exited unexpectedly with batch {task.number} in "
        f"hand, sample indices {shorten(task.indices)}; it is not the first worker "
        f"that this batch has cost. Ray says: {error}",
        worker=seat.number,
        pid=begun.pid,
        batch=task.number,
    )
    died.__cause__ = error.with_traceback(None)
    return died


def _died_too_early(seat: _ActorSlot, error: BaseException) -> WorkerDiedError:
    """Return the error for a worker whose actors died before they were ready."""
    died = WorkerDiedError(
        f"DataLoader worker {seat.number} died as a Ray actor before it started, and "
        "so did those before it. Is aioloader installed on every node? Ray says: "
        f"{error}",
        worker=seat.number,
    )
    died.__cause__ = error.with_traceback(None)
    return died
