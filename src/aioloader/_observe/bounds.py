"""What a change can gain at most, from what was measured, whatever a replay says.

No change gains more time than the consumer waits, more than the processors have left
for the same work, or, if the same lanes keep making the batches, than these are idle.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import mean

from aioloader._observe.batches import Batch, busy_lanes, crowding
from aioloader._observe.changes import Change
from aioloader._observe.lock import is_shared
from aioloader._observe.records import LoopLag, Record, Setting


@dataclass(frozen=True)
class Bounds:
    """Speed-ups that are not exceeded: 2 is twice as many steps per second.

    Attributes:
        waits: If nothing is waited for any more.
        cores: If no core is idle any more.
        lanes: If the lanes that make batches now are never idle.
        loop: If the thread of the event loop that reads now is never idle.
        lock: If what this process computes takes turns at the interpreter's lock.
    """

    waits: float = inf
    cores: float = inf
    lanes: float = inf
    loop: float = inf
    lock: float = inf

    def of(self, change: Change, setting: Setting) -> float:
        """Return the bound of a change."""
        if change.start < 0:
            return 1.0  # only starts are saved
        if change.saves_work:
            return self.waits
        bound = min(self.waits, self.cores)
        if is_shared(change.setting):
            bound = min(bound, self.lock)
        kept = change.keeps_lanes(setting)
        return min(bound, self.lanes, self.loop) if kept else bound


def bounds_of(
    records: Sequence[Record],
    setting: Setting,
    batches: Sequence[Batch],
    share: float,
    *,
    slow: Sequence[float] = (),
    lag: LoopLag | None = None,
) -> Bounds:
    """Return the bounds of a loader.

    Args:
        records: The records without the first ones, which are late.
        setting: The loader's setting.
        batches: The durations of these batches.
        share: Share of the time that the consumer waits.
        slow: How many times longer each worker takes.
        lag: How busy the event loop is that reads samples here, if there is one.
    """
    seconds = (records[-1].taken - records[0].taken) / max(1, len(records) - 1)
    here = used = setting.used * crowding(records, setting)
    if setting.place == "workers" and not is_shared(setting) and seconds:
        used += mean(one.cpu * one.is_measured for one in batches) / seconds
    return Bounds(
        waits=_inverse(1 - share),
        cores=setting.cores * _inverse(used),
        lanes=_inverse(busy_lanes(records, setting, slow)),
        loop=inf if lag is None else _inverse(lag.busy),
        lock=_inverse(here),
    )


def _inverse(share: float) -> float:
    return 1 / share if share > 0 else inf
