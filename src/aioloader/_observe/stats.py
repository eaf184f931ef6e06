"""Figures of one epoch: plain counters on the hot path, a frozen snapshot outside."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from aioloader._observe.records import Record, Setting
from aioloader._observe.stages import StageStats, held_back, percentiles, stage_stats
from aioloader._observe.words import seconds_text, table


@dataclass(slots=True)
class Counters:
    """What a source counts as it goes; one per epoch.

    Attributes:
        epoch: Epoch number, from 0; -1 before the first.
        batches: Batches delivered.
        waited: Seconds the consumer waited for batches that were not ready.
        in_flight: Batches requested and not yet taken.
    """

    epoch: int = -1
    batches: int = 0
    waited: float = 0.0
    in_flight: int = 0


class Percentiles(NamedTuple):
    """Seconds per batch: the median, and what few batches exceed."""

    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0


_NO_WAITS = Percentiles()


@dataclass(frozen=True)
class LoaderStats:
    """What ``loader.stats()`` returns: the latest epoch so far.

    What follows ``worker_restarts`` is about the latest batches only.

    Attributes:
        epoch: Epoch number, from 0; -1 before the first.
        batches: Batches delivered.
        waited: Seconds the consumer waited for batches that were not ready. The time
            that an inline ``for`` spends making a batch is not a wait.
        in_flight: Batches requested and not yet taken.
        failures: Samples that failed and were skipped or replaced.
        worker_deaths: Worker processes that died, over all epochs.
        worker_restarts: Worker processes started in their place.
        recent: How many batches are recorded.
        seconds: From when the first of these was asked for until the last was taken.
        samples: Their samples.
        waits: Seconds from asking for a batch to having it.
        held: Seconds that made batches waited for an earlier one, summed over them.
        stages: The way of these batches, stage by stage.
    """

    epoch: int
    batches: int
    waited: float
    in_flight: int
    failures: int
    worker_deaths: int = 0
    worker_restarts: int = 0
    recent: int = 0
    seconds: float = 0.0
    samples: int = 0
    waits: Percentiles = _NO_WAITS
    held: float = 0.0
    stages: tuple[StageStats, ...] = ()

    def __str__(self) -> str:
        """Return a table of the stages, at most 100 columns wide."""
        waited = seconds_text(self.waited)
        flight = f"{self.in_flight} in flight; waited {waited}"
        lines = [f"epoch {self.epoch}: {self.batches:,} batches, {flight}"]
        counts = {
            "failed samples": self.failures,
            "worker deaths": self.worker_deaths,
            "worker restarts": self.worker_restarts,
        }
        lines += [f"{name}: {count:,}" for name, count in counts.items() if count]
        if self.recent and self.seconds:
            lines += self._recent_lines()
        return "\n".join(lines)

    def _recent_lines(self) -> list[str]:
        waits = " / ".join(map(seconds_text, self.waits))
        speeds = (
            f"{self.recent / self.seconds:,.4g} batches/s, "
            f"{self.samples / self.seconds:,.4g} samples/s"
        )
        took = seconds_text(self.seconds)
        lines = [
            f"latest {self.recent:,} batches: {took}, {speeds}",
            f"wait per batch, p50 / p95 / p99: {waits}",
        ]
        if self.held > 0.01 * self.seconds:
            lines.append(f"held back for an earlier batch: {seconds_text(self.held)}")
        heads = ("stage", "lanes", "busy", "starved", "blocked", "p50", "p95", "p99")
        rows = [
            (
                stage.name,
                str(stage.lanes),
                *(
                    f"{part / (stage.lanes * self.seconds):.0%}"
                    for part in (stage.busy, stage.starved, stage.blocked)
                ),
                *map(seconds_text, (stage.p50, stage.p95, stage.p99)),
            )
            for stage in self.stages
        ]
        return [*lines, "", *table(heads, rows)]


def with_records(
    stats: LoaderStats, records: Sequence[Record], setting: Setting
) -> LoaderStats:
    """Return ``stats`` with what the records tell of the latest batches."""
    if not records:
        return stats
    waits = [one.taken - one.asked for one in records]
    return replace(
        stats,
        recent=len(records),
        seconds=records[-1].taken - records[0].asked,
        samples=sum(one.samples for one in records),
        waits=Percentiles(*percentiles(waits)),
        held=held_back(records, setting),
        stages=stage_stats(records, setting),
    )
