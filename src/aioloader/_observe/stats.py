"""Figures of one epoch: plain counters on the hot path, a frozen snapshot outside."""

from dataclasses import dataclass, field

from aioloader._observe.records import Records, Setting


@dataclass(slots=True)
class Counters:
    """What a source counts as it goes; one per epoch.

    Attributes:
        epoch: Epoch number, from 0; -1 before the first.
        batches: Batches delivered.
        waited: Seconds the consumer waited for batches that were not ready.
        in_flight: Batches requested and not yet taken.
        records: What was noted of the latest batches.
        setting: How the loader is set up; None for a plain loop over a dataset.
    """

    epoch: int = -1
    batches: int = 0
    waited: float = 0.0
    in_flight: int = 0
    records: Records = field(default_factory=Records)
    setting: Setting | None = None


@dataclass(frozen=True)
class LoaderStats:
    """What ``loader.stats()`` returns: the latest epoch so far.

    Attributes:
        epoch: Epoch number, from 0; -1 before the first.
        batches: Batches delivered.
        waited: Seconds the consumer waited for batches that were not ready. The time
            that an inline ``for`` spends making a batch is not a wait.
        in_flight: Batches requested and not yet taken.
        failures: Samples that failed and were skipped or replaced.
        worker_deaths: Worker processes that died, over all epochs.
        worker_restarts: Worker processes started in their place.
    """

    epoch: int
    batches: int
    waited: float
    in_flight: int
    failures: int
    worker_deaths: int = 0
    worker_restarts: int = 0
