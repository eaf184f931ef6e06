"""The user's functions, and what surrounds each call: retries, skips, notes.

``make`` makes a batch in plain code, in the calling thread; ``amake`` on a loop, with
coroutines. Both read again in the same way.
"""

import asyncio
import contextlib
import copy
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, TypeAlias

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
from aioloader._order.raising import STOPS, ends_task, raisable
from aioloader._order.retry import RETRIED
from aioloader._pipeline.awaiting import (
    SideLoop,
    close_coroutines,
    holds_awaitables,
    refuse_coroutines,
    resolved,
    run_now,
    user_error,
)
from aioloader._pipeline.batch_task import MISSING, BatchResult, BatchTask, place_of
from aioloader._pipeline.position import Loads
from aioloader._pipeline.recipe import Recipe
from aioloader._transport.slots import Lender, SlotPool
from aioloader.errors import FailureBudgetError
from aioloader.protocols import Kind, batch_getter, is_async_function

if TYPE_CHECKING:
    from aioloader._pipeline.lanes import Lanes

_NOTHING: Final = contextlib.nullcontext()
# What raises in each stage, for errors.
_DATASET: Final = "the dataset"
_WHAT: Final = {"fetch": _DATASET, "collate": "collate_fn"}
# Maps a batch's number and the position of its first sample to a ``BatchTask``'s keys.
Keys: TypeAlias = Callable[[int, int], tuple[int, tuple[int, int, int] | None]]
# Sleeps in a thread between two reads; None: coroutines read, on a loop.
Pause: TypeAlias = Callable[[float], object]


def nothing_around(_task: BatchTask) -> AbstractContextManager[None]:
    """Leave the generators alone."""
    return _NOTHING


