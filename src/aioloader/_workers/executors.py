"""A user's ``concurrent.futures.Executor`` as workers: any number, anywhere.

Threads get the work itself. Whatever else (processes, other machines) gets it pickled
by value; the functions and the dataset travel with the first works only, and again when
an executor's worker turns out not to have them.
"""

import itertools
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import (
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ThreadPoolExecutor,
)
from typing import Any, Literal

import torch

from aioloader._order.failures import FailurePolicy
from aioloader._pipeline.recipe import Recipe
from aioloader._pipeline.run import Run
from aioloader._pipeline.work import Outcome, Work
from aioloader._transport.codec import Buffers, decode, encode, encode_by_value
from aioloader._workers.info import WorkerInfo, be_worker_thread
from aioloader._workers.messages import Answer, opened, sendable
from aioloader._workers.parcel import REDUCERS
from aioloader._workers.refusals import explain
from aioloader._workers.remote import RemoteError
from aioloader._workers.seeds import seed_sample, swapped_in
from aioloader._workers.shipment import (
    Shipment,
    send_by_value_what_cannot_be_imported,
)
from aioloader._workers.threads import make
from aioloader.errors import LoaderClosedError, WorkerStartError

# A pickle: header and buffers, as bytes, for executors know no better.
Packed = tuple[bytes, list[bytes]]
_KEPT = 4
_recipes: dict[str, Recipe] = {}  # in an executor's worker: those shipped latest


class ExecutorWorkers:
    """Works handed to an executor; it stays the user's.

    Args:
        executor: Where batches are made.
        shipment: What is to be done there.
    """

    place: Literal["thread"] = "thread"
    pump = None

    def __init__(self, executor: Executor, shipment: Shipment) -> None:
        self.reads = shipment.reads
        self._executor = executor
        self._is_here = isinstance(executor, ThreadPoolExecutor)
        self._shipment = shipment
        self._shipped: Packed | None = None
        self._name = uuid.uuid4().hex
        self._is_over = False
        self._first = itertools.count()
        self._futures: set[Future[Any]] = set()
        self._numbers: dict[int, int] = {}  # of threads, by identifier

    def open(self, run: Run) -> None:
        """Pickle what has to be shipped, if anything has."""
        if self._is_here:
            return
        try:
            send_by_value_what_cannot_be_imported()
            self._shipped = _packed(*encode_by_value(self._shipment, REDUCERS))
        except Exception as error:  # whatever a user's object raises
            failure = WorkerStartError(explain(self._shipment, error))
            failure.__cause__ = error
            run.fail(failure)

    def submit(self, run: Run, work: Work) -> None:
        """Hand ``work`` to the executor."""
        if self._is_here:
            future = self._executor.submit(self._make_here, run, work)
            self._watch(
                future, run, work, lambda done: run.deliver(work, done.result())
            )
            return
        if self._shipped is not None:  # else the run has failed
            is_early = next(self._first) < self._shipment.num_workers
            self._send(run, work, self._shipped if is_early else None)

    def forget(self, run: Run) -> None:  # noqa: ARG002  (the pool's protocol)
        """Cancel what the executor has not begun."""
        self._is_over = True
        for future in list(self._futures):
            future.cancel()

    def join(self) -> bool:
        """Wait for nothing: the executor is the user's."""
        return True

    def explain(self, work: Work) -> str:  # noqa: ARG002  (the pool's protocol)
        """Say where a batch is."""
        return f"is with {type(self._executor).__name__}"

    def restart(self, work: Work) -> bool:  # noqa: ARG002  (the pool's protocol)
        """Do nothing: its workers are not ours."""
        return False

    def _make_here(self, run: Run, work: Work) -> Outcome:
        """Make a batch in a thread of the executor, which is a worker meanwhile."""
        ident = threading.get_ident()
        number = self._numbers.setdefault(ident, len(self._numbers))
        seed = self._shipment.base_seed + number
        dataset = run.recipe.dataset
        be_worker_thread(WorkerInfo(number, self._shipment.num_workers, seed, dataset))
        try:
            return make(run, work, time.sleep)
        finally:
            be_worker_thread(None)

    def _send(self, run: Run, work: Work, shipped: Packed | None) -> None:
        samples = None if self.reads else work.samples
        keys = work.key, work.sample_keys
        told = (run.recipe.epoch, work.number, keys, work.indices, samples)
        request = _packed(*encode(told, REDUCERS))
        future = self._executor.submit(_make_remotely, self._name, shipped, request)

        def take(done: Future[Any]) -> None:
            answer = done.result()
            if answer is None:  # its worker has not got what was shipped
                self._send(run, work, self._shipped)
                return
            work.samples = []
            run.receive(work, *opened(_unpacked(answer)))

        self._watch(future, run, work, take)

    def _watch(
        self,
        future: "Future[Any]",
        run: Run,
        work: Work,
        take: Callable[["Future[Any]"], None],
    ) -> None:
        self._futures.add(future)

        def done(future: Future[Any]) -> None:
            self._futures.discard(future)
            if self._is_over:
                return
            try:
                take(future)
            except BrokenExecutor as error:  # the same for all that it still had
                self._futures.clear()  # to cancel one now would upset it (3.11)
                run.fail(error)
            except CancelledError:
                text = "the executor was shut down, and has cancelled this batch"
                run.deliver(work, Outcome(error=LoaderClosedError(text)))
            except BaseException as error:  # of the executor
                run.deliver(work, Outcome(error=error))

        future.add_done_callback(done)


def _make_remotely(name: str, shipped: Packed | None, request: Packed) -> Packed | None:
    """Make a batch in an executor's worker; None if it lacks what was shipped."""
    recipe = _recipes.get(name)
    if recipe is None:
        if shipped is None:
            return None
        # One thread, as in any worker; in a forked process more would hang in OpenMP.
        torch.set_num_threads(1)
        recipe = _recipe_of(_unpacked(shipped))
        while len(_recipes) >= _KEPT:
            _recipes.pop(next(iter(_recipes)), None)
        _recipes[name] = recipe
    epoch, number, keys, indices, samples = _unpacked(request)
    recipe.epoch = epoch
    work = Work(number, indices, *keys)
    if samples is not None:
        work.samples = samples
    return _packed(*encode(_answer(recipe, work), REDUCERS))


def _recipe_of(shipment: Shipment) -> Recipe:
    return Recipe(
        shipment.dataset if shipment.reads else (),
        shipment.transform,
        shipment.collate_fn,
        batched=shipment.batched,
        policy=FailurePolicy(shipment.on_error),
        retry=shipment.retry,
        reads=shipment.reads,
        seed=seed_sample,
    )


def _answer(recipe: Recipe, work: Work) -> Answer:
    error = None
    outcome = Outcome()
    try:
        if work.key is None:
            outcome = _make(recipe, work)
        else:
            with swapped_in(work.key):
                outcome = _make(recipe, work)
    except Exception as raised:  # of the user's
        error = RemoteError.of(raised, -1)
    if outcome.error is not None:
        error = RemoteError.of(outcome.error, -1)
    failures = sendable(recipe.policy.latest, -1)
    return Answer(outcome.batch, error, outcome.is_empty, failures=failures)


def _make(recipe: Recipe, work: Work) -> Outcome:
    if recipe.reads:
        recipe.read(work, time.sleep)
    return recipe.finish(work)


def _packed(header: bytes, buffers: Buffers) -> Packed:
    return header, [bytes(buffer.raw()) for buffer in buffers]


def _unpacked(packed: Packed) -> Any:
    header, buffers = packed
    return decode(header, [bytearray(buffer) for buffer in buffers])
