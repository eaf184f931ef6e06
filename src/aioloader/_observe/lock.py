"""Estimate from the records what the GIL costs the consumer.

A thread that computes in Python keeps the GIL for the switch interval while another one
wants it. So a consumer that slept, or waited for its accelerator, resumes late if the
loader's own threads compute meanwhile, and its step looks longer than it is.
"""

import sys
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import numpy as np

from aioloader._observe.records import Record, Setting
from aioloader._observe.stages import (
    Floats,
    hand_over,
    is_made,
    making_starts,
    seen_transports,
)

# The GIL is contended if batches of this process take this many seconds to arrive,
_LATE = 1e-3
# or if this share of steps, and this many times more than by chance, end
_SHARE, _TIMES = 0.2, 4
# within this many seconds after a batch is made, which releases it.
_AT_ONCE = 3e-4
# This share of uneven steps did not wait; others waited for at most this many turns.
_QUICKEST, _TURNS = 0.05, 3


def is_shared(setting: Setting) -> bool:
    """Tell whether another thread of the consumer's process makes batches."""
    if setting.place == "workers":
        return setting.worker_kind in {"thread", "ThreadPoolExecutor"}
    return setting.place in {"thread", "loop"}


def processors(setting: Setting) -> int:
    """Return how many lanes may compute at a time: one if workers share the GIL."""
    is_one = setting.place == "workers" and is_shared(setting)
    return 1 if is_one else max(1, setting.cores)


def lock_waits(records: Sequence[Record], setting: Setting) -> list[float]:
    """Return how long each step but the last waited for the GIL.

    This is estimated, and only if there are signs of it: batches that the consumer
    waited for came late, for the same reason, or many steps end as soon as a batch is
    made. If most steps take equally long, each is assumed to wait for the switch
    interval, at most as long as batches were made before, or half of that if a batch
    was made just then. Otherwise the quickest steps did not wait.

    Args:
        records: The records in the order of delivery, with the times of their making.
        setting: The loader's setting.
    """
    none = [0.0] * (len(records) - 1)
    makes = [one for one in records if is_made(one)]
    if not is_shared(setting) or setting.on_device or not (none and makes):
        return none
    waits = _seen_waits(records, makes, setting)
    most = _idle(records, makes, setting)
    return [one * min(1.0, most / max(sum(waits), 1e-9)) for one in waits]


def _idle(
    records: Sequence[Record], makes: Sequence[Record], setting: Setting
) -> float:
    """Return the seconds of all steps in which their process did not compute.

    A step that computes waits for no lock, whatever its length.
    """
    steps = [later.asked - one.taken for one, later in pairwise(records)]
    seconds = records[-1].taken - records[0].taken
    measured = [one.made[6] for one in makes if one.made[6]]
    making = median(measured) * len(steps) if measured else 0.0
    return max(0.0, sum(steps) - max(0.0, setting.used * seconds - making))


def _seen_waits(
    records: Sequence[Record], makes: Sequence[Record], setting: Setting
) -> list[float]:
    """Return the waits that the ends of steps show; zeros without such signs."""
    none = [0.0] * (len(records) - 1)
    begins = _times(makes, making_starts(setting))
    ends = _times(makes, 4)
    turn = sys.getswitchinterval()
    steps = [later.asked - one.taken for one, later in pairwise(records)]
    usual, least = median(steps), float(np.quantile(steps, _QUICKEST))
    is_even = sum(abs(one - usual) < turn / 10 for one in steps) > len(steps) / 3
    waits, let = [], 0
    for step, (one, later) in zip(steps, pairwise(records), strict=True):
        begin = max(one.taken, later.asked - turn)
        made = np.minimum(ends, later.asked) - np.maximum(begins, begin)
        wait = min(later.asked - begin, float(made[made > 0].sum()))
        since = later.asked - ends
        is_let = bool(((since > 0) & (since < _AT_ONCE)).any())
        let += is_let
        if wait and not is_even:
            wait = min(max(0.0, step - least), _TURNS * turn)
        elif is_let:
            wait /= 2
        waits.append(wait)
    chance = len(ends) * _AT_ONCE / max(records[-1].taken - records[0].taken, 1e-9)
    late = seen_transports(records, setting, hand_over(records, setting)).values()
    is_late = bool(late) and median(late) >= _LATE
    is_kept = is_late or let > max(_SHARE, _TIMES * chance) * len(waits)
    return waits if is_kept else none


def _times(records: Sequence[Record], field: int) -> Floats:
    return np.array([one.made[field] for one in records])
