"""Persistent workers begin the next epoch while this one's last batches are used."""

import mmap
import multiprocessing
import os
import select
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset, Sampler

from aioloader import DataLoader, ShuffledIndices
from aioloader._workers.reachable import holds_shared_memory
from aioloader.testing._frozen import frozen
from samples import SyncMap, labels
from working import Drawing

W: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "persistent_workers": True}


class Told:
    """A dataset that says in a pipe what it was asked for."""

    def __init__(self, path: Path, n: int = 20) -> None:
        self.path = path
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        with self.path.open("wb", buffering=0) as pipe:
            pipe.write(bytes([index]))
        return index


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """Make a named pipe, and its reading end."""
    path = tmp_path / "asked"
    os.mkfifo(path)
    end = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    yield path, end
    os.close(end)


def asked(end: int, count: int) -> list[int]:
    """Return what was asked for, having waited for ``count`` of it."""
    found = b""
    while len(found) < count:
        assert select.select([end], [], [], 20)[0], f"only {len(found)} of {count}"
        found += os.read(end, 1000)
    return [*found]


def test_the_next_epoch_is_begun_and_no_more_than_the_window(
    pipe: tuple[Path, int],
) -> None:
    """As many batches as were in flight; they are not made again."""
    path, end = pipe
    with DataLoader(Told(path), **W) as loader:
        first = [batch.tolist() for batch in loader]
        # 20 samples of this epoch, and 4 batches of 4 of the next.
        assert sorted(asked(end, 36)) == sorted([*range(20), *range(16)])
        assert [batch.tolist() for batch in loader] == first
        assert sorted(asked(end, 20)) == sorted([*range(16, 20), *range(16)])


@pytest.mark.slow
@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("has_generator", [False, True])
def test_orders_and_draws_are_those_of_torch(draws: bool, has_generator: bool) -> None:
    """Also where a guess was wrong, because the user drew in between."""

    def epochs(cls: Any) -> list[Any]:
        torch.manual_seed(5)
        generator = torch.Generator().manual_seed(5) if has_generator else None
        loader = cls(SyncMap(), shuffle=True, generator=generator, **W)
        found: list[Any] = []
        for _ in range(4):
            if draws:
                torch.rand(3)
            found.append(labels(list(loader)))
        found.append(torch.rand(2).tolist())
        if cls is DataLoader:
            loader.close()
        return found

    assert epochs(DataLoader) == epochs(TorchLoader)


def test_another_epoch_than_the_next_may_be_chosen() -> None:
    """What was begun for the wrong one is dropped."""
    order = ShuffledIndices(20, seed=3)
    with DataLoader(SyncMap(), sampler=order, **W) as loader:
        before = [labels(list(loader)) for _ in range(3)]
        loader.set_epoch(1)
        assert labels(list(loader)) == before[1]
        assert labels(list(loader)) == before[2]


class Custom(Sampler[int]):
    """A user's sampler, which counts how often it was asked."""

    def __init__(self) -> None:
        self.iterations = 0

    def __iter__(self) -> Iterator[int]:
        self.iterations += 1
        return iter(range(20))

    def __len__(self) -> int:
        return 20


def test_a_users_sampler_is_not_asked_ahead() -> None:
    """It may depend on what happens between epochs."""
    sampler = Custom()
    with DataLoader(SyncMap(), sampler=sampler, **W) as loader:
        for epoch in range(1, 4):
            assert len(list(loader)) == 5
            assert sampler.iterations == epoch


def test_an_epoch_that_nobody_wants_is_dropped_with_the_loader() -> None:
    """The fixture looks for what is left."""
    loader = DataLoader(SyncMap(), **W)
    assert len(list(loader)) == 5
    del loader


class Scaled(SyncMap):
    """Samples times a number that the main process sets, as in multi-scale training."""

    def __init__(self, scale: Any) -> None:
        super().__init__()
        self.scale = scale

    def __getitem__(self, index: int) -> Any:
        with self.scale.get_lock():
            return index * self.scale.value


class ByEpoch(IterableDataset[int]):
    """Samples that depend on the epoch's number, and on how often it was iterated."""

    def __init__(self, epoch: Any) -> None:
        self.epoch = epoch
        self.iterations = 0

    def __iter__(self) -> Iterator[int]:
        self.iterations += 1
        return iter([self.epoch.value, self.iterations])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Scaled, ByEpoch])
def test_what_is_told_by_shared_memory_between_epochs(kind: Any) -> None:
    """Counts from the first batch of the next epoch on."""

    def epochs(cls: Any) -> list[Any]:
        value = multiprocessing.Value("i", 0)
        loader = cls(kind(value), **W)
        found = []
        for epoch in range(3):
            value.value = epoch
            found.append([batch.tolist() for batch in loader])
        loader._iterator = None  # ends the workers
        return found

    assert epochs(DataLoader) == epochs(TorchLoader)


