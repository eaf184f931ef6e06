"""Batches are in shared memory: not copied, not overwritten, bounded."""

import gc
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aioloader import DataLoader
from working import Numbers


class Images(Numbers):
    """Big samples, full of their index."""

    def __init__(self, n: int = 12, side: int = 300) -> None:
        super().__init__(n)
        self.side = side

    def __getitem__(self, index: int) -> Any:
        return torch.full((self.side, self.side), index, dtype=torch.int32)


def arenas() -> list[str]:
    """Return this process's mappings that are shared with workers."""
    text = Path("/proc/self/maps").read_text(encoding="utf-8")
    return re.findall(r"(?m)^.*memfd:aioloader-(?:arena|segment).*$", text)


def is_in_arena(tensor: torch.Tensor) -> bool:
    """Return whether the memory of ``tensor`` is shared with a worker."""
    for line in arenas():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= tensor.data_ptr() < end:
            return True
    return False


def intact(batch: torch.Tensor, first: int) -> bool:
    """Return whether a batch has its values everywhere."""
    expected = torch.arange(first, first + len(batch), dtype=torch.int32)
    return bool((batch == expected[:, None, None]).all())


class Masked(Images):
    """With an array that is too small to be collated in shared memory on its own."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index), np.full(9_000, index, np.float32)


@pytest.mark.slow
def test_small_arrays_are_in_shared_memory_beside_large() -> None:
    """Once the memory is large enough for both."""
    for number, (large, small) in enumerate(DataLoader(Masked(), 2, num_workers=1)):
        for batch in large, small[:, None]:
            assert is_in_arena(batch)
            assert intact(batch, 2 * number)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_workers", "fetch"), [(1, "auto"), (2, "auto"), (2, "loader")]
)
def test_memory_of_dropped_batches_is_reused(num_workers: int, fetch: Any) -> None:
    """A loop that drops its batches sees the same few addresses.

    It may write to them: the next batches are correct.
    """
    addresses = set()
    loader: Any = DataLoader(Images(80), 2, num_workers=num_workers, fetch=fetch)
    for number, batch in enumerate(loader):
        assert is_in_arena(batch)
        assert intact(batch, 2 * number)
        addresses.add(batch.data_ptr())
        batch.fill_(-1)
    # In flight, delivered, and still in the variable: one worker may make them all.
    at_once = 2 * num_workers + 2
    assert len(addresses) <= num_workers * at_once


def test_kept_batches_are_not_overwritten() -> None:
    """Most of ``list(loader)`` are copies, so that shared memory does not grow."""
    loader: Any = DataLoader(Images(120), batch_size=2, num_workers=2)
    kept = list(loader)
    assert all(intact(batch, 2 * number) for number, batch in enumerate(kept))
    shared = sum(map(is_in_arena, kept))
    assert 1 <= shared <= 2 * 2 + 6
    del loader
    gc.collect()
    assert all(intact(batch, 2 * number) for number, batch in enumerate(kept))


def test_views_of_a_dropped_batch_are_not_overwritten() -> None:
    """Tensors, numpy aliases and rows."""
    held: list[tuple[int, Any]] = []
    for number, batch in enumerate(DataLoader(Images(60), 2, num_workers=2)):
        if number % 10 == 0:
            derived = (batch[1], batch.numpy()[1], batch.mT[1, 3:], list(batch)[1])
            held.append((2 * number + 1, derived))
    for index, derived in held:
        assert all((part == index).all() for part in derived)


@pytest.mark.linux  # else the first one comes by pipe, or not
def test_a_batch_outlives_its_loader() -> None:
    """Its memory is freed with the last reference."""
    batch = next(iter(DataLoader(Images(), 2, num_workers=1)))
    gc.collect()
    assert intact(batch, 0)
    assert arenas()
    del batch
    gc.collect()
    until = time.monotonic() + 10  # the ends of the workers' threads are not awaited
    while arenas() and time.monotonic() < until:
        time.sleep(0.01)
    assert not arenas()


def small_or_big(samples: list[Any]) -> Any:
    """Collate into fresh memory, as users' own functions do."""
    stacked = torch.stack(samples)
    return {"all": stacked, "array": stacked.numpy().copy(), "first": stacked[:1]}


@pytest.mark.linux  # else the first ones come by pipe
def test_custom_collate_functions_cost_one_copy() -> None:
    """Into the slot."""
    for number, batch in enumerate(
        DataLoader(Images(40), 2, num_workers=2, collate_fn=small_or_big)
    ):
        assert intact(batch["all"], 2 * number)
        assert is_in_arena(batch["all"])
        assert np.array_equal(batch["array"], batch["all"].numpy())
        assert torch.equal(batch["first"], batch["all"][:1])


def test_a_worker_may_keep_its_batches() -> None:
    """A cache in the worker is not overwritten by later batches."""
    cache: list[torch.Tensor] = []

    def collate(samples: list[Any]) -> Any:
        fresh = torch.utils.data.default_collate(samples)
        cache.append(fresh)
        return [fresh, cache[0], cache[len(cache) // 2]]

    firsts = []
    for number, batch in enumerate(
        DataLoader(Images(40), 2, num_workers=1, collate_fn=collate)
    ):
        assert intact(batch[0], 2 * number)
        assert intact(batch[1], 0)
        assert intact(batch[2], 2 * ((number + 1) // 2))
        firsts.append(batch[1].sum().item())
    assert len(set(firsts)) == 1


def test_a_worker_may_keep_batches_in_slots() -> None:
    """``default_collate`` writes them in place."""
    from aioloader import default_collate  # noqa: PLC0415

    cache: list[torch.Tensor] = []

    def collate(samples: list[Any]) -> Any:
        cache.append(default_collate(samples))
        assert all(intact(batch, 2 * place) for place, batch in enumerate(cache))
        return cache[-1]

    loader: Any = DataLoader(Images(40), 2, num_workers=1, collate_fn=collate)
    for number, batch in enumerate(loader):
        assert intact(batch, 2 * number)


def test_shared_memory_has_no_name_in_dev_shm() -> None:
    mine = f"_{os.getpid()}_"
    for _batch in DataLoader(Images(20), 2, num_workers=2):
        names = {path.name for path in Path("/dev/shm").iterdir()}
        assert not [name for name in names if "aioloader" in name or mine in name]


def test_batches_may_be_dropped_in_other_threads() -> None:
    """The finalizer runs in the thread of the last reference."""
    iterator = iter(DataLoader(Images(60), 2, num_workers=2))
    for number in range(30):
        box = [next(iterator)]
        assert intact(box[0], 2 * number)
        thread = threading.Thread(target=box.clear)
        thread.start()
        thread.join()
