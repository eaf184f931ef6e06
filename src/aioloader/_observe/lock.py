"""What the interpreter's lock costs the consumer, seen in its records.

A thread that computes in Python keeps the lock for the switch interval while another
one wants it. So a consumer that slept, or waited for its accelerator, gets on late if
the loader's own threads compute meanwhile, and its step looks longer than it is.
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
    is_coupled,
    is_made,
    seen_transports,
)

# The lock is kept if batches of this process take so long to their consumer, or
_LATE = 1e-3
# if so many steps, and so many times more than by chance, end
_SHARE, _TIMES = 0.2, 4
# so soon after a batch is made, which lets it go.
_AT_ONCE = 3e-4
# This share of uneven steps did not wait; others did for so many turns, at the most.
_QUICKEST, _TURNS = 0.05, 3


def is_shared(setting: Setting) -> bool:
    """Tell whether a thread of the consumer's process makes batches beside it."""
    if setting.place == "workers":
        return setting.worker_kind in {"thread", "ThreadPoolExecutor"}
    return setting.place in {"thread", "loop"}


def lock_waits(records: Sequence[Record], setting: Setting) -> list[float]:
    """Return for how long each step but the last waited for the interpreter's lock.

    That is not measured, and only estimated if there are signs of it: batches that the
    consumer waited for came late, for the same reason, or many steps end as soon as a
    batch is made. Where most steps take equally long, each waits in the same way: for
    the switch interval, at the most as long as batches were made before, or half of
    that if a batch was made just then. Else the quickest steps did not wait.

    Args:
        records: In the order in which they were taken, with the times of their making.
        setting: What they were made with.
    """
    none = [0.0] * (len(records) - 1)
    makes = [one for one in records if is_made(one)]
    if not is_shared(setting) or setting.on_device or not (none and makes):
        return none
    begins = _times(makes, 0 if is_coupled(setting) else 2)
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
