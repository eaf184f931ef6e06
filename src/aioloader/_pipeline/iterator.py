"""What ``iter(loader)`` and ``aiter(loader)`` return.

The iterator is a thin shell around a source. Nothing in the pipeline refers to it, so
that dropping it (``break``, an exception) releases the pipeline at once.
"""

import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeAlias

from typing_extensions import TypeVar

from aioloader._observe.warnings import warn
from aioloader._pipeline.host import GRACE
from aioloader._pipeline.inline import ClosedIterator, LocalIterator
from aioloader._pipeline.pipeline import Pipeline
from aioloader._pipeline.pipeline_iterator import PipelineIterator
from aioloader._pipeline.waiting import require_asyncio

Batch = TypeVar("Batch", default=Any)
Source: TypeAlias = LocalIterator | PipelineIterator
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


class BatchIterator(Generic[Batch]):
    """Batches of one epoch, for ``for`` or for ``async for``.

    Worker processes start with it; threads, tasks and reads of this process begin with
    the first step. Leaving the loop
    early releases everything, in the background; ``close`` or ``aclose`` waits for it.
    An exception from one batch does not end the iteration.

    Args:
        start: Makes the source, when the first batch is asked for.
        length: Returns the number of batches of an epoch.
        check: Called with the number of batches delivered, or None.
        base_seed: What random draws are keyed with; None if it is not drawn yet.
        prepared: What ``start`` will return, if it holds workers already; released
            with the iterator, should it never be used.
    """

    def __init__(
        self,
        start: Callable[[], Source],
        length: Callable[[], int],
        check: Callable[[int], None] | None = None,
        base_seed: int | None = None,
        prepared: Source | None = None,
    ) -> None:
        self._length = length
        self._start: Callable[[], Source] | None = start
        self._source: Source | None = None
        self._check = check
        self._base_seed = base_seed  # torch's name
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._prepared = prepared
        if prepared is not None:
            self._hold(prepared)
        self._lock = threading.RLock()

    def __len__(self) -> int:
        """Return ``len(loader)``.

        Raises:
            TypeError: If that is unknown.
        """
        return self._length()

    def __iter__(self) -> "BatchIterator[Batch]":
        return self

    def __aiter__(self) -> "BatchIterator[Batch]":
        return self

    def __next__(self) -> Batch:
        source = self._source or self._begin()
        batch: Batch = source.next()
        if self._check is not None:
            self._check(source.counters.batches)
        return batch

    async def __anext__(self) -> Batch:
        if self._source is None:
            require_asyncio()
        source = self._source or self._begin()
        batch: Batch = await source.next_async()
        if self._check is not None:
            self._check(source.counters.batches)
        return batch

    def close(self) -> None:
        """End the iteration and wait until all it held is released.

        Later steps end the loop, as those of a closed generator do.
        """
        self._start = None
        source = self._source or self._prepared
        if source is not None:
            source.close()

    async def aclose(self) -> None:
        """End the iteration and wait, without blocking the loop."""
        self._start = None
        source = self._source or self._prepared
        if source is not None:
            await source.aclose()

    def _shutdown_workers(self) -> None:
        """Close, under torch's name."""
        self.close()

    def is_under_way(self) -> bool:
        """Tell whether it has begun, and is neither at its end nor closed."""
        return self._source is not None and not self._source.is_finished()

    def _begin(self) -> "Source":
        with self._lock:
            if self._source is None:
                if self._start is None:  # closed before it began
                    return ClosedIterator()
                source = self._start()
                self._start = self._prepared = None
                if self._finalizer is None:
                    self._hold(source)
                self._source = source
            return self._source

    def _hold(self, source: Source) -> None:
        """Release ``source`` when this iterator is dropped."""
        if isinstance(source, PipelineIterator):
            self._finalizer = weakref.finalize(self, _abandon, source.run)
        elif source.must_close:
            self._finalizer = weakref.finalize(self, source.close)


def length_check(loader: Any) -> Callable[[int], None] | None:
    """Return what warns, as torch does, of more batches than a stream reported.

    Torch compares them with the samples that ``len(loader)`` was told of.
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


def _abandon(run: Pipeline) -> None:
    """Release a run whose iterator was dropped, or is left when Python exits."""
    if run.ended.is_set():
        return
    run.dismiss()
    if threading.main_thread().is_alive():
        return
    # The main thread is gone: the interpreter is exiting, and its threads must end
    # first, or requests in flight would run into a dismantled process.
    if not hasattr(sys, "last_value"):  # an uncaught exception may hold the iterator
        warn(
            "a DataLoader was left open until the interpreter's exit; close its "
            "iterator, or iterate inside `with loader:` or `async with loader:`",
            ResourceWarning,
        )
    run.ended.wait(GRACE)
    if run.host.is_left() and run.host.closed.wait(GRACE):
        run.host.join()
    if run.stage is not None:
        run.stage.join()
    if run.pool is not None and run.pool.pump is None:
        run.join()  # threads of this process
