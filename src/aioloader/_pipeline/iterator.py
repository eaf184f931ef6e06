"""The iterator that ``iter(loader)`` and ``aiter(loader)`` return.

The iterator is a thin shell. Nothing in the pipeline refers to it, and no frame of a
traceback holds it: dropping it (``break``, an exception) releases the pipeline at once,
without a garbage collection.
"""

import asyncio
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeAlias

from torch.autograd import profiler
from typing_extensions import TypeVar

from aioloader._observe.warnings import warn
from aioloader._order.forks import are_imported, fork_safe, import_modules
from aioloader._pipeline.cpu import in_new_thread
from aioloader._pipeline.host import GRACE
from aioloader._pipeline.plain import ClosedIterator, LocalIterator
from aioloader._pipeline.waiting import require_asyncio

if TYPE_CHECKING:
    from aioloader._observe.records import Counters
    from aioloader._pipeline.pipeline import Pipeline
    from aioloader._pipeline.pipeline_iterator import PipelineIterator

Batch = TypeVar("Batch", default=Any)
Source: TypeAlias = "LocalIterator | PipelineIterator"
# Profilers find the time of data loading by torch's form of this name.
_RANGE = "enumerate(DataLoader)#BatchIterator.__next__"
_LENGTH = (  # torch's words
    "Length of IterableDataset {} was reported to be {}(when accessing "
    "len(dataloader)), but {} samples have been fetched. {}"
)
_HINT = (
    "For multiprocessing data-loading, this could be caused by not properly "
    "configuring the IterableDataset replica at each worker. Please see "
    "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for "
    "examples."
)


class Start:
    """Makes the source of an iteration, and claims a loaded state for it.

    Args:
        make: Makes the source, given this object.
        engine: The modules that it needs. Importing them takes tens of milliseconds,
            for which no consumer's loop is blocked.

    Attributes:
        is_held: Whether no other iteration may resume from the state that this one was
            given: until its first step has ended, or it is closed or dropped.
    """

    def __init__(
        self, make: "Callable[[Start], Source]", engine: tuple[str, ...]
    ) -> None:
        self.make = make
        self.engine = engine
        self.is_held = False

    def __call__(self) -> Source:
        return self.make(self)


class BatchIterator(Generic[Batch]):
    """Batches of one epoch, for ``for`` or for ``async for``.

    Worker processes start with it; threads, tasks and reads of this process start with
    the first step. Leaving the loop early releases everything in the background;
    ``close`` or ``aclose`` waits for it. An exception from one batch does not end the
    iteration.

    Args:
        start: Makes the source, when the first batch is requested.
        length: Returns the number of batches of an epoch.
        check: Called with the number of batches delivered, or None.
        base_seed: The seed that random draws are keyed with; None if not drawn yet.
        prepared: What ``start`` will return, if it already has workers; released with
            the iterator if never used.
        is_async: Whether ``aiter`` made it. A plain one may make batches in the thread
            that asks for them, so tasks must not.
    """

    def __init__(
        self,
        start: Start,
        length: Callable[[], int],
        check: Callable[[int], None] | None = None,
        base_seed: int | None = None,
        prepared: "Source | None" = None,
        *,
        is_async: bool = False,
    ) -> None:
        self._is_async = is_async
        self._length = length
        self._steps = _Steps(start, check, prepared)
        self._base_seed = base_seed  # torch's name
        self._finalizer = weakref.finalize(self, self._steps.abandon)

    def __len__(self) -> int:
        """Return ``len(loader)``.

        Raises:
            TypeError: If the length is unknown.
        """
        return self._length()

    def __iter__(self) -> "BatchIterator[Batch]":
        return self

    def __aiter__(self) -> "BatchIterator[Batch]":
        self._check_is_async()
        return self

    # No frame that a traceback may hold, directly or by ``f_back``, has the iterator.
    def __next__(self) -> Batch:
        steps = self._steps
        del self
        batch: Batch
        if profiler._is_profiler_enabled:  # noqa: SLF001  (nothing public is so quick)
            with profiler.record_function(_RANGE):
                batch = steps.next()
            return batch
        batch = steps.next()
        return batch  # nothing is called here: an interrupt would lose it

    def __anext__(self) -> Coroutine[Any, Any, Batch]:
        self._check_is_async()
        return _step(self._steps, self)

    def close(self) -> None:
        """End the iteration and wait until everything is released.

        Later steps end the loop, as with a closed generator.
        """
        source = self._steps.end()
        if source is not None:
            source.close()

    async def aclose(self) -> None:
        """End the iteration and wait, without blocking the loop."""
        source = self._steps.end()
        if source is not None:
            await source.aclose()

    def _check_is_async(self) -> None:
        if not self._is_async:
            raise TypeError(
                "this iterator was made by iter(loader), for a plain `for`, and could "
                "run user code on the event loop: iterate with `async for batch in "
                "loader`, or make the iterator with aiter(loader)"
            )

    def dismiss(self) -> None:
        """Start ending the iteration; ``close`` and ``aclose`` wait for it."""
        source = self._steps.end()
        if source is not None and source.pipeline is not None:
            source.dismiss()

    def _shutdown_workers(self) -> None:
        """Close, under torch's name."""
        self.close()

    @property
    def _num_yielded(self) -> int:
        """The number of batches that it has delivered, under torch's name."""
        counters = self.counters
        return 0 if counters is None else counters.batches

    @property
    def counters(self) -> "Counters | None":
        """The figures of its iteration, once it has started."""
        source = self._steps.source
        return None if source is None else source.counters

    def is_under_way(self) -> bool:
        """Tell whether it has started and is neither finished nor closed."""
        source = self._steps.source
        return source is not None and not source.is_finished()


