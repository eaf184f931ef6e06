"""What a loader reports: statistics, what limits training, traces."""

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aioloader._observe.records import Counters
from aioloader._order.failures import Failure
from aioloader._order.stream_states import mixed

if TYPE_CHECKING:
    from aioloader._loader.runtime import Runtime
    from aioloader._observe.stats import LoaderStats
    from aioloader._observe.trace import Trace
    from aioloader._observe.verdict import Report


class _Shown:
    """An attribute that a subclass or its instances may replace; no property may."""

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
        """Return the statistics of the latest epoch so far; ``print`` shows a table."""
        from aioloader._observe.stats import LoaderStats, SourceStats

        epoch, servers = self._live.epoch, self._live.pools.servers
        counters = Counters() if epoch is None else epoch.counters
        policy = None if epoch is None else epoch.failures
        is_under_way = any(one.is_under_way() for one in self._live.iterators())
        return LoaderStats(
            epoch=counters.epoch,
            batches=counters.batches,
            waited=counters.waited,
            in_flight=counters.in_flight if is_under_way else 0,
            failures=0 if policy is None else policy.count,
            worker_deaths=servers.deaths,
            worker_restarts=servers.restarts,
            resumed_at=0 if epoch is None else epoch.bookmark.read(),
            retries=0 if policy is None else policy.retries,
            batch_bytes=counters.bytes / max(1, counters.weighed),
            listed_shards=counters.listed_shards,
            listed_seconds=counters.listed_seconds,
            loop_lag=None if counters.lag is None else counters.lag(),
            device_bytes=counters.ahead_bytes() if is_under_way else 0,
            sources={name: SourceStats(*one) for name, one in self._mixed().items()},
            iteration=counters.iteration,
            _records=counters.recorded(),
            _setting=self._live.setting(),
            _copies=list(counters.copies.latest),
        )

    def report(self, *, ranks: str | None = None) -> "Report":
        """Return the bottleneck of training, and the one argument to change.

        The report computes how fast the latest batches of the latest epoch, at most
        256, would be with other arguments, and advises the one with the largest
        speed-up. Takes 0.05 to 0.3 s. ``print`` shows it.

        Args:
            ranks: Also says which rank waits longest for these batches, and which ranks
                have not called this in the same epoch. A name for this loader, the same
                on all ranks, such as ``"train"``. Numbers are exchanged through the
                store of torch's process group; no rank waits for another.
        """
        from aioloader._observe import verdict

        stats, length = self.stats(), self._epoch_length()
        before = max(0, stats.epoch)
        setting = replace(stats._setting, length=length, epochs_before=before)
        found = verdict.report(stats._records, setting, stats, stats._copies)
        if ranks is None:
            return found
        from aioloader._order.rank_store import slowest_rank

        waited = sum(one.taken - one.asked for one in stats._records)
        slowest = slowest_rank(ranks, stats.epoch, waited, stats.recent)
        return replace(found, remarks=found.remarks + slowest)

    def report_html(self, path: str | os.PathLike[str]) -> None:
        """Write ``stats()`` and ``report()`` as one page, with a diagram of the stages.

        Args:
            path: The HTML file; it is self-contained and makes no requests.
        """
        from aioloader._observe.page import report_html

        report_html(path, self.stats(), self.report())

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

    def _mixed(self) -> dict[str, tuple[int, float]]:
        """Return samples and passes of the sources of a mixture of streams."""
        epoch, options = self._live.epoch, self._live.options
        if epoch is None or options is None or not options.is_own_stream:
            return {}
        states = epoch.progress.bookmark().states.values()
        return mixed(one["dataset"] for one in states if "dataset" in one)

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

    @property
    def skipped(self) -> tuple[Failure, ...]:
        """The latest failed samples of the latest epoch, at most 1,000."""
        policy = None if self._live.epoch is None else self._live.epoch.failures
        return () if policy is None else tuple(policy.latest)
