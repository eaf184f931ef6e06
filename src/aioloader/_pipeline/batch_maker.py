"""The user's functions, and what surrounds each call: retries, skips, notes.

``make`` makes a batch in the calling thread, wherever that is; the fetchers await reads
and transforms that are coroutines. Both read again in the same way.
"""

import contextlib
import copy
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, Final, NamedTuple

import torch

from aioloader._collate.collate import (
    collates_as_torch,
    collates_quickly,
    default_collate,
    lending,
)
from aioloader._collate.gather import Rows, gatherable
from aioloader._observe.records import spent, thread_clocks
from aioloader._order.blocks import Bad
from aioloader._order.failures import SKIP, Failure, FailurePolicy, noted
from aioloader._order.indices import IndexBatch
from aioloader._order.raising import STOPS, raisable
from aioloader._order.retry import RETRIED
from aioloader._pipeline.awaiting import (
    SideLoop,
    close_coroutines,
    holds_awaitables,
    refuse_coroutines,
    run_now,
    user_error,
)
from aioloader._pipeline.batch_task import BatchResult, BatchTask, place_of
from aioloader._pipeline.keys import BatchSeeds, Keys
from aioloader._pipeline.position import Loads
from aioloader._pipeline.recipe import Recipe
from aioloader._transport.slots import Lender, SlotPool
from aioloader.errors import FailureBudgetError
from aioloader.protocols import (
    Kind,
    batch_getter,
)

_NOTHING: Final = contextlib.nullcontext()
# What raises in each stage, for errors.
_DATASET: Final = "the dataset"
_WHAT: Final = {"fetch": _DATASET, "collate": "collate_fn"}


def nothing_around(_task: BatchTask) -> AbstractContextManager[None]:
    """Leave the generators alone."""
    return _NOTHING


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


class Reading(NamedTuple):
    """How samples are read again: in a thread, or on the loop.

    On the loop these return awaitables, in a thread they wait themselves.

    Attributes:
        get: Returns the sample at a position of a task.
        get_batch: Returns all samples of a task.
        pause: Sleeps between attempts.
        error: Returns an error of the dataset as the consumer gets it.
    """

    get: Callable[[BatchTask, int], Any]
    get_batch: Callable[[BatchTask], Any]
    pause: Callable[[float], Any]
    error: Callable[[BaseException], BaseException]