async def _step(steps: "_Steps", iterator: BatchIterator[Batch]) -> Batch:
    """Take a step; hold the iterator until it returns, and no longer."""
    try:
        batch: Batch = await steps.next_async()
        return batch
    finally:
        del iterator


class _Steps:
    """The state of an iterator, apart from it so that no frame of a step holds it."""

    def __init__(
        self,
        start: Start,
        check: Callable[[int], None] | None,
        prepared: "Source | None",
    ) -> None:
        self.source: Source | None = None
        self._start: Start | None = start
        self._check = check
        self._prepared = prepared
        self._lock = fork_safe(threading.RLock())
        # The tasks of a loop get batches in the order in which they ask.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turns = asyncio.Lock()

    def next(self) -> Any:
        start = self._start
        try:
            source = self.source or self.begin()
            batch = source.next()
        finally:
            if start is not None:  # no call: an interrupt would lose the batch
                start.is_held = False
        if self._check is not None:
            self._check(source.counters.batches)
        return batch

    async def next_async(self) -> Any:
        if self.source is None:
            require_asyncio()
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._turns = loop, asyncio.Lock()
        async with self._turns:
            start = self._start
            if start is not None and not are_imported(start.engine):
                await in_new_thread(partial(import_modules, start.engine))
            try:
                source = self.source or self.begin()
                batch = await source.next_async()
            finally:
                if start is not None:
                    start.is_held = False
        if self._check is not None:
            self._check(source.counters.batches)
        return batch

    def begin(self) -> "Source":
        """Return the source; the first call makes it."""
        with self._lock:
            if self.source is None:
                if self._start is None:  # closed before it started
                    return ClosedIterator()
                self.source = self._start()
                self._start = self._prepared = None
            return self.source

    def end(self) -> "Source | None":
        """Prevent a start; return the source to close, if there is one."""
        start, self._start = self._start, None
        if start is not None:
            start.is_held = False
        return self.source or self._prepared

    def abandon(self) -> None:
        """Release an iterator that was dropped, or is still open at Python's exit."""
        source = self.end()
        if source is None:
            return
        if source.pipeline is not None:
            _abandon(source.pipeline)
        elif source.must_close:
            source.close()


def length_check(loader: Any) -> Callable[[int], None] | None:
    """Return a function that warns of more batches than a stream's length, as torch.

    Torch compares with the length of the dataset that ``len(loader)`` has read.
    """
    expected = loader._IterableDataset_len_called  # noqa: SLF001  (torch's name)
    if expected is None:
        return None
    dataset, num_workers = loader.dataset, loader.num_workers

    def check(delivered: int) -> None:
        if delivered > expected:
            warn(
                _LENGTH.format(dataset, expected, delivered, _HINT * bool(num_workers))
            )

    return check


def _abandon(pipeline: "Pipeline") -> None:
    if threading.main_thread().is_alive():
        pipeline.abandon()
        return
    if pipeline.ended.is_set() or pipeline.host.is_foreign():  # a child has no threads
        return
    pipeline.dismiss()
    # The main thread has ended: the interpreter is exiting, and our threads must end
    # first, or requests in flight would run in a half-finalized process.
    if not hasattr(sys, "last_value"):  # an uncaught exception may hold the iterator
        warn(
            "a DataLoader was left open until the interpreter's exit; close its "
            "iterator, or iterate inside `with loader:` or `async with loader:`",
            ResourceWarning,
        )
    pipeline.ended.wait(GRACE)
    if pipeline.host.is_left() and pipeline.host.closed.wait(GRACE):
        pipeline.host.join()
    if pipeline.stage is not None:
        pipeline.stage.join()
    if pipeline.pool is not None and pipeline.pool.pump is None:
        pipeline.join()  # threads of this process
