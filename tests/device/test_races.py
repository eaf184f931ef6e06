"""Memory is not reused too early on a device whose kernels and copies are late.

Values are compared on the device, in the consumer's stream, after long kernels: the
host is far ahead, as it is in training.
"""

import contextlib
import gc
import itertools
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from aioloader import DataLoader, Device
from device.watched import (
    DEVICE,
    FEWER,
    IS_FAKE,
    KINDS,
    MARKS,
    MODULE,
    ON_FAKE,
    SIZE,
    Rows,
    Watched,
    active_bytes,
    add_wrong,
    busy,
    counter,
    nothing_is_left,  # noqa: F401  (in place of the one for all tests)
    on,
    warm_device,  # noqa: F401
    wrong,
)

pytestmark = MARKS


def train(loader: Any, cycles: int, *, every: int = 500) -> int:
    """Read batches after long kernels, drop them before; return the wrong words."""
    count = counter()
    number = 0
    with contextlib.closing(iter(loader)) as iterator:
        for number, batch in enumerate(iterator, 1):
            busy(cycles)
            add_wrong(count, batch, number - 1)
            del batch
            if not number % every:
                MODULE.synchronize()
    assert number * SIZE == len(loader.dataset)
    return int(count)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(("num_workers", "workers"), KINDS)
