"""What a loader reports: figures, what limits training, traces."""

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aioloader._observe.records import Copy, Counters, Record, Setting
from aioloader._order.failures import Failure

if TYPE_CHECKING:
    from aioloader._loader.runtime import Runtime
    from aioloader._observe.stats import LoaderStats
    from aioloader._observe.trace import Trace
    from aioloader._observe.verdict import Report


class _Shown:
    """An attribute that a subclass or its instances may replace; no property may.

    Args:
        get: Returns its value for a loader.
    """

    def __init__(self, get: Callable[[Any], int]) -> None:
        self._get = get

    def __get__(self, loader: Any, _cls: type) -> int:
        if loader is None:  # only instances have it
            raise AttributeError
        return self._get(loader)


class Observed:
    """The part of ``DataLoader`` that shows what its iterations do.

    Attributes:
        epoch: The number of the epoch under way, from 0; else of the next one. It is
            that of ``state_dict()``.
    """

    _live: "Runtime"
    epoch: _Shown = _Shown(lambda loader: loader._live.epoch_number())

    def stats(self) -> "LoaderStats":
        """Return the figures of the latest epoch so far; ``print`` shows a table."""
        from aioloader._observe.stats import LoaderStats, with_records

        epoch, tally = self._live.epoch, self._live.tally
        counters = Counters() if epoch is None else epoch.counters
        policy = None if epoch is None else epoch.failures
        is_under_way = any(one.is_under_way() for one in self._live.iterators())
        stats = LoaderStats(
            epoch=counters.epoch,
            batches=counters.batches,
            waited=counters.waited,
            in_flight=counters.in_flight if is_under_way else 0,
            failures=0 if policy is None else policy.count,
            worker_deaths=tally.deaths,
            worker_restarts=tally.restarts,
            resumed_at=0 if epoch is None else epoch.bookmark.read(),
            retries=0 if policy is None else policy.retries,
            batch_bytes=counters.bytes / max(1, counters.weighed),
            listed=counters.listed,
            loop_lag=None if counters.lag is None else counters.lag(),
            device_bytes=_ahead_bytes(counters) if is_under_way else 0,
            iteration=counters.iteration,
        )
        recorded, copied = list(counters.records.latest), _copies_of(counters)
        return with_records(stats, recorded, self._live.setting(), copied)

    def report(self) -> "Report":
        """Return what limits training, and the one argument to change.

        The latest batches of the latest epoch, at most 1,024, are replayed with other
        arguments; the change that gains most is the advice. Takes 0.05 to 0.3 s.
        ``print`` shows it.
        """
        from aioloader._observe import verdict

        records, setting = self._recorded()
        stats, copies = self.stats(), self._copied()
        length, before = self._epoch_length(), max(0, stats.epoch)
        setting = replace(setting, length=length, epochs_before=before)
        return verdict.report(records, setting, stats, copies=copies)

    def report_html(self, path: str | os.PathLike[str]) -> None:
        """Write ``stats()`` and ``report()`` as one page, with a drawing of the stages.

        Args:
            path: The HTML file; it is self-contained and makes no requests.
        """
        from aioloader._observe.page import report_html

        report_html(path, self.stats(), self.report(), *self._recorded())

    def trace(self, path: str | os.PathLike[str]) -> "Trace":
        """Return a context manager that records when and where batches are made.

        Perfetto and Chrome's tracing open the file; ``aioloader.merge_traces`` joins it
        with a trace of ``torch.profiler``, which has the same clock. For ``with`` and
        ``async with``; a batch in the block costs 0.1 us.

        Args:
            path: The JSON file; compressed if the name ends with ``".gz"``.
        """
        from aioloader._observe.trace import Trace

        trace = Trace(path, self._live.traces)
        self._live.show(trace)
        return trace

    def _recorded(self) -> tuple[list[Record], Setting]:
        """Return the records of the latest epoch, and how it was set up."""
        epoch = self._live.epoch
        records = [] if epoch is None else epoch.counters.records.all()
        return records, self._live.setting()

    def _epoch_length(self) -> int:
        """Return how many batches the latest epoch has; so far, if it has no length."""
        epoch, options = self._live.epoch, self._live.options
        if epoch is None or options is None:
            return 0
        batches = epoch.counters.batches
        if not epoch.progress.is_over:
            with contextlib.suppress(TypeError):
                batches = max(batches, options.length())
        return batches

    def _copied(self) -> list[Copy]:
        epoch = self._live.epoch
        return [] if epoch is None else _copies_of(epoch.counters)

    @property
    def skipped(self) -> tuple[Failure, ...]:
        """The latest failed samples of the latest epoch, at most 1,000."""
        policy = None if self._live.epoch is None else self._live.epoch.failures
        return () if policy is None else tuple(policy.latest)


def _copies_of(counters: Counters) -> list[Copy]:
    """Return the latest copies to the device."""
    return [] if counters.copies is None else list(counters.copies.latest)


def _ahead_bytes(counters: Counters) -> int:
    """Return the device memory of batches moved and not yet delivered, in bytes."""
    copies = counters.copies
    return 0 if copies is None else max(0, copies.moved_bytes - copies.taken_bytes)