def _seeds_of(
    keys: Keys, rank: int, reader: int, readers: int, number: int, whole: int
) -> tuple[int, tuple[int, int, int] | None]:
    """Return the keys of one of a reader's batches, of ``whole`` samples on all ranks.

    ``number`` counts the batches of this reader.
    """
    number = number * readers + reader
    return keys(number, number * whole + rank)


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
        failed_reads: How many reads of coroutines have failed, those retried too.
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
    failed_reads: int = field(default=0, init=False)
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

    @cached_property
    def _is_wrapped(self) -> bool:
        """Whether a plain wrapper of an async dataset returns awaitables."""
        return not is_async_function(self.get)

    def task(self, batch: IndexBatch) -> BatchTask:
        """Return the task for a request."""
        number, first, indices, padding, state = batch
        task = BatchTask(number, indices, padding=padding, state=state)
        if self.keys is not None:
            task.key, task.sample_keys = self.keys(number, first)
        return task

    def seeds(self, reader: int = 0, readers: int = 1) -> Keys | None:
        """Return the keys of a reader's batches, if there are any."""
        if self.keys is None:
            return None
        return partial(_seeds_of, self.keys, self.part.rank, reader, readers)

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

    def fetch(
        self, task: BatchTask, read: Callable[[BatchTask], object]
    ) -> BatchResult | None:
        """Read the samples of ``task`` in this thread; return an error, or the end."""
        try:
            with self.around(task):
                read(task)
        except BaseException as error:  # handed to the consumer
            return BatchResult(error=error)
        return task.result

    def read(self, task: BatchTask, pause: Pause = time.sleep) -> None:
        """Read the samples of ``task``; ``pause`` sleeps between attempts."""
        task.began = perf_counter()
        self.policy.begin(len(task.indices))
        try:
            if self.get_batch is None or not run_now(self._whole(task, pause)):
                self._read_each(task, pause)
            if holds_awaitables(task.samples):
                self._await_samples(task, pause)
        except BaseException:
            close_coroutines(task.samples)
            raise
        task.read = perf_counter()

    def _read_each(self, task: BatchTask, pause: Pause) -> None:
        get, samples = self.get, task.samples
        seed = self.seed if task.sample_keys is not None else None
        for index in task.indices:
            try:
                if seed is not None:
                    seed(task, len(samples), 0)
                samples.append(get(index))
            except BaseException as error:  # retried, or the policy decides
                samples.append(run_now(self._again(task, len(samples), error, pause)))

    def _await_samples(self, task: BatchTask, pause: Pause) -> None:
        """Await what a plain ``__getitem__`` has returned, a batch at a time."""
        awaited = self.side_loop.resolve(task.samples, self.concurrency)
        for position, found in enumerate(awaited):
            if type(found) is Bad:
                again = self._again(task, position, found.error, pause)
                found = run_now(again)  # noqa: PLW2901
            task.samples[position] = found

    def apply(self, task: BatchTask) -> None:
        """Transform the samples of ``task`` in place."""
        transform, samples = self.transform, task.samples
        if transform is None or self.transforms_async:
            return
        task.stage = "transform"
        task.started = perf_counter()
        seed = self.seed if task.sample_keys is not None else None
        for position, sample in enumerate(samples):
            if sample is not SKIP:
                try:
                    if seed is not None:
                        seed(task, position, 1)
                    samples[position] = transform(sample)
                except BaseException as error:  # the policy decides
                    samples[position] = self.resolve("transform", task, position, error)
        refuse_coroutines(samples, "transform")

    def collate(self, task: BatchTask) -> BatchResult:
        """Make the batch of ``task``, or nothing if every sample was skipped."""
        samples = self._kept(task)
        if samples is SKIP:
            return self._nothing(task)
        try:
            with lending(self.pool):
                batch = self.collate_fn(samples if self.batched else samples[0])
            refuse_coroutines(batch, "collate_fn")
        except BaseException as error:
            raise self._batch_error("collate", task, error)  # noqa: B904  (it keeps its cause)
        return self._made(task, batch)

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

    def _kept(self, task: BatchTask) -> Any:
        """Return the samples that were not skipped; ``SKIP`` if all were."""
        task.stage, task.transformed = "collate", perf_counter()
        samples = task.samples
        if type(samples) is list and (self.policy.count or not self.reads):
            samples = [sample for sample in samples if sample is not SKIP]
            task.missing += len(task.samples) - len(samples)
            if not samples:
                return SKIP
        return samples

    def _made(self, task: BatchTask, batch: Any) -> BatchResult:
        """Return the result of a batch, with a mask of its padding if requested."""
        task.collated = perf_counter()
        if self.part.tail == "pad":
            samples = task.samples if type(task.samples) is list else task.indices
            real = len(samples) - task.padding
            kept = [k < real for k, one in enumerate(samples) if one is not SKIP]
            batch = batch, torch.tensor(kept if self.batched else kept[0])
        return BatchResult(batch)

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

    # -- making a batch, on a loop -------------------------------------------------

    async def amake(
        self,
        task: BatchTask,
        lanes: "Lanes",
        call: Callable[[Callable[[], Any]], Awaitable[Any]],
        read: Callable[[BatchTask], object] | None,
    ) -> BatchResult | None:
        """Make one batch on this loop: coroutines in ``lanes``, plain code elsewhere.

        Args:
            task: The batch.
            lanes: Run its reads and transforms, before those of later batches.
            call: Awaits plain code in a thread.
            read: Reads its samples there; None if coroutines do, or if they are there.

        Returns:
            Its result, if only an error; None if the rest of it is plain.
        """
        try:
            is_each = False  # transformed, each after its read
            if self.reads_async:
                is_each = await self._aread(task, lanes)
            elif read is not None:
                task.result = await call(partial(self.fetch, task, read))
            if task.result is None and self.transforms_async and not is_each:
                task.stage = "transform"
                jobs = await lanes.run(task, self._transform, len(task.samples))
                task.started, task.busy = jobs.began, task.busy + jobs.busy
            if task.result is not None or not self.collates_async:
                return task.result
            if self.transform is not None and not self.transforms_async:
                await call(partial(self._apply_seeded, task))
            return await self._acollate(task)
        except BaseException as error:  # handed to the consumer
            if ends_task(error):
                raise
            return BatchResult(error=error)

    async def _aread(self, task: BatchTask, lanes: "Lanes") -> bool:
        """Read the samples of ``task``; tell whether one by one."""
        self.policy.begin(len(task.indices))
        if self.get_batch is not None:
            jobs = await lanes.run(task, lambda task, _: self._whole(task, None), 1)
            task.began, task.read = jobs.began, perf_counter()
            if jobs.found:
                return False
        task.samples = [MISSING] * len(task.indices)
        jobs = await lanes.run(task, self._fetch, len(task.indices))
        task.began, task.read = task.began or jobs.began, perf_counter()
        task.busy = jobs.busy
        return True

    async def _fetch(self, task: BatchTask, position: int) -> None:
        """Read one sample; an async transform follows at once."""
        self._seed_task(task, position, 0)
        try:
            sample = self.get(task.indices[position])
            sample = await (resolved(sample) if self._is_wrapped else sample)
        except BaseException as error:  # retried, or the policy decides
            sample = await self._again(task, position, error, None)
        task.samples[position] = sample
        if self.transforms_async:
            await self._transform(task, position)

    async def _transform(self, task: BatchTask, position: int) -> None:
        sample = task.samples[position]
        if sample is SKIP:
            return
        self._seed_task(task, position, 1)
        try:
            sample = await self.transform(sample)  # type: ignore[misc]
        except BaseException as error:  # the policy decides
            error = user_error(error, "transform")
            sample = self.resolve("transform", task, position, error)
        task.samples[position] = sample

    async def _acollate(self, task: BatchTask) -> BatchResult:
        """Await the batch of ``task``, as ``collate`` makes it."""
        samples = self._kept(task)
        if samples is SKIP:
            return self._nothing(task)
        self._seed_task(task, -1, 2)
        try:
            batch = await self.collate_fn(samples if self.batched else samples[0])
        except BaseException as error:
            error = user_error(error, "collate_fn")
            raise self._batch_error("collate", task, error)  # noqa: B904  (it keeps its cause)
        return self._made(task, batch)

    def _apply_seeded(self, task: BatchTask) -> None:
        with self.around(task):
            self.apply(task)

    def _seed_task(self, task: BatchTask, position: int, stage: int) -> None:
        """Make this asyncio task draw from the generators of its sample or batch."""
        if task.key is not None and self.at is not None:
            self.at(task, position, stage)

    # -- reading again, in a thread or on the loop ------------------------------------

    async def _again(
        self, task: BatchTask, position: int, error: BaseException, pause: Pause | None
    ) -> Any:
        """Return the sample at ``position``, whose first read raised ``error``."""

        async def get() -> Any:
            if pause is None:
                self._seed_task(task, position, 0)
                return await resolved(self.get(task.indices[position]))
            if self.seed is not None and task.sample_keys is not None:
                self.seed(task, position, 0)
            sample = self.get(task.indices[position])
            is_later = holds_awaitables([sample])
            return self.side_loop.wait_for(sample) if is_later else sample

        found, last = await self._retried(get, pause, self._read_error(error, pause))
        try:
            if last is not None:
                return self.resolve("fetch", task, position, last)
            return found
        finally:
            del error, last  # their tracebacks hold this frame

    async def _whole(self, task: BatchTask, pause: Pause | None) -> bool:
        """Read all of ``task`` with ``__getitems__``; retried as a whole.

        Returns:
            False if it failed, and the policy is to decide about each sample.
        """
        assert self.get_batch is not None
        get_batch = self.get_batch

        async def get() -> None:
            if pause is None:
                self._seed_task(task, -1, 0)
            samples = get_batch(task.indices)
            if pause is None:
                samples = await resolved(samples)
            elif inspect.isawaitable(samples):
                samples = self.side_loop.wait_for(samples)
            task.samples = self._checked(task, samples)

        _, last = await self._retried(get, pause)
        try:
            if last is None:
                return True
            may_skip = self.on_error != "raise" and isinstance(last, Exception)
            if may_skip and hasattr(self.dataset, "__getitem__"):
                return False
            raise self._batch_error("fetch", task, last)
        finally:
            del last  # its traceback holds this frame

    async def _retried(
        self,
        get: Callable[[], Awaitable[Any]],
        pause: Pause | None,
        error: BaseException | None = None,
    ) -> tuple[Any, BaseException | None]:
        """Read as often as ``retry`` says; return what came, and the last error.

        Args:
            get: Reads.
            pause: Sleeps between attempts.
            error: That of the first attempt, if it was made.
        """
        delays: Iterator[float] = iter(self.retry.delays() if self.retry else ())
        key = object()
        try:
            while True:
                if error is not None:
                    delay = next(delays, None) if self._may_retry(error) else None
                    if delay is None:
                        return None, error
                    self.policy.count_retries(1)
                    RETRIED[key] = error
                    await asyncio.sleep(delay) if pause is None else pause(delay)
                try:
                    return await get(), None
                except BaseException as caught:  # retried, or returned
                    error = self._read_error(caught, pause)
        finally:
            RETRIED.pop(key, None)
            del error  # its traceback holds this frame

    def _read_error(self, error: BaseException, pause: Pause | None) -> BaseException:
        """Return an error of the dataset as the consumer gets it."""
        if pause is not None:
            return raisable(error, _DATASET)
        error = user_error(error, _DATASET)
        self.failed_reads += 1
        return error

    def _may_retry(self, error: BaseException) -> bool:
        if self.retry is None or not isinstance(error, Exception):
            return False
        try:
            return self.retry.is_worth(error)
        except BaseException as own:
            raise raisable(own, "retry")  # noqa: B904  (it keeps its cause)

    def _checked(self, task: BatchTask, samples: Any) -> Any:
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

    def _batch_error(
        self, stage: str, task: BatchTask, error: BaseException
    ) -> BaseException:
        """Return the error to raise, noted, if ``error`` is that of a whole batch."""
        error = raisable(error, _WHAT.get(stage, stage))
        return noted(error, self.place(stage, task))

    def place(self, stage: str, task: BatchTask) -> str:
        """Return the error note for a stage that processes whole batches."""
        return place_of(stage, self.epoch, task.number, task.indices)