def test_a_dropped_batch_is_intact(num_workers: int, workers: Any, depth: int) -> None:
    """Its memory is given to no new batch while a kernel reads it."""
    options: dict[str, Any] = {"num_workers": num_workers, "workers": workers}
    with on(
        Watched(), DataLoader(Rows(4000 // FEWER), SIZE, **options), depth
    ) as loader:
        assert train(loader, 200_000) == 0


def test_thousands_of_dropped_batches_stay_intact() -> None:
    """In several epochs, with persistent workers."""
    dataset = Rows(8000 // FEWER)
    loader: Any = DataLoader(dataset, SIZE, num_workers=2, persistent_workers=True)
    with on(Watched(), loader, 2):
        for _ in range(3):
            assert train(loader, 200_000) == 0


def test_a_stream_that_does_not_wait_is_noticed() -> None:
    """Without the wait, values are wrong: the tests here can see it."""
    port = Watched(late=2_000_000, forgets="event")
    with on(port, DataLoader(Rows(400), SIZE, num_workers=2)) as loader:
        assert train(loader, 1000) > 0


def test_an_allocator_that_is_not_told_is_noticed() -> None:
    """Without the record, values are wrong: the tests here can see it."""
    port = Watched(forgets="record")
    with on(port, DataLoader(Rows(400), SIZE, num_workers=2)) as loader:
        assert train(loader, 5_000_000) > 0


@pytest.mark.parametrize(("num_workers", "workers"), KINDS)
def test_a_slot_is_reused_only_after_its_copy(num_workers: int, workers: Any) -> None:
    """However late the device begins it."""
    options: dict[str, Any] = {"num_workers": num_workers, "workers": workers}
    port = Watched(late=500_000)
    with on(port, DataLoader(Rows(1200), SIZE, **options), 2) as loader:
        assert train(loader, 1000) == 0


def test_a_slot_that_is_not_held_is_noticed() -> None:
    """Without the hold, values are wrong: the tests here can see it."""
    port = Watched(late=5_000_000, forgets="slot")
    with on(port, DataLoader(Rows(400), SIZE, num_workers=2), 2) as loader:
        assert train(loader, 1000) > 0
    if IS_FAKE:
        MODULE.forgive()  # what was unlocked while it was read


@contextlib.contextmanager
def a_child() -> Iterator[None]:
    """Have a forked child share this process's memory during the block."""
    read, write = os.pipe()
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        child = os.fork()
    if not child:  # nothing of CUDA may be touched here
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        yield
    finally:
        os.close(write)
        os.waitpid(child, 0)
        os.close(read)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_fork_leaves_locked_pages_where_they_are(num_workers: int) -> None:
    """The device reads what is written after the fork."""
    dataset = Rows(400)
    options: Any = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    with on(Watched(), DataLoader(dataset, SIZE, **options)) as loader:
        assert train(loader, 1000) == 0
        with a_child():
            assert train(loader, 1000) == 0
        assert train(loader, 1000) == 0


@pytest.mark.parametrize(("num_workers", "workers"), KINDS)
@pytest.mark.parametrize("way", ["close", "drop", "break"])
def test_iterations_may_end_in_a_copy(way: str, num_workers: int, workers: Any) -> None:
    """Copies end before their memory is unlocked; see ``Held``."""
    port = Watched(late=20_000_000)  # ten milliseconds
    options: dict[str, Any] = {"num_workers": num_workers, "workers": workers}
    loader = on(port, DataLoader(Rows(400), SIZE, **options), 2)
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
        assert port.copied.acquire(timeout=20)
    if way == "close":
        iterator.close()
    elif way == "break":
        for _ in iterator:
            break
    del iterator
    loader.close()


class InTwo(Rows):
    """Samples of two parts."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index), super().__getitem__(index)


def test_an_error_during_a_copy_corrupts_no_batch() -> None:
    """The batch's other copies end before its memory is reused."""
    port = Watched(late=2_000_000)
    copies = itertools.count()
    begin = port.copy

    def copy(host: torch.Tensor) -> torch.Tensor:
        if next(copies) % 10 == 5:  # the second part of each fifth batch
            raise torch.OutOfMemoryError("the device is full")
        return begin(host)

    port.copy = copy  # type: ignore[method-assign]
    errors, count = 0, counter()
    iterator = iter(on(port, DataLoader(InTwo(400), SIZE, num_workers=2), 2))
    for number in range(100):
        try:
            for part in next(iterator):
                add_wrong(count, part, number)
        except torch.OutOfMemoryError:
            errors += 1
    assert (errors, int(count)) == (20, 0)
    iterator.close()


def test_the_consumer_may_change_its_stream() -> None:
    """Between batches."""
    streams: list[Any] = [MODULE.Stream(device=DEVICE) for _ in range(3)]
    streams.append(MODULE.default_stream())
    counts = [counter() for _ in streams]
    MODULE.synchronize()
    with on(Watched(late=200_000), DataLoader(Rows(2400 // FEWER), SIZE), 2) as loader:
        for number, batch in enumerate(in_turn(loader, streams)):
            with MODULE.stream(streams[number % 4]):
                busy(200_000)
                add_wrong(counts[number % 4], batch, number)
                del batch
    MODULE.synchronize()
    assert sum(map(int, counts)) == 0


def in_turn(loader: Any, streams: list[Any]) -> Iterator[torch.Tensor]:
    """Take each batch while another stream is current."""
    with contextlib.closing(iter(loader)) as iterator:
        for number in range(len(loader)):
            with MODULE.stream(streams[number % len(streams)]):
                batch = next(iterator)
            yield batch
            del batch


def test_kept_batches_are_not_overwritten() -> None:
    """While others come and go."""
    with on(Watched(), DataLoader(Rows(1200), SIZE, num_workers=2), 3) as loader:
        batches = [
            batch if not number % 10 else None for number, batch in enumerate(loader)
        ]
    for number, batch in enumerate(batches):
        assert batch is None or not wrong(batch, number)


@pytest.mark.parametrize("workers", ["process", "thread"])
def test_a_dropped_pinned_batch_is_not_overwritten(workers: Any) -> None:
    """As in torch, after its copy has begun."""
    count = counter()
    options: Any = {"num_workers": 2, "workers": workers, "pin_memory": True}
    with DataLoader(Rows(1200), SIZE, **options) as loader:
        for number, host in enumerate(loader):
            busy(2_000_000)
            batch = host.to(DEVICE, non_blocking=True)
            del host
            add_wrong(count, batch, number)
    assert int(count) == 0


def test_memory_is_bounded_while_the_host_runs_ahead() -> None:
    """Only a few batches are moved that the device has not processed."""
    MODULE.synchronize()
    before = active_bytes()
    MODULE.reset_peak_memory_stats()
    with on(Watched(), DataLoader(Rows(400, 1 << 19), SIZE)) as loader:
        for batch in loader:
            busy(20_000_000)
            del batch
    MODULE.synchronize()
    ahead = (active_bytes("peak") - before) / (SIZE * 4 << 19)
    assert ahead < 10, f"{ahead:.0f} batches were on the device at once"


def test_small_batches_leave_memory_flat() -> None:
    """Thousands of them, on the device and in pinned memory."""
    count = 40_000 // FEWER
    dataset = [(torch.full((16,), n, dtype=torch.float32), n) for n in range(count)]
    seen = []
    loader: Any = DataLoader(dataset, SIZE, device=Device(DEVICE, ahead=2))
    with loader:
        for number, (rows, labels) in enumerate(loader):
            if not number % (1000 // FEWER):
                MODULE.synchronize()
                assert torch.equal(rows[:, 3], labels.float())
                host = MODULE.host_memory_stats()["allocated_bytes.current"]
                seen.append((MODULE.memory_reserved(), host))
    assert number == 10_000 // FEWER - 1
    # some batches are late, more or less of them
    assert seen[-1][0] <= seen[2][0] + (1 << 20)
    assert seen[-1][1] <= seen[2][1] + (1 << 20)


@ON_FAKE
@pytest.mark.parametrize(
    ("batches", "by_name"),
    [(1000, False), (1000, True), pytest.param(10_000, False, marks=pytest.mark.fuzz)],
)
def test_ten_thousand_batches_leak_nothing(batches: int, by_name: bool) -> None:
    """None is wrong, no block is allocated, no slot locked; see ``Held``."""
    dataset = Rows(batches * SIZE, words=(1 << 14) + 256)  # batches come in slots
    loader: Any = DataLoader(dataset, SIZE, num_workers=2, device=DEVICE)
    MODULE.empty_cache()
    with loader if by_name else on(Watched(), loader, 2):
        assert train(loader, 0) == 0
    stats = MODULE.memory_stats(DEVICE)
    assert stats["blocks.all.current"] == 0
    assert stats["active_bytes.all.current"] == 0
    assert stats["reserved_bytes.all.current"] < 64 << 20
    del loader
    gc.collect()
    assert MODULE.host_memory_stats()["registered"] == 0
