"""The iterator that ``iter(loader)`` and ``aiter(loader)`` return.

Nothing in the pipeline refers to the iterator, and no frame of a traceback holds it.
Dropping the iterator (by ``break`` or an exception) therefore releases the pipeline
immediately, without a garbage collection.
"""

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NoReturn

from torch.autograd import profiler
from typing_extensions import TypeVar

from aioloader._base.cancellation import in_thread
from aioloader._base.cpu_threads import CpuThread
from aioloader._base.forks import are_imported, fork_safe, import_modules
from aioloader._base.waiting import require_asyncio, running_loop
from aioloader._base.warnings import warn
from aioloader._pipeline.plain import NOTHING
from aioloader.protocols import OneIteration

if TYPE_CHECKING:
    from aioloader._base.records import Counters
    from aioloader._pipeline.plain import Feed

Batch = TypeVar("Batch", default=Any)
# Profilers recognise data loading by torch's form of this name.
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


class BatchIterator(OneIteration, Generic[Batch]):
    """An iterator over the batches of one epoch, for ``for`` or ``async for``.

    Worker processes start with the iterator; threads, tasks and reads of this process
    start with the first step. Leaving the loop early releases everything in the
    background; ``close`` or ``aclose`` waits until that is done. An exception from one
    batch does not end the iteration.

    Args:
        core: Performs the steps; its frames do not hold the iterator.
        length: Returns the number of batches of an epoch.
        base_seed: The epoch's seed; None if it is not drawn yet.
        is_async: Whether ``aiter`` made the iterator. A plain iterator may run user
            code in the thread that calls ``next``, so tasks must not use it.
    """

    def __init__(
        self,
        core: "IteratorCore",
        length: Callable[[], int],
        base_seed: int | None = None,
        *,
        is_async: bool = False,
    ) -> None:
        self._is_async = is_async
        self._length = length
        self._core = core
        self._base_seed = base_seed  # torch's name
        self._finalizer = weakref.finalize(self, core.abandon)

    def __len__(self) -> int:
        """Return ``len(loader)``, or raise ``TypeError`` if it is unknown."""
        return self._length()

    def __iter__(self) -> "BatchIterator[Batch]":
        return self

    def __aiter__(self) -> "BatchIterator[Batch]":
        if not self._is_async:
            self._refuse_await()
        return self

    def __next__(self) -> Batch:
        batch: Batch
        try:
            if profiler._is_profiler_enabled:  # noqa: SLF001  (nothing public is so quick)
                with profiler.record_function(_RANGE):
                    batch = self._core.next()
            else:
                batch = self._core.next()
        finally:
            # A traceback may hold this frame, which must not hold the iterator.
            del self
        return batch  # no call after this line: an interrupt would lose the batch

    def __anext__(self) -> Coroutine[Any, Any, Batch]:
        if not self._is_async:
            self._refuse_await()
        return self._core.next_async(self)

    def close(self) -> None:
        """End the iteration and wait until everything is released.

        Later steps raise ``StopIteration``, as with a closed generator.
        """
        feed = self._core.end()
        if feed is not None:
            feed.close()

    async def aclose(self) -> None:
        """End the iteration like ``close``, without blocking the event loop."""
        feed = self._core.end()
        if feed is not None:
            await feed.aclose()

    def dismiss(self) -> None:
        """Start to end the iteration; ``close`` and ``aclose`` wait for its end."""
        feed = self._core.end()
        if feed is not None:
            feed.dismiss()

    def _refuse_await(self) -> NoReturn:
        raise TypeError(
            "this iterator was made by iter(loader), for a plain `for`, and could run "
            "user code on the event loop: iterate with `async for batch in loader`, or "
            "make the iterator with aiter(loader)"
        )

    def _shutdown_workers(self) -> None:  # torch's name
        self.close()

    @property
    def _num_yielded(self) -> int:
        """The number of delivered batches, under torch's name."""
        counters = self.counters
        return 0 if counters is None else counters.batches

    @property
    def counters(self) -> "Counters | None":
        """The counters of the iteration; None before its first step."""
        feed = self._core.feed
        return None if feed is None else feed.counters

    def is_under_way(self) -> bool:
        """Tell whether the iteration has started and is neither over nor closed."""
        feed = self._core.feed
        return feed is not None and not feed.is_finished