GLOBAL = multiprocessing.Value("i", 0)


class Named(SyncMap):
    """Names such memory in its code alone."""

    def __getitem__(self, index: int) -> Any:
        return index * GLOBAL.value


class Slotted:
    __slots__ = ("held", "unset")

    def __init__(self, held: Any) -> None:
        self.held = held


class Settings:
    """A namespace, as scripts have."""

    epoch = GLOBAL


def by_class(index: int) -> Any:
    return index * Settings.epoch.value


def shared_tensor() -> Any:
    tensor: Any = torch.zeros(3)
    return tensor.share_memory_()


SHARED: dict[str, Callable[[], Any]] = {
    "global": Named,
    "class": lambda: by_class,
    "tensor": lambda: {"a": [shared_tensor()]},
    "view of a tensor": lambda: shared_tensor().numpy()[1:],
    "value": lambda: multiprocessing.RawValue("i", 0),
    "array": lambda: np.frombuffer(multiprocessing.RawArray("i", 4), np.int32),
    "mapping": lambda: mmap.mmap(-1, 16),
    "view of a mapping": lambda: np.frombuffer(mmap.mmap(-1, 16), np.uint8)[2:],
    "memoryview": lambda: memoryview(mmap.mmap(-1, 16)),
    "slot": lambda: Slotted(multiprocessing.Value("i", 0)),
    "deque": lambda: deque([multiprocessing.Value("i", 0)]),
    "event": multiprocessing.Event,
    "queue": multiprocessing.SimpleQueue,
    "too many objects": lambda: [[[[at] for at in range(60)] for _ in range(60)]],
}


@pytest.mark.parametrize("make", SHARED.values(), ids=SHARED)
def test_shared_memory_is_found(make: Callable[[], Any]) -> None:
    """In attributes, tensors, arrays, classes, and by the names of globals."""
    assert holds_shared_memory(make())


def test_private_memory_is_no_shared_memory(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(16))
    read_only = np.memmap(path, np.uint8, "r")
    arrays = np.zeros(3), np.frombuffer(bytearray(8), np.uint8), read_only[2:]
    locks = multiprocessing.Lock(), multiprocessing.RLock()
    rows = [(index, [index]) for index in range(1000)]
    tensors = torch.zeros(3), torch.eye(2).to_sparse(), torch.zeros(1, device="meta")
    others = SyncMap(), *tensors, labels, rows, Slotted(rows)
    assert not holds_shared_memory(*others, *arrays, *locks)


def set_batch_size(loader: Any) -> None:
    loader.batch_sampler.batch_size = 4


def set_drop_last(loader: Any) -> None:
    loader.batch_sampler.drop_last = True


def set_sampler(loader: Any) -> None:
    loader.batch_sampler.sampler = [7, 6, 5, 4]


def set_generator(loader: Any) -> None:
    loader.sampler.generator = torch.Generator().manual_seed(5)


def set_replacement(loader: Any) -> None:
    loader.sampler.replacement = True


def shrink(loader: Any) -> None:
    loader.dataset.pop()


@pytest.mark.parametrize(
    "change",
    [
        set_batch_size,
        set_drop_last,
        set_sampler,
        set_generator,
        set_replacement,
        shrink,
    ],
)
def test_an_order_that_is_changed_between_epochs(change: Callable[[Any], None]) -> None:
    """The next epoch has the new one, though it was begun with the old one."""

    def epochs(cls: Any) -> list[Any]:
        torch.manual_seed(0)
        is_shuffled = change not in {set_batch_size, set_drop_last, set_sampler}
        loader = cls(
            [*range(8)], 3, is_shuffled, num_workers=1, persistent_workers=True
        )
        found: list[Any] = [list(loader)]
        change(loader)
        found += [list(loader), list(loader), torch.rand(1)]
        loader._iterator = None  # ends the workers
        return found

    assert frozen(epochs(DataLoader)) == frozen(epochs(TorchLoader))


def test_loaders_in_turn_draw_as_torchs() -> None:
    """With ``rng="worker"`` a wrong guess would draw from the workers' generators."""

    def drawn(make: Any) -> list[Any]:
        torch.manual_seed(0)
        loaders = [make(Drawing(12), **W) for _ in range(2)]
        return [[list(loader) for loader in loaders] for _ in range(3)]

    ours = drawn(partial(DataLoader, rng="worker"))
    assert frozen(ours) == frozen(drawn(TorchLoader))
