"""Calls of the user's functions, with retries, failure policy and error notes.

``BatchMaker.make`` makes a batch by plain code in the calling thread. ``amake`` awaits
the coroutines of a batch on a loop. Both retry reads in the same way.
"""

import asyncio
import inspect
import time
import types
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch

from aioloader._base.awaitables import close_coroutines, holds_awaitables, resolved
from aioloader._base.blocks import FailedSample
from aioloader._base.failures import SKIP, Failure, FailurePolicy, OnError, noted
from aioloader._base.raising import STOPS, ends_task, raisable, saved_state, usable
from aioloader._base.records import spent, thread_clocks
from aioloader._base.retry import RETRIED, Retry
from aioloader._collate.collate import (
    collated,
    collates_as_torch,
    collates_quickly,
    default_collate,
)
from aioloader._collate.gather import UnreadSamples, gatherable
from aioloader._order.epoch import UNDER_WAY
from aioloader._order.indices import IndexBatch
from aioloader._order.ranks import WHOLE, RankPart
from aioloader._pipeline.awaiting import (
    SideLoop,
    refuse_coroutines,
    run_now,
    user_error,
)
from aioloader._pipeline.batch_task import MISSING, BatchResult, BatchTask, stage_note
from aioloader._pipeline.position import StateLoads
from aioloader._transport.slots import Allocator, SlotPool
from aioloader.errors import FailureBudgetError
from aioloader.protocols import (
    Kind,
    batch_getter,
    is_async_function,
    is_stateful,
    kind_of,
    reads_async,
    set_epoch_of,
)

if TYPE_CHECKING:
    from aioloader._pipeline.fetchers import FetcherPool

_UNSEEDED: Final = nullcontext()
# Names of the user code in each stage, for error messages.
_DATASET: Final = "the dataset"
_SOURCES: Final = {"fetch": _DATASET, "collate": "collate_fn"}
# Maps a batch's number and its first sample's position to its task's seeding keys.
SampleKeys: TypeAlias = Callable[[int, int], tuple[int, tuple[int, int, int] | None]]
# Sleeps in a thread between two attempts. If None, coroutines read on a loop.
Pause: TypeAlias = Callable[[float], object]


def _keys_of_reader(
    keys: SampleKeys, rank: int, reader: int, readers: int, number: int, whole: int
) -> tuple[int, tuple[int, int, int] | None]:
    """Return a reader's seeding keys for a batch of ``whole`` samples on all ranks."""
    number = number * readers + reader
    return keys(number, number * whole + rank)


@dataclass(eq=False, repr=False, kw_only=True)
class Recipe:
    """The user's dataset, functions and rules, for the loader and its workers."""

    dataset: Any  # None in workers that do not read
    transform: Callable[[Any], Any] | None
    collate_fn: Callable[[Any], Any]  # takes samples, or one if not ``batched``
    batched: bool
    drop_last: bool
    reads: bool = True  # whether samples are read; else they come with the task
    on_error: OnError = "raise"
    retry: Retry | None = None
    concurrency: int = 64  # samples, or awaitables of plain code, in flight on one loop
    part: RankPart = WHOLE  # this rank's samples of an iterable, and ``tail``
    # Whether other ranks read the same batches of a stream. If so, after an error this
    # rank skips as many samples as they read.
    keeps_step: bool = False
    is_even: bool = False  # whether all ranks have the same number of batches
    # How often the loader's ``set_epoch`` was called, and the number last passed to its
    # dataset, if any. Persistent workers pass that number to their copies.
    dataset_epoch: tuple[int, int | None] = (0, None)
    kind: Kind = field(init=False)
    reads_async: bool = field(init=False)  # coroutines read a map-style dataset
    keeps_state: bool = field(init=False)  # a map-style dataset has ``state_dict``
    transforms_async: bool = field(init=False)
    collates_async: bool = field(init=False)
    is_plain: bool = field(init=False)  # whether no step needs an event loop

    def __post_init__(self) -> None:
        self.kind = kind_of(self.dataset) if self.reads else Kind.MAP
        is_read = self.reads and self.kind is Kind.MAP
        self.reads_async = is_read and reads_async(self.dataset)
        self.keeps_state = is_read and is_stateful(self.dataset)
        self.transforms_async = is_async_function(self.transform)
        self.collates_async = is_async_function(self.collate_fn)
        is_on_loop = self.reads_async or self.kind is Kind.ASYNC_ITERABLE
        self.is_plain = not (is_on_loop or self.transforms_async or self.collates_async)

    def kwargs(self) -> dict[str, Any]:
        """Return this recipe's constructor arguments, which subclasses also accept."""
        names = [argument.name for argument in fields(Recipe) if argument.init]
        return {name: getattr(self, name) for name in names}

    def is_stream(self) -> bool:
        """Tell whether samples are read sequentially, from an iterable dataset."""
        return self.kind is not Kind.MAP


