"""The speed of a loader under any settings, computed from the durations of batches.

A batch is requested when an earlier one is taken. It is taken when it is ready and the
step before has ended. So one pass computes each batch's times from those of earlier
batches. Two laws bound the result (Denning and Buzen, "The operational analysis of
queueing network models", 1978). No slot, reader, processor or copy does more than a
second of work per second. The number of batches in flight is their rate times the
seconds that each takes (Little). Assumptions:

- Reads do not slow down when more run at a time, unless they queue (``costs``). A batch
  takes as long in a worker as in the consumer's process. Transport is as recorded and
  keeps no worker busy. If workers are new, ``changes`` adds a small batch's transport.
- As many slots compute at a time as there are cores, but only one if workers are
  threads, because of the GIL. If records show that the consumer waits for the GIL
  (``costs``), it waits whenever threads make batches.
- Readers in several workers are one pool. Batches are copied to a device one by one.
"""

import math
from collections.abc import Sequence
from heapq import heappop, heappush
from statistics import mean

import numpy as np

from aioloader._base.records import RecordedSettings
from aioloader._observe.costs import Costs
from aioloader._observe.stages import Floats

# Limit on the warm-up batches, which are not timed.
_MAX_WARM_UP = 256


def window_of(setting: RecordedSettings, costs: Costs) -> int:
    """Return the limit on batches requested and not delivered, or an estimate of it."""
    if setting.window is not None:
        return max(1, setting.window)
    size = setting.batch_size or np.maximum(costs.reads, costs.samples).mean()
    readers = max(1, setting.workers)
    samples = setting.concurrency * readers
    return math.ceil(samples / max(1, size)) + 3 * readers + setting.on_device


def seconds_per_batch(costs: Costs, setting: RecordedSettings) -> float:
    """Return the computed seconds per batch once the pipeline is full."""
    if setting.place == "inline" or setting.window == 0:  # one after the other
        return float(_parts(costs, setting)[:, 1:].sum(1).mean())
    ahead = min(_MAX_WARM_UP, 2 * window_of(setting, costs) + setting.making_lanes + 16)
    counted = math.ceil(32 / len(costs.step)) * len(costs.step)
    taken = taken_times(costs, setting, ahead + counted + 1)
    return max((taken[-1] - taken[ahead]) / counted, costs.cpu / setting.processors)


def taken_times(
    costs: Costs, setting: RecordedSettings, batches: int, requests: float = math.inf
) -> list[float]:
    """Return when the consumer takes each of an epoch's first ``batches`` batches.

    The recorded batches are repeated as often as needed. ``requests``: the number of
    batches whose indices are drawn.
    """
    parts: list[list[float]] = _parts(costs, setting).tolist()
    window, slots = window_of(setting, costs), setting.making_lanes
    slow = [*costs.slow, *(1.0,) * slots][:slots]
    free = [(0.0, factor) for factor in sorted(slow)]  # each slot: free since, factor
    in_flight: list[tuple[float, float]] = []
    taken: list[float] = []
    now = asked = copied = flowed = 0.0
    for number in range(batches + window - 1):
        flow, front, made, back, *_, draw = parts[number % len(parts)]
        if number < requests:
            now, asked = now + draw, asked + draw
            taken[-1:] = [now] if taken else []
        flowed = max(flowed, now) + flow
        since, factor = heappop(free)
        made *= factor
        since = max(since, now) + made
        heappush(free, (since, factor))
        ready = max(since, max(now + front, flowed) + made) + back
        heappush(in_flight, (number if setting.in_order else ready, ready))
        if len(in_flight) < window:
            continue
        _, ready = heappop(in_flight)
        *_, copy, step, _ = parts[len(taken) % len(parts)]
        if setting.on_device:
            room = taken[-setting.on_device] if len(taken) >= setting.on_device else 0.0
            copied = ready = max(ready, copied, room) + copy
        now = max(asked, ready)
        taken.append(now)
        asked = now + step
    return taken


def _parts(costs: Costs, setting: RecordedSettings) -> Floats:
    """Return the seconds of each batch's stages, as an array with a row per batch.

    Columns: use of all readers together; reading until the last sample; making in a
    slot; transport; copying to the device; training step; drawing indices.
    """
    made, back = costs.make, costs.transport
    flow = front = np.zeros(len(made))
    if setting.is_coupled:
        made = made + costs.read
    else:
        readers, transforming = setting.reading_lanes, setting.transforming_lanes
        read = costs.read + costs.held * setting.is_shared
        flow = np.maximum(read / readers, costs.awaited / transforming)
        flow = np.maximum(flow, costs.least * costs.reads)
        alone = read / np.minimum(costs.reads, readers)
        front = np.maximum(costs.slowest, alone)
        front = front + costs.awaited / np.minimum(costs.samples, transforming)
    step = costs.step + costs.locked * setting.is_shared
    return np.stack([flow, front, made, back, costs.copy, step, costs.sampler], 1)


def pace(taken: Sequence[float]) -> float:
    """Return the seconds per batch, robust against batches that come in bursts.

    Divide the difference of the two halves' mean times by their distance in batches.
    """
    half = len(taken) // 2
    if not half:
        return 0.0
    return (mean(taken[-half:]) - mean(taken[:half])) / (len(taken) - half)
