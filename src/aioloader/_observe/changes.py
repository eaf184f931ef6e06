"""Candidate changes of one argument that may speed up a loader."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from aioloader._base.formatting import seconds_text
from aioloader._base.records import RecordedSettings
from aioloader._observe.costs import Costs
from aioloader._observe.pace import window_of

_MAX_READS = 1024
# From this many concurrent reads on, fewer and larger reads are the better advice.
_MANY_READS = 256
# The concurrency of an async dataset if none is given.
_CONCURRENCY = 64
# Assumed time to read a small file from a shard, as a share of a single read's time.
_PACKED_SHARE = 0.1
# Reads wait for a store if at most this share of their time is processor time, and each
# sample waits at least this many seconds, which is more than a coroutine costs.
_MAX_CPU_SHARE, _LEAST_WAIT = 0.3, 100e-6
# Seconds that starting workers takes in each epoch: a constant, and an amount for each
# worker (benchmarks/startup.py).
_START_SECONDS, _WORKER_SECONDS = 0.1, 0.02
# Seconds that importing torch takes in a process that is not forked: 1.3 on a quiet
# machine, 5 on a busy one. A fork server imports torch once per program.
_IMPORT_SECONDS = 2.0
# Seconds that the consumer needs to receive a small batch from another process: 7,000
# batches per second (benchmarks/transport.py, pairs).
_PROCESS_HAND_OVER = 0.00014
# The same for a batch from another thread: 22,000 per second.
_THREAD_HAND_OVER = 0.000045
# Batches vary strongly if one in twenty takes this many times the median.
_UNEVEN = 2.0


@dataclass(frozen=True)
class Change:
    """A candidate change of one argument, with the settings and costs after it."""

    argument: str  # its name
    old: object  # its value; if the loader chooses it, the one in effect
    new: object  # its new value
    why: str  # the reason, as a clause
    cost: int  # 1: memory, 2: another order, 3: processes or threads, 4: new code
    setting: RecordedSettings  # the loader's settings after the change
    costs: Costs  # the durations of batches after the change
    start: float = 0.0  # seconds that the change adds to each epoch


def changes(
    costs: Costs, setting: RecordedSettings, start: float = 0.0
) -> Iterator[Change]:
    """Yield candidate changes; the smallest change of an argument comes first."""
    candidates = chain(
        _starts(costs, setting, start),
        _windows(costs, setting),
        _reads(costs, setting),
        _moves(costs, setting),
        _orders(costs, setting),
        _workers(costs, setting),
        _datasets(costs, setting),
    )
    return (change for change in candidates if change.argument not in setting.fixed)


def _starts(costs: Costs, setting: RecordedSettings, start: float) -> Iterator[Change]:
    if start and setting.epochs_before:
        why = f"workers start again in each epoch, for {seconds_text(start)}"
        kept = replace(setting, is_persistent=True)
        old, new = setting.is_persistent, kept.is_persistent
        yield Change("persistent_workers", old, new, why, 1, kept, costs, -start)


def _windows(costs: Costs, setting: RecordedSettings) -> Iterator[Change]:
    if setting.window == 0:  # batches are made only on request
        return
    if setting.place == "inline":
        why = "a thread makes batches while the step runs"
        beside = replace(setting, place="thread", window=2)
        costs = replace(costs, step=costs.step + _THREAD_HAND_OVER)
        yield Change("prefetch_factor", 0, 2, why, 1, beside, costs)
        return
    readers, on_device = max(1, setting.workers), setting.on_device
    now = max(1, (window_of(setting, costs) - on_device) // readers)
    why = "more batches are requested ahead, so slow ones do not stop the others"
    for new in (2 * now, 4 * now, 8 * now):
        wider = replace(setting, window=new * readers + on_device)
        yield Change("prefetch_factor", now, new, why, 1, wider, costs)


def _reads(costs: Costs, setting: RecordedSettings) -> Iterator[Change]:
    has_coroutines = setting.place == "loop" or setting.concurrency > 1
    reads_many = setting.reads_async and not setting.is_stream
    if not has_coroutines or not (reads_many or setting.transforms_async):
        return
    old = setting.concurrency
    where = "in the transform" if setting.transforms_async else "for the store"
    why = f"samples wait {where}, and more of them can wait at the same time"
    for new in (2 * old, 4 * old, 8 * old, 16 * old):
        if new <= _MAX_READS:
            wider = replace(setting, concurrency=new)
            yield Change("concurrency", old, new, why, 1, wider, costs)


def _moves(costs: Costs, setting: RecordedSettings) -> Iterator[Change]:
    old, window = setting.on_device, setting.window
    if not old:
        return
    why = "more batches are copied ahead, so a slow copy or a long step is bridged"
    if setting.stays_on_host:
        why = "more batches are ready ahead, so a slow one or a long step is bridged"
    for new in (2 * old, 4 * old) if window != 0 else ():
        wider = None if window is None else window + new - old
        ahead = replace(setting, on_device=new, window=wider)
        yield Change("Device.ahead", old, new, why, 1, ahead, costs)
    if costs.nbytes and not setting.stays_on_host:
        nbytes, rate = costs.nbytes, costs.nbytes / max(1e-9, costs.copy.mean()) / 1e9
        size, half = (f"{each / 1e6:,.3g} MB" for each in (nbytes, nbytes / 2))
        why = (
            f"they are copied at {rate:.3g} GB/s: send bytes or half floats, and cast "
            "them in Device.transform"
        )
        smaller = costs.scaled("device", 0.5)
        yield Change("the size of batches", size, half, why, 4, setting, smaller)


def _orders(costs: Costs, setting: RecordedSettings) -> Iterator[Change]:
    is_single = setting.is_coupled and setting.making_lanes == 1
    if is_single or not setting.in_order or setting.window == 0:
        return
    usual, slow = np.quantile(costs.slowest + costs.make, (0.5, 0.95))
    if slow > _UNEVEN * usual or max(costs.slow, default=1.0) > _UNEVEN:
        why = "batches that are ready do not wait for a slow one before them"
        free = replace(setting, in_order=False)
        old, new = setting.in_order, free.in_order
        yield Change("in_order", old, new, why, 2, free, costs)


def _workers(costs: Costs, setting: RecordedSettings) -> Iterator[Change]:
    old, kind = setting.workers, setting.worker_kind
    if setting.place == "workers" and setting.is_shared:
        why = "threads take turns at the interpreter's lock, processes do not"
        apart = replace(setting, worker_kind="process")
        starts = _first_start(setting) + _WORKER_SECONDS * old
        yield Change("workers", kind, "process", why, 3, apart, costs, starts)
    why = "more batches are made at the same time"
    if setting.is_replicated:
        why += ", if __iter__ yields each worker its own part (get_worker_info())"
    numbers = {2, 4, 8, 16, 32, setting.cores, 2 * old}
    is_kept = old and (setting.is_persistent or kind != "process")
    start = 0.0 if old else _first_start(setting)
    each = 0.0 if is_kept else _WORKER_SECONDS
    if not old:
        costs = replace(costs, step=costs.step + _PROCESS_HAND_OVER)
        if setting.epochs_before:
            why += "; persistent_workers=True starts them once, not in each epoch"
    for new in sorted(n for n in numbers if max(1, old) < n <= setting.cores):
        wider = _with_workers(setting, new)
        if wider.reading_lanes > _MAX_READS:
            return
        starts = start + each * (new - old)
        yield Change("num_workers", old, new, why, 3, wider, costs, starts)


def _first_start(setting: RecordedSettings) -> float:
    """Return the seconds that starting the first worker process adds to each epoch.

    A fork server imports torch once; that time is spread over all epochs so far.
    """
    epochs = setting.epochs_before + 1 if setting.start_method == "forkserver" else 1
    return _START_SECONDS + (setting.start_method != "fork") * _IMPORT_SECONDS / epochs


def _with_workers(setting: RecordedSettings, number: int) -> RecordedSettings:
    """Return ``setting`` with ``number`` workers and a window that fits them."""
    window = setting.window
    if window is not None:
        ahead = (window - setting.on_device) // max(1, setting.workers)
        each = ahead if setting.place != "inline" and ahead > 0 else 2
        window = each * number + setting.on_device
    if setting.place == "workers":
        return replace(setting, workers=number, window=window)
    # Workers read everything but async iterables.
    is_async = setting.place == "loop" and setting.reads_async
    return replace(
        setting,
        place="workers",
        workers=number,
        worker_kind="process",
        reads_in_workers=not (is_async and setting.is_stream),
        window=window,
    )


def _datasets(costs: Costs, setting: RecordedSettings) -> Iterator[Change]:
    if setting.is_stream or not waits_for_store(costs, setting):
        return
    if setting.is_coupled:
        new = f"async __getitem__, concurrency={_CONCURRENCY}"
        why = "reading waits for the store, and coroutines wait at the same time"
        asynchronous = replace(
            setting,
            place="loop",
            workers=0,
            worker_kind="",
            reads_in_workers=False,
            concurrency=_CONCURRENCY,
            reads_async=True,
            window=None if setting.window != 0 else 0,
            batch_size=max(1, round(costs.reads.mean())),
        )
        yield Change("dataset", "plain", new, why, 4, asynchronous, costs)
    elif setting.reads_async and setting.concurrency >= _MANY_READS:
        why = "one request then brings many samples; assumed to take a tenth"
        packed = costs.scaled("read", _PACKED_SHARE)
        yield Change("dataset", "a read each", "shards", why, 4, setting, packed)


def waits_for_store(costs: Costs, setting: RecordedSettings) -> bool:
    """Tell whether reads mostly wait, presumably for a store.

    Reads by coroutines count as waiting; for plain code, processor time is measured.
    """
    if setting.is_coupled and not costs.is_measured:
        return False
    read = costs.read.mean()
    busy = min(1.0, costs.read_cpu / max(1e-9, 1 - costs.delay)) * read
    samples = np.maximum(costs.reads, costs.samples).mean()
    return bool(busy <= _MAX_CPU_SHARE * read and read - busy >= _LEAST_WAIT * samples)