@dataclass(eq=False, repr=False, kw_only=True)
class BatchMaker(Recipe):
    """A recipe that makes batches from indices, one epoch at a time."""

    policy: FailurePolicy
    epoch: int = 0
    reads_whole: bool = field(init=False)  # as in ``HasEpoch``
    allocate: Allocator = field(default_factory=lambda: SlotPool().allocate)
    # Entered while plain code works on a task, to seed the generators.
    around: Callable[[BatchTask], AbstractContextManager[Any]] = nullcontext
    # Seeds the generators again, after user code has restored their states.
    reseed: Callable[[BatchTask], None] | None = None
    # Called before each read and transform of a sample that has its own seed, with the
    # task, the position and the stage (0: read, 1: transform).
    seed: Callable[[BatchTask, int, int], None] | None = None
    # Called with the same arguments before a coroutine reads or transforms a sample, or
    # reads (0) or collates (2) a whole batch (position -1).
    seed_async: Callable[[BatchTask, int, int], None] | None = None
    # Returns the keys for seeding generators; None: no seeding.
    keys: SampleKeys | None = None
    loads: StateLoads = field(default_factory=StateLoads)  # of an iterable dataset
    side_loop: SideLoop = field(default_factory=SideLoop, init=False)
    # At most one state, which the dataset loads before the first read: batches in
    # flight of an earlier iteration may have changed the dataset since it was loaded.
    initial_states: list[Any] = field(default_factory=list, init=False)
    last_seconds: float = field(default=1.0, init=False)  # of the latest batch
    failed_reads: int = field(default=0, init=False)  # by coroutines, retried ones too
    # Looked up once: for small samples, a look-up each would take 5 % of the time.
    get: Callable[[Any], Any] = field(init=False)
    get_batch: Callable[[Any], Any] | None = field(init=False, default=None)
    # Whether a plain ``__getitem__`` of an async dataset returns awaitables.
    _is_wrapped: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        driver = UNDER_WAY.get()
        self.reads_whole = driver is not None and driver.reads_whole
        if not self.reads or self.kind is not Kind.MAP:
            return
        self.get = self.dataset.__getitem__
        self._is_wrapped = self.reads_async and not is_async_function(self.get)
        if not self.batched:
            return
        tensors = None
        is_bare = self.transform is None and self.collate_fn is default_collate
        if is_bare and self.on_error == "raise" and collates_as_torch():
            tensors = gatherable(self.dataset)
        if tensors is None:
            self.get_batch = batch_getter(self.dataset)
        else:
            self.get_batch = partial(UnreadSamples, tensors)

    def begin_epoch(self, epoch: int, dataset_epoch: tuple[int, int | None]) -> None:
        """Start an epoch in a worker; call the dataset's ``set_epoch`` if needed."""
        self.epoch = epoch
        if dataset_epoch != self.dataset_epoch:
            set_epoch_of(self.dataset, dataset_epoch[1])
            self.dataset_epoch = dataset_epoch

    def task(self, batch: IndexBatch) -> BatchTask:
        number, first, indices, padding, state = batch
        task = BatchTask(number, indices, padding=padding)
        task.state = state
        if self.keys is not None:
            task.key, task.sample_keys = self.keys(number, first)
        return task

    def reader_keys(self, reader: int = 0, readers: int = 1) -> SampleKeys | None:
        """Return ``_keys_of_reader`` for one reader; None if nothing is seeded."""
        if self.keys is None:
            return None
        return partial(_keys_of_reader, self.keys, self.part.rank, reader, readers)

    def leave_generators(self) -> None:
        """Stop seeding the generators, because the user's code seeds them."""
        self.around, self.reseed = nullcontext, None
        self.seed = self.seed_async = None

    def make(
        self,
        task: BatchTask,
        read: Callable[[BatchTask], object] | None = None,
        enter: Callable[[str], object] | None = None,
        *,
        seeded: bool = True,
    ) -> BatchResult:
        """Make a batch by plain code in this thread; an error becomes the result.

        Args:
            task: The batch to make.
            read: Reads the samples (this maker's ``read`` or a stream's ``pull``). None
                if ``task`` contains the samples.
            enter: Called with the name of each stage after the read.
            seeded: Whether to seed the generators for user code that runs here.
        """
        clocks = thread_clocks(task.number, self.last_seconds)
        outer = UNDER_WAY.get()
        try:
            UNDER_WAY.set(self)
            with self.around(task) if seeded else _UNSEEDED:
                if read is not None:
                    read(task)
                result = task.result
                if result is None:
                    if enter is not None:
                        enter("transform")
                    if self.transform is not None and not self.transforms_async:
                        self.apply(task)
                    if enter is not None:
                        enter("collate")
                    result = self.collate(task)
            if clocks is not None:
                task.spent = spent(clocks)
            self.last_seconds = task.collated - (task.began or task.transformed)
        except BaseException as error:  # handed to the consumer
            return BatchResult(error=error)
        finally:
            UNDER_WAY.set(outer)
            task.samples = []
        return result

    def fetch(
        self, task: BatchTask, read: Callable[[BatchTask], object]
    ) -> BatchResult | None:
        """Read samples in this thread; return a result only if there is no batch."""
        outer = UNDER_WAY.get()
        try:
            UNDER_WAY.set(self)
            with self.around(task):
                read(task)
        except BaseException as error:  # handed to the consumer
            return BatchResult(error=error)
        finally:
            UNDER_WAY.set(outer)
        return task.result

    def read(self, task: BatchTask, pause: Pause = time.sleep) -> None:
        """Read the samples of ``task`` by plain code; ``pause`` precedes each retry."""
        task.began = perf_counter()
        self.policy.begin(len(task.indices))
        if self.initial_states:
            self._load_initial_state(task)
        try:
            if self.get_batch is not None:
                task.samples = run_now(self._read_retrying(task, -1, pause))
            if self.get_batch is None or task.samples is MISSING:
                self._read_each(task, pause)
            if holds_awaitables(task.samples):  # of a plain ``__getitem__``
                awaited = self.side_loop.resolve(task.samples, self.concurrency)
                for k, sample in enumerate(awaited):
                    if type(sample) is FailedSample:
                        retrying = self._read_retrying(task, k, pause, sample.error)
                        sample = run_now(retrying)  # noqa: PLW2901
                    task.samples[k] = sample
        except BaseException:
            close_coroutines(task.samples)
            raise
        task.read = perf_counter()

    def _load_initial_state(self, task: BatchTask) -> None:
        try:
            self.dataset.load_state_dict(usable(self.initial_states.pop()))
        except BaseException as error:
            raise self._batch_error("fetch", task, error)  # noqa: B904
        if self.reseed is not None:
            self.reseed(task)

    def _read_each(self, task: BatchTask, pause: Pause) -> None:
        get, samples = self.get, list[Any]()
        task.samples = samples  # set now: a timeout's error names missing samples
        seed = self.seed if task.sample_keys is not None else None
        for index in task.indices:
            try:
                if seed is not None:
                    seed(task, len(samples), 0)
                samples.append(get(index))
            except BaseException as error:  # retried, or the policy decides
                # An interrupt may come just after the last sample was appended.
                position = min(len(samples), len(task.indices) - 1)
                retrying = self._read_retrying(task, position, pause, error)
                samples.append(run_now(retrying))

    def apply(self, task: BatchTask) -> None:
        """Transform the samples of ``task`` in place, by plain code."""
        samples, transform = task.samples, self.transform
        assert transform is not None
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
        """Collate the samples of ``task``; the result is empty if all were skipped."""
        samples = self._kept_samples(task)
        if samples is SKIP:
            return BatchResult(is_empty=True)
        try:
            argument = samples if self.batched else samples[0]
            batch = collated(self.allocate, self.collate_fn, argument)
            if isinstance(batch, types.CoroutineType):
                refuse_coroutines(batch, "collate_fn")
        except BaseException as error:
            raise self._batch_error("collate", task, error)  # noqa: B904  (it keeps its cause)
        task.collated = perf_counter()
        if self.part.tail == "pad":
            batch = self._masked(task, batch)
        return BatchResult(batch)

    def is_quick(self, task: BatchTask) -> bool:
        """Tell whether collating ``task`` takes only a fraction of a millisecond.

        Such a batch is collated on the event loop: a thread would cost more.
        """
        samples = task.samples
        if self.transform is not None:
            return False
        if type(samples) is not list:
            return getattr(samples, "is_quick", False)
        return collates_quickly(self.collate_fn, samples)

    def _kept_samples(self, task: BatchTask) -> Any:
        """Begin to collate; return the samples not skipped, or ``SKIP`` if none."""
        task.stage, task.transformed = "collate", perf_counter()
        samples, is_empty = task.samples, False
        if type(samples) is list and (self.policy.count or not self.reads):
            samples = [sample for sample in samples if sample is not SKIP]
            task.missing += len(task.samples) - len(samples)
            is_empty = not samples
        if is_empty and self.is_even:
            raise FailureBudgetError(
                f"all {len(task.indices)} samples of batch {task.number} of epoch "
                f"{self.epoch} failed and were skipped, but other ranks have this "
                "batch and would wait: have on_error return samples to use instead",
                failures=self.policy.count,
                attempted=self.policy.attempted,
            )
        return SKIP if is_empty else samples

    def _masked(self, task: BatchTask, batch: Any) -> tuple[Any, torch.Tensor]:
        """Return a batch and its mask: True for real samples, False for padding."""
        samples = task.samples if type(task.samples) is list else task.indices
        real = len(samples) - task.padding
        mask = [k < real for k, sample in enumerate(samples) if sample is not SKIP]
        return batch, torch.tensor(mask if self.batched else mask[0])

    def add_state(self, task: BatchTask, result: BatchResult) -> BatchResult:
        """Return ``result`` with any state of the dataset, or an error's result."""
        if not self.keeps_state or result.error is not None:
            return result
        try:
            result.dataset = 0, saved_state(self.dataset)
        except BaseException as error:  # handed to the consumer
            note = f"in the dataset's state_dict(), {self.stage_note('fetch', task)}"
            error = noted(raisable(error, _DATASET), note)
            return BatchResult(error=error, state=result.state)
        return result

    async def amake(
        self,
        task: BatchTask,
        fetchers: "FetcherPool",
        call: Callable[[Callable[[], Any]], Awaitable[Any]],
        read: Callable[[BatchTask], object] | None,
    ) -> BatchResult | None:
        """Await the coroutines of one batch on this loop.

        Args:
            task: The batch. Fetchers read its samples before later batches' samples.
            fetchers: The pool that runs the coroutines of its samples.
            call: Awaits plain code that runs in a thread.
            read: Reads the samples by plain code; None if ``task`` contains them.

        Returns:
            The result, which may be an error; None if ``make`` must do the other steps.
        """
        try:
            is_transformed = False  # whether each sample was, after its read
            if self.reads_async:
                is_transformed = await self._aread(task, fetchers)
            elif read is not None:
                task.result = await call(partial(self.fetch, task, read))
            if task.result is None and self.transforms_async and not is_transformed:
                task.stage = "transform"
                jobs = await fetchers.run(task, self._transform, len(task.samples))
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

    async def _aread(self, task: BatchTask, fetchers: "FetcherPool") -> bool:
        """Read the samples of ``task``; return False if one call read them all."""
        self.policy.begin(len(task.indices))
        if self.initial_states:
            self._load_initial_state(task)
        if self.get_batch is not None:
            jobs = await fetchers.run(
                task, lambda task, _: self._read_retrying(task, -1, None), 1
            )
            task.began, task.read = jobs.began, perf_counter()
            if jobs.result is not MISSING:
                task.samples = jobs.result
                return False
        task.samples = [MISSING] * len(task.indices)
        jobs = await fetchers.run(task, self._fetch, len(task.indices))
        task.began, task.read = task.began or jobs.began, perf_counter()
        task.busy = jobs.busy
        return True

    async def _fetch(self, task: BatchTask, position: int) -> None:
        """Read one sample; apply an async transform to it immediately."""
        if self.seed_async is not None:
            self.seed_async(task, position, 0)
        try:
            sample = self.get(task.indices[position])
            sample = await (resolved(sample) if self._is_wrapped else sample)
        except BaseException as error:  # retried, or the policy decides
            sample = await self._read_retrying(task, position, None, error)
        task.samples[position] = sample
        if self.transforms_async:
            await self._transform(task, position)

    async def _transform(self, task: BatchTask, position: int) -> None:
        sample = task.samples[position]
        if sample is SKIP:
            return
        if self.seed_async is not None:
            self.seed_async(task, position, 1)
        try:
            sample = await self.transform(sample)  # type: ignore[misc]
        except BaseException as error:  # the policy decides
            error = user_error(error, "transform")
            sample = self.resolve("transform", task, position, error)
        task.samples[position] = sample

    async def _acollate(self, task: BatchTask) -> BatchResult:
        """Collate like ``collate``, but await an async ``collate_fn``."""
        samples = self._kept_samples(task)
        if samples is SKIP:
            return BatchResult(is_empty=True)
        if self.seed_async is not None:
            self.seed_async(task, -1, 2)
        try:
            batch = await self.collate_fn(samples if self.batched else samples[0])
        except BaseException as error:
            error = user_error(error, "collate_fn")
            raise self._batch_error("collate", task, error)  # noqa: B904  (it keeps its cause)
        task.collated = perf_counter()
        if self.part.tail == "pad":
            batch = self._masked(task, batch)
        return BatchResult(batch)

    def _apply_seeded(self, task: BatchTask) -> None:
        with self.around(task):
            self.apply(task)

    async def _read_retrying(
        self,
        task: BatchTask,
        position: int,
        pause: Pause | None,
        error: BaseException | None = None,
    ) -> Any:
        """Read a sample with retries; return the sample or its replacement.

        ``error``: the first attempt's error, if the caller made that attempt. Position
        -1 reads the whole batch with ``get_batch``; ``MISSING`` is returned if each
        sample must be read separately, so that the policy can skip some.
        """
        delays: Iterator[float] = iter(self.retry.delays() if self.retry else ())
        key = object()
        try:
            while True:
                if error is not None:
                    if pause is None:
                        error = user_error(error, _DATASET)
                        self.failed_reads += 1
                    error = raisable(error, _DATASET)
                    delay = next(delays, None) if self._may_retry(error) else None
                    if delay is None:
                        break
                    self.policy.count_retries(1)
                    RETRIED[key] = error
                    await asyncio.sleep(delay) if pause is None else pause(delay)
                try:
                    return await self._read_once(task, position, pause)
                except BaseException as caught:  # retried, or the policy decides
                    error = caught
            RETRIED.pop(key, None)
            if position >= 0:
                return self.resolve("fetch", task, position, error)
            may_skip = self.on_error != "raise" and isinstance(error, Exception)
            if may_skip and hasattr(self.dataset, "__getitem__"):
                return MISSING
            raise self._batch_error("fetch", task, error)
        finally:
            RETRIED.pop(key, None)
            del error  # its traceback holds this frame

    async def _read_once(
        self, task: BatchTask, position: int, pause: Pause | None
    ) -> Any:
        """Make one attempt to read a sample, or the whole batch (position -1)."""
        is_whole = position < 0
        get: Any = self.get_batch if is_whole else self.get
        index = task.indices if is_whole else task.indices[position]
        if pause is None:
            if self.seed_async is not None:
                self.seed_async(task, position, 0)
            value = await resolved(get(index))
        else:
            if not is_whole and self.seed is not None and task.sample_keys is not None:
                self.seed(task, position, 0)
            value = get(index)
            must_await = inspect.isawaitable if is_whole else holds_awaitables
            if must_await(value if is_whole else [value]):
                value = self.side_loop.wait_for(value)
        if not is_whole or self.transform is None:
            return value  # of any type: ``collate_fn`` gets it, as in torch
        if len(value) != len(task.indices):
            raise ValueError(
                f"{type(self.dataset).__name__}.__getitems__ returned {len(value)} "
                f"samples for {len(task.indices)} indices"
            )
        return list(value)

    def _may_retry(self, error: BaseException) -> bool:
        if self.retry is None or not isinstance(error, Exception):
            return False
        try:
            return self.retry.is_worth(error)
        except BaseException as of_retry:
            raise raisable(of_retry, "retry")  # noqa: B904  (it keeps its cause)

    def resolve(
        self, stage: str, task: BatchTask, position: int, error: BaseException
    ) -> Any:
        """Apply the policy to a failure: return a replacement or ``SKIP``, or raise."""
        if self.side_loop.is_closed:
            raise error  # the iteration is over
        failure = Failure(
            stage=stage,
            epoch=self.epoch,
            batch=task.number,
            position=position,
            index=task.indices[position],
            error=raisable(error, _SOURCES.get(stage, stage)),  # type: ignore[arg-type]
        )
        if self.on_error != "raise" and isinstance(failure.error, Exception):
            task.failures = [*task.failures, failure]
        try:
            return self.policy.resolve(failure)
        except STOPS as stop:  # of on_error
            raise raisable(stop, "on_error")  # noqa: B904  (it keeps its cause)

    def _batch_error(
        self, stage: str, task: BatchTask, error: BaseException
    ) -> BaseException:
        """Return the error to raise for a whole batch's ``error``, with a note."""
        error = raisable(error, _SOURCES.get(stage, stage))
        return noted(error, self.stage_note(stage, task))

    def stage_note(self, stage: str, task: BatchTask) -> str:
        return stage_note(stage, self.epoch, task.number, task.indices)