@dataclass(kw_only=True, eq=False)
class BatchMaker(Recipe):
    """A recipe at work in one epoch: it makes batches from indices.

    Attributes:
        policy: What happens to failed samples.
        epoch: Epoch number, for notes.
        pool: The slots that big batches are written into.
        around: Entered while plain code works on a task, to seed the generators.
        reseed: Seeds the generators again for a task whose user code restored them.
        seed: Called before each read and transform of a sample that has its own seed,
            with the task, the position and the stage (0: read, 1: transform).
        at: Called with the same arguments before a coroutine reads or transforms a
            sample, or a whole batch (position -1), if its batch has a seed.
        keys: Returns the keys that generators are seeded with; None: no seeding.
        loads: What an iterable dataset does with a loaded state.
    """

    policy: FailurePolicy
    epoch: int = 0
    pool: Lender = field(default_factory=SlotPool)
    around: Callable[[BatchTask], AbstractContextManager[None]] = nothing_around
    reseed: Callable[[BatchTask], None] | None = None
    seed: Callable[[BatchTask, int, int], None] | None = None
    at: Callable[[BatchTask, int, int], None] | None = None
    keys: Keys | None = None
    loads: Loads = field(default_factory=Loads)
    side_loop: SideLoop = field(default_factory=SideLoop, init=False)
    # Looked up once: a look-up per sample takes 5 % of the time of a small one.
    get: Callable[[Any], Any] = field(init=False)
    get_batch: Callable[[Any], Any] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.kind is Kind.MAP and self.reads:
            self.get = self.dataset.__getitem__
            self.get_batch = self._batch_getter() if self.batched else None

    def _batch_getter(self) -> Callable[[Any], Any] | None:
        """Return the dataset's ``__getitems__``, if batches are read with it."""
        is_plain = self.transform is None and self.collate_fn is default_collate
        if is_plain and self.on_error == "raise" and collates_as_torch():
            tensors = gatherable(self.dataset)
            if tensors is not None:
                return partial(Rows, tensors)
        return batch_getter(self.dataset)

    def task(self, batch: IndexBatch) -> BatchTask:
        """Return the task for a request."""
        number, first, indices, padding, state = batch
        task = BatchTask(number, indices, padding=padding, state=state)
        if self.keys is not None:
            task.key, task.sample_keys = self.keys(number, first)
        return task

    def seeds(self, reader: int = 0, readers: int = 1) -> BatchSeeds | None:
        """Return the seeds of the batches of a reader, if there are any."""
        if self.keys is None:
            return None
        return BatchSeeds(self.keys, self.part, reader, readers)

    def leave_generators(self) -> None:
        """Do not seed the generators: the user's code does."""
        self.around, self.reseed = nothing_around, None
        self.seed = self.at = None

    # -- making a batch, in plain code ---------------------------------------------

    def make(
        self,
        task: BatchTask,
        read: Callable[[BatchTask], object] | None = None,
        enter: Callable[[str], object] | None = None,
        *,
        seeded: bool = True,
    ) -> BatchResult:
        """Make one batch in this thread, in plain code; errors become its result.

        Args:
            task: The batch.
            read: Reads its samples: ``read`` of this maker, or ``pull`` of a stream;
                None if they are there.
            enter: Called with the name of each stage after the first, if given.
            seeded: Whether user code runs, which may draw random numbers.
        """
        clocks = thread_clocks(task.number)
        try:
            with self.around(task) if seeded else _NOTHING:
                if read is not None:
                    read(task)
                result = task.result
                if result is None:
                    if enter is not None:
                        enter("transform")
                    self.apply(task)
                    if enter is not None:
                        enter("collate")
                    result = self.collate(task)
                    task.spent = spent(clocks)
        except BaseException as error:  # handed to the consumer
            return BatchResult(error=error)
        finally:
            task.samples = []
        return result

    def fetch(self, task: BatchTask, read: Callable[[BatchTask], object]) -> None:
        """Read the samples of ``task`` in this thread; errors become its result."""
        try:
            with self.around(task):
                read(task)
        except BaseException as error:  # handed to the consumer
            task.result = BatchResult(error=error)

    def read(
        self, task: BatchTask, pause: Callable[[float], object] = time.sleep
    ) -> None:
        """Read the samples of ``task``; ``pause`` sleeps between attempts."""
        task.began = perf_counter()
        self.policy.begin(len(task.indices))
        try:
            is_whole = self.get_batch is not None
            if not is_whole or not run_now(self.whole(task, self._reading(pause))):
                self._read_each(task, pause)
            if holds_awaitables(task.samples):
                self._await_samples(task, pause)
        except BaseException:
            close_coroutines(task.samples)
            raise
        task.read = perf_counter()

    def apply(self, task: BatchTask) -> None:
        """Transform the samples of ``task`` in place."""
        transform, samples = self.transform, task.samples
        if transform is None or self.transforms_async:
            return
        task.stage = "transform"
        task.started = perf_counter()
        for position, sample in enumerate(samples):
            if sample is not SKIP:
                try:
                    self._seed(task, position, 1)
                    samples[position] = transform(sample)
                except BaseException as error:  # the policy decides
                    samples[position] = self.resolve("transform", task, position, error)
        refuse_coroutines(samples, "transform")

    def collate(self, task: BatchTask) -> BatchResult:
        """Make the batch of ``task``, or nothing if every sample was skipped."""
        task.stage = "collate"
        task.transformed = perf_counter()
        samples = self.kept(task)
        if self.is_void(samples):
            return self._nothing(task)
        try:
            with lending(self.pool):
                batch = self.collate_fn(samples if self.batched else samples[0])
            refuse_coroutines(batch, "collate_fn")
        except BaseException as error:
            raise self.batch_error("collate", task, error)  # noqa: B904  (it keeps its cause)
        return self.made(task, batch)

    async def collate_async(self, task: BatchTask) -> BatchResult:
        """Await the batch of ``task``, as ``collate`` makes it."""
        task.stage = "collate"
        task.transformed = perf_counter()
        samples = self.kept(task)
        if self.is_void(samples):
            return self._nothing(task)
        if self.at is not None and task.key is not None:
            self.at(task, -1, 2)
        try:
            batch = await self.collate_fn(samples if self.batched else samples[0])
        except BaseException as error:
            error = user_error(error, "collate_fn")
            raise self.batch_error("collate", task, error)  # noqa: B904  (it keeps its cause)
        return self.made(task, batch)

    def is_quick(self, task: BatchTask) -> bool:
        """Tell whether the rest of ``task`` takes only a fraction of a millisecond.

        True for a few small samples under torch's own rules, and for columns that say
        so. Such a batch is collated on the event loop: a hop to a thread would cost
        more.
        """
        samples = task.samples
        if self.transform is not None or type(samples) is not list:
            return getattr(samples, "is_quick", False) and self.transform is None
        return collates_quickly(self.collate_fn, samples)

    def made(self, task: BatchTask, batch: Any) -> BatchResult:
        """Return the result of a batch, with a mask of its padding if requested."""
        task.collated = perf_counter()
        if self.part.masks():
            batch = batch, self._mask(task)
        return BatchResult(batch)

    def _mask(self, task: BatchTask) -> torch.Tensor:
        samples = task.samples if type(task.samples) is list else task.indices
        real = len(samples) - task.padding
        kept = [k < real for k, sample in enumerate(samples) if sample is not SKIP]
        return torch.tensor(kept if self.batched else kept[0])

    def kept(self, task: BatchTask) -> Any:
        """Return the samples of ``task`` that were not skipped; count the others."""
        samples = task.samples
        if self._may_skip() and type(samples) is list:
            samples = [sample for sample in samples if sample is not SKIP]
            task.missing += len(task.samples) - len(samples)
        return samples

    def is_void(self, samples: Any) -> bool:
        """Tell whether all samples of a batch were skipped."""
        return self._may_skip() and type(samples) is list and not samples

    def _nothing(self, task: BatchTask) -> BatchResult:
        """Return an empty result; raise if other ranks have this batch and wait."""
        if self.is_even:
            raise FailureBudgetError(
                f"all {len(task.indices)} samples of batch {task.number} of epoch "
                f"{self.epoch} failed and were skipped, but other ranks have this "
                "batch and would wait: have on_error return samples to use instead",
                failures=self.policy.count,
                attempted=self.policy.attempted,
            )
        return BatchResult(is_empty=True)

    def _may_skip(self) -> bool:
        return bool(self.policy.count) or not self.reads

    def leave(self, task: BatchTask, result: BatchResult) -> BatchResult:
        """Add to a result the state of a map-style dataset after it."""
        if not self.keeps_state or result.error is not None:
            return result
        try:
            result.dataset = 0, copy.deepcopy(self.dataset.state_dict())
        except BaseException as error:  # handed to the consumer
            where = f"in the dataset's state_dict(), {self.place('fetch', task)}"
            error = noted(raisable(error, _DATASET), where)
            return BatchResult(error=error, state=result.state)
        return result

    def close(self) -> None:
        """End the waits for what plain code returned; finalizers may call it."""
        self.side_loop.close()

    # -- reading --------------------------------------------------------------------

    def _read_each(self, task: BatchTask, pause: Callable[[float], object]) -> None:
        """Append a sample for each index of ``task`` that has none yet."""
        samples, indices = task.samples, task.indices
        get = self.get if task.sample_keys is None else self._seeded_get(task)
        while len(samples) < len(indices):
            rest = indices[len(samples) :] if samples else indices
            try:
                # Samples that came before an error stay in the list.
                samples.extend(map(get, rest))
            except BaseException as error:  # retried, or the policy decides
                samples.append(self._reread(task, len(samples), error, pause))
            else:
                if len(samples) < len(indices):  # a StopIteration ended ``map``
                    stop = StopIteration()
                    samples.append(self._reread(task, len(samples), stop, pause))

    def _seeded_get(self, task: BatchTask) -> Callable[[Any], Any]:
        """Return ``get`` for the samples of ``task`` in order, each with its seed."""
        position = len(task.samples)

        def get(index: Any) -> Any:
            nonlocal position
            # After an error, skip the position of the sample's replacement.
            position = max(position, len(task.samples))
            self._seed(task, position, 0)
            position += 1
            return self.get(index)

        return get

    def _seed(self, task: BatchTask, position: int, stage: int) -> None:
        if task.sample_keys is not None and self.seed is not None:
            self.seed(task, position, stage)

    def _reread(
        self,
        task: BatchTask,
        position: int,
        error: BaseException,
        pause: Callable[[float], object],
    ) -> Any:
        return run_now(self.again(task, position, error, self._reading(pause)))

    def _reading(self, pause: Callable[[float], object]) -> Reading:
        """Return how samples are read in this thread."""

        def get(task: BatchTask, position: int) -> Any:
            self._seed(task, position, 0)
            sample = self.get(task.indices[position])
            is_later = holds_awaitables([sample])
            return self.side_loop.wait_for(sample) if is_later else sample

        def get_batch(task: BatchTask) -> Any:
            samples = self.get_batch(task.indices)  # type: ignore[misc]
            is_later = inspect.isawaitable(samples)
            return self.side_loop.wait_for(samples) if is_later else samples

        return Reading(get, get_batch, pause, lambda error: raisable(error, _DATASET))

    # -- reading again, in a thread or on the loop ------------------------------------

    async def again(
        self, task: BatchTask, position: int, error: BaseException, how: Reading
    ) -> Any:
        """Return the sample at ``position``, whose first read raised ``error``.

        It is read again as often as ``retry`` says; then the policy decides.
        """
        error = how.error(error)
        for delay in self.delays(error):
            await _awaited(how.pause(delay))
            try:
                return await _awaited(how.get(task, position))
            except BaseException as caught:  # counted, then resolved
                error = how.error(caught)
                if not self.may_retry(error):
                    break
        return self.resolve("fetch", task, position, error)

    async def whole(self, task: BatchTask, how: Reading) -> bool:
        """Read all of ``task`` with ``__getitems__``; retried as a whole.

        Returns:
            False if it failed, and the policy is to decide about each sample.
        """
        delays: Iterator[float] | None = None
        while True:
            try:
                samples = await _awaited(how.get_batch(task))
                task.samples = self.checked(task, samples)
            except BaseException as caught:
                error = how.error(caught)
                delays = delays or self.delays(error)
                delay = next(delays, None) if self.may_retry(error) else None
                if delay is None and self._reads_one_by_one(error):
                    return False
                if delay is None:
                    raise self.batch_error("fetch", task, error)  # noqa: B904  (it keeps its cause)
            else:
                return True
            await _awaited(how.pause(delay))

    def _reads_one_by_one(self, error: BaseException) -> bool:
        """Tell whether the samples of a batch that failed are read one by one."""
        may_skip = self.on_error != "raise" and isinstance(error, Exception)
        return may_skip and hasattr(self.dataset, "__getitem__")

    def _await_samples(self, task: BatchTask, pause: Callable[[float], object]) -> None:
        """Await what a plain ``__getitem__`` has returned, a batch at a time."""
        for position, found in enumerate(
            self.side_loop.resolve(task.samples, self.concurrency)
        ):
            if type(found) is Bad:
                found = self._reread(task, position, found.error, pause)  # noqa: PLW2901
            task.samples[position] = found

    # -- failures -----------------------------------------------------------------

    def resolve(
        self, stage: str, task: BatchTask, position: int, error: BaseException
    ) -> Any:
        """Return the replacement of a failed sample, or raise, by the policy."""
        if self.side_loop.is_closed:
            raise error  # of an iteration that is over
        failure = Failure(
            stage=stage,
            epoch=self.epoch,
            batch=task.number,
            position=position,
            index=task.indices[position],
            error=raisable(error, _WHAT.get(stage, stage)),  # type: ignore[arg-type]
        )
        try:
            return self.policy.resolve(failure)
        except STOPS as stop:  # of on_error
            raise raisable(stop, "on_error")  # noqa: B904  (it keeps its cause)

    def batch_error(
        self, stage: str, task: BatchTask, error: BaseException
    ) -> BaseException:
        """Return the error to raise, noted, if ``error`` is that of a whole batch."""
        error = raisable(error, _WHAT.get(stage, stage))
        return noted(error, self.place(stage, task))

    def place(self, stage: str, task: BatchTask) -> str:
        """Return the error note for a stage that processes whole batches."""
        return place_of(stage, self.epoch, task.number, task.indices)

    def checked(self, task: BatchTask, samples: Any) -> Any:
        """Return the result of ``__getitems__`` if it can be used.

        Without a transform it goes to ``collate_fn`` as it is, as in torch.

        Raises:
            ValueError: If there is a transform and the length differs.
        """
        if self.transform is None:
            return samples
        if len(samples) != len(task.indices):
            raise ValueError(
                f"{type(self.dataset).__name__}.__getitems__ returned {len(samples)} "
                f"samples for {len(task.indices)} indices"
            )
        return list(samples)

    def delays(self, error: BaseException) -> Iterator[float]:
        """Return the delays before further attempts at a read that raised ``error``."""
        if self.retry is not None and self.may_retry(error):
            key = object()
            try:
                for delay in self.retry.delays():
                    self.policy.count_retries(1)
                    RETRIED[key] = error
                    yield delay
            finally:
                RETRIED.pop(key, None)

    def may_retry(self, error: BaseException) -> bool:
        """Tell whether a read that raised ``error`` may be retried."""
        if self.retry is None or not isinstance(error, Exception):
            return False
        try:
            return self.retry.is_worth(error)
        except BaseException as own:
            raise raisable(own, "retry")  # noqa: B904  (it keeps its cause)
