"""Estimate from the records what the GIL costs the consumer.

A thread that computes in Python keeps the GIL for the switch interval while another one
wants it. So a consumer that slept, or waited for its accelerator, resumes late if the
loader's own threads compute meanwhile, and its step looks longer than it is.
"""

import sys
from collections.abc import Sequence

import numpy as np

from aioloader._observe.records import Record, Setting
from aioloader._observe.stages import Floats, seen_transports

# The GIL is contended if batches of this process take this many seconds to arrive,
_LATE = 1e-3
# or if this share of steps, and this many times more than by chance, end
_SHARE, _TIMES = 0.2, 4
# within this many seconds after a batch is made, which releases it.
_AT_ONCE = 3e-4
# This share of uneven steps did not wait; others waited for at most this many turns.
_QUICKEST, _TURNS = 0.05, 3


def lock_waits(records: Sequence[Record], setting: Setting) -> Floats:
    """Return how long each step but the last waited for the GIL.

    This is estimated, and only if there are signs of it: batches that the consumer
    waited for came late, for the same reason, or many steps end as soon as a batch is
    made. If most steps take equally long, each is assumed to wait for the switch
    interval, at most as long as batches were made before, or half of that if a batch
    was made just then. Otherwise the quickest steps did not wait.
    """
    none = np.zeros(max(0, len(records) - 1))
    if not (setting.is_shared and len(none)) or setting.on_device:
        return none
    taken = np.array([one.taken for one in records])
    asked = np.array([one.asked for one in records[1:]])
    made = np.array([one.made for one in records])
    begins, ends, cpu = made[:, setting.making_starts], made[:, 4], made[:, 6]
    steps, seconds = asked - taken[:-1], max(taken[-1] - taken[0], 1e-9)
    turn = sys.getswitchinterval()
    # Seconds of making within the last turn of each step: a row per step.
    begun = np.maximum(taken[:-1], asked - turn)
    within = np.minimum(ends, asked[:, None]) - np.maximum(begins, begun[:, None])
    waits: Floats = np.minimum(asked - begun, within.clip(0).sum(1))
    since = asked[:, None] - ends
    is_released = ((since > 0) & (since < _AT_ONCE)).any(1)
    is_even = (abs(steps - np.median(steps)) < turn / 10).sum() > len(steps) / 3
    if is_even:
        waits[is_released] /= 2
    else:
        beyond = steps - np.quantile(steps, _QUICKEST)
        waits = np.where(waits > 0, beyond.clip(0, _TURNS * turn), 0.0)
    late = seen_transports(records, setting).values()
    is_late = bool(late) and np.median([*late]) >= _LATE
    by_chance = _TIMES * len(records) * _AT_ONCE / seconds
    if not is_late and is_released.mean() <= max(_SHARE, by_chance):
        return none
    # A step that computes waits for no lock, whatever its length.
    making = np.median(cpu[cpu > 0]) * len(steps) if cpu.any() else 0.0
    idle = max(0.0, steps.sum() - max(0.0, setting.used * seconds - making))
    waits *= min(1.0, idle / max(waits.sum(), 1e-9))
    return waits