@dataclass(eq=False, repr=False)
class IteratorCore:
    """The steps of a ``BatchIterator``; their frames do not hold the iterator."""

    # Makes the feed, once, and claims a loaded state for this object.
    prepare: "Callable[[IteratorCore], Feed] | None"
    start: "Callable[[Feed], None]"  # called when the first batch is requested
    # Modules that the feed needs. Importing them takes tens of milliseconds, so async
    # consumers import them in a thread.
    engine: tuple[str, ...] = ()
    check: Callable[[int], None] | None = None  # gets the number of batches delivered
    feed: "Feed | None" = None  # once it has started
    prepared: "Feed | None" = None  # before it starts, if it has workers already
    # Whether this iteration alone may resume from its loaded state: until its first
    # step has ended, or it is closed or dropped.
    is_held: bool = False

    def __post_init__(self) -> None:
        self._lock = fork_safe(threading.RLock())
        # The loop of the consumer's tasks; the lock that gives them batches in order of
        # their calls; and an item per task that holds the lock or waits for it.
        self._turns: tuple[object, asyncio.Lock, list[None]]
        self._turns = (None, asyncio.Lock(), [])

    def next(self) -> Any:
        """Return the next batch; ``begin`` may set this method to ``feed.next``."""
        try:
            feed = self.feed or self.begin()
            if feed is None:
                raise StopIteration
            batch = feed.next()
        finally:
            self.is_held = False  # not by a call: an interrupt would lose the batch
        if self.check is not None:
            self.check(feed.counters.batches)
        return batch

    async def next_async(self, iterator: object) -> Any:
        """Return the next batch; keep ``iterator`` alive until this call ends."""
        feed: Any = self.feed
        try:
            if feed is None:
                require_asyncio()
            loop, queue = self._turns[0], self._turns[2]
            if loop is not running_loop():
                loop, queue = asyncio.get_running_loop(), []
                self._turns = (loop, asyncio.Lock(), queue)
            batch = NOTHING if queue or feed is None else feed.poll()
            if batch is NOTHING:
                batch = await self._next_in_turn(self._turns[1], queue)
        finally:
            del iterator
        if self.check is not None and self.feed is not None:
            self.check(self.feed.counters.batches)
        return batch

    async def _next_in_turn(self, turn: asyncio.Lock, queue: list[None]) -> Any:
        queue.append(None)
        try:
            async with turn:
                if self.prepare is not None and not are_imported(self.engine):
                    thread = CpuThread.once()
                    await in_thread(import_modules, self.engine, executor=thread)
                try:
                    feed: Any = self.feed or self.begin()
                    if feed is None:
                        raise StopAsyncIteration
                    return await feed.next_async()
                finally:
                    self.is_held = False
        finally:
            queue.pop()

    def begin(self) -> "Feed | None":
        """Return the feed, made on the first call; None if ``end`` was called first."""
        with self._lock:
            prepare = self.prepare
            if self.feed is None and prepare is not None:
                if self.engine:
                    import_modules(self.engine)
                # Assigned at once, so that an interrupt does not leak it.
                feed = self.prepared = self.prepared or prepare(self)
                if self.prepare is None:  # another thread has closed this meanwhile
                    feed.close()
                    return None
                self.start(feed)
                self.feed = feed  # before ``prepared`` is reset: ``end`` finds either
                self.prepared = self.prepare = None
                if self.check is None:  # saves a call per batch
                    self.next = feed.next  # type: ignore[method-assign]
            return self.feed

    def prepare_now(self) -> "Feed":
        """Make and return the feed before the first step, to start its workers."""
        assert self.prepare is not None
        import_modules(self.engine)
        self.prepared = self.prepare(self)
        return self.prepared

    def end(self) -> "Feed | None":
        """Prevent a later start; return the feed to close, or None if there is none."""
        self.prepare, self.is_held = None, False
        return self.prepared or self.feed

    def abandon(self) -> None:
        """Release the feed of an iterator that was dropped, or is open at exit."""
        feed = self.end()
        if feed is not None:
            feed.abandon()


def length_check(loader: Any) -> Callable[[int], None]:
    """Return a check that warns, as torch does, if a stream exceeds its length."""
    expected = loader._IterableDataset_len_called  # noqa: SLF001  (torch's name)
    dataset, hint = loader.dataset, _HINT * bool(loader.num_workers)

    def check(delivered: int) -> None:
        if delivered > expected:
            warn(_LENGTH.format(dataset, expected, delivered, hint))

    return check
