"""The statistics of one epoch, as ``loader.stats()`` returns them."""

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from aioloader._base.formatting import seconds_text, table
from aioloader._base.records import BatchRecord, Copy, LoopLag, RecordedSettings
from aioloader._observe.stages import (
    StageStats,
    held_back,
    is_made,
    percentiles,
    stage_stats,
)

# A loop that is blocked for a smaller share of the time is not reported.
_LEAST_LAG = 0.05
# The column heads of a table of stages.
HEADS = ("stage", "lanes", "busy", "starved", "blocked", "p50", "p95", "p99")


class Percentiles(NamedTuple):
    """Seconds per batch: the median and high percentiles."""

    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0


class Listed(NamedTuple):
    """How many shards an epoch listed before reading the first, and how long that took.

    Attributes:
        shards: How many shards were listed.
        seconds: How long the listing took.
    """

    shards: int
    seconds: float


class SourceStats(NamedTuple):
    """How much of one source of a mixture was read.

    Attributes:
        samples: How many samples the mixture has taken from the source.
        passes: Number of the current pass over the source, from 1, as ``repeat`` counts
            them; 0 before the first sample. This is a mean over this rank's readers.
    """

    samples: int
    passes: float


@dataclass(frozen=True)
class LoaderStats:
    """The statistics of the latest epoch so far, from ``loader.stats()``.

    The properties describe the latest batches, at most 1,024, and are computed when
    accessed.

    Attributes:
        epoch: Epoch number, from 0; -1 before the first.
        batches: How many batches this epoch has delivered.
        waited: Seconds the consumer waited for batches that were not ready. If a plain
            ``for`` makes its batches itself, making them counts as waiting.
        in_flight: How many batches are requested and not yet delivered.
        failures: How many samples failed and were skipped or replaced.
        retries: How many times the loader's ``retry`` has repeated a read.
        worker_deaths: How many worker processes died, over all epochs.
        worker_restarts: How many worker processes were started to replace dead ones.
        resumed_at: Number of the batch at which the epoch resumed; 0 if not resumed.
        batch_bytes: Mean bytes of a batch's tensors, arrays, byte strings and texts,
            over every 16th batch and a few early ones; 0 if none was measured.
        listed: The listing of a stream's shards; None if this process listed none.
        loop_lag: How long the event loop that reads samples here was blocked; None if
            there is no such loop in this process, or nothing is measured yet.
        device_bytes: Bytes on the device of batches moved and not yet delivered.
        sources: For a mixture of streams, how much of each source this rank's readers
            have read, by name. Samples beyond the position of ``state_dict()``, which
            are still in later steps of the streams, are not counted.
        iteration: Identity of the iteration, since two may have the same epoch number.
    """

    epoch: int
    batches: int
    waited: float
    in_flight: int
    failures: int
    retries: int = 0
    worker_deaths: int = 0
    worker_restarts: int = 0
    resumed_at: int = 0
    batch_bytes: float = 0.0
    listed: Listed | None = None
    loop_lag: LoopLag | None = None
    device_bytes: int = 0
    sources: Mapping[str, SourceStats] = field(default_factory=dict, hash=False)
    iteration: object = field(default=None, repr=False, compare=False)
    _records: Sequence[BatchRecord] = field(default=(), repr=False, compare=False)
    _setting: RecordedSettings = field(
        default=RecordedSettings("inline"), repr=False, compare=False
    )
    _copies: Sequence[Copy] = field(default=(), repr=False, compare=False)
    _alone: Sequence[float] = field(default=(), repr=False, compare=False)

    @property
    def recent(self) -> int:
        """How many batches are recorded, up to 1,024; the properties describe these."""
        return len(self._records)

    @property
    def seconds(self) -> float:
        """Seconds from the first recorded request to the last recorded delivery."""
        records = self._records
        return records[-1].taken - records[0].asked if records else 0.0

    @property
    def samples(self) -> int:
        """How many samples the recorded batches have in total."""
        return sum(record.samples for record in self._records)

    @cached_property
    def waits(self) -> Percentiles:
        """Percentiles of the seconds from requesting a batch to receiving it."""
        waits = [record.taken - record.asked for record in self._records]
        return Percentiles(*percentiles(waits))

    @cached_property
    def queued(self) -> float:
        """Mean number of batches that were ready when the consumer requested one."""
        collated = sorted(record.made[4] for record in self._records if is_made(record))
        queued = [
            max(0, bisect.bisect_right(collated, record.asked) - number)
            for number, record in enumerate(self._records)
        ]
        return sum(queued) / len(queued) if collated else 0.0

    @cached_property
    def held(self) -> float:
        """Total seconds that finished batches waited for an earlier batch."""
        return held_back(self._records, self._setting)

    @cached_property
    def stages(self) -> tuple[StageStats, ...]:
        """What each stage did for the recorded batches, in pipeline order."""
        return stage_stats(self._records, self._setting, self._copies)

    def __str__(self) -> str:
        """Return the statistics as text, with a table of recorded stages, if any."""
        waited = seconds_text(self.waited)
        flight = f"{self.in_flight} in flight; waited {waited}"
        lines = [f"epoch {self.epoch}: {self.batches:,} batches, {flight}"]
        counts = {
            "failed samples": self.failures,
            "retries": self.retries,
            "worker deaths": self.worker_deaths,
            "worker restarts": self.worker_restarts,
        }
        lines += [f"{name}: {count:,}" for name, count in counts.items() if count]
        if self.listed is not None:
            took = seconds_text(self.listed.seconds)
            lines.append(f"listed {self.listed.shards:,} shards in {took}")
        lines += [
            f"source {name!r}: {source.samples:,} samples, in pass {source.passes:.4g}"
            for name, source in self.sources.items()
        ]
        if (lag := self.loop_lag) is not None and lag.share >= _LEAST_LAG:
            by = f" by {lag.culprit}" if lag.culprit else ""
            longest = seconds_text(lag.seconds)
            text = f"event loop blocked {lag.share:.0%} of the time, {longest}{by}"
            lines.append(text)
        if self.device_bytes:
            lines.append(f"ahead on the device: {self.device_bytes / 1e6:,.1f} MB")
        if self.recent and self.seconds:
            lines += self._recent_lines()
        return "\n".join(lines)

    def _recent_lines(self) -> list[str]:
        waits = " / ".join(map(seconds_text, self.waits))
        speeds = (
            f"{self.recent / self.seconds:,.4g} batches/s, "
            f"{self.samples / self.seconds:,.4g} samples/s"
        )
        if self.batch_bytes:
            rate = self.batch_bytes * self.recent / self.seconds
            speeds += f", {rate / 1e6:,.4g} MB/s"
        took = seconds_text(self.seconds)
        lines = [
            f"latest {self.recent:,} batches: {took}, {speeds}",
            f"wait per batch, p50 / p95 / p99: {waits}",
            f"batches ready when one was requested, mean: {self.queued:.1f}",
        ]
        if self.held > 0.01 * self.seconds:
            lines.append(f"waited for an earlier batch: {seconds_text(self.held)}")
        return [*lines, "", *table(HEADS, [*stage_rows(self.stages)])]


def stage_rows(stages: Sequence[StageStats]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a table of stages, as text under ``HEADS``."""
    for stage in stages:
        shares = (f"{share:.0%}" for share in stage.shares.values())
        yield (
            *(stage.name, str(stage.lanes), *shares),
            *map(seconds_text, (stage.p50, stage.p95, stage.p99)),
        )
