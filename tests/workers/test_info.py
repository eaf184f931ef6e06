"""Who a worker is: its number, seed, dataset and threads; and what is set up in it."""

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset
from torch.utils.data import get_worker_info as torch_worker_info

from aioloader import DataLoader, WorkerInfo, get_worker_info
from samples import collect
from working import AsyncNumbers, Drawing, Numbers, draw, first


def test_outside_there_is_none() -> None:
    """In the loader's own process, before, between and after."""
    assert get_worker_info() is None
    iterator = iter(DataLoader(Numbers(), num_workers=1))
    next(iterator)
    assert get_worker_info() is None
    assert torch_worker_info() is None


def told(_sample: Any) -> Any:
    """Return what a worker is told about itself."""
    ours: Any = get_worker_info()
    theirs: Any = torch_worker_info()
    assert ours.dataset is theirs.dataset
    return (
        (ours.id, ours.num_workers, ours.seed, ours.dataset.n),
        (theirs.id, theirs.num_workers, theirs.seed, theirs.dataset.n),
        torch.get_num_threads(),
    )


@pytest.mark.parametrize("num_workers", [1, 2])
def test_inside_both_tell_the_same(num_workers: int) -> None:
    """Ours and torch's; the seed is the base seed and the number."""
    torch.manual_seed(8)
    base_seed = torch.empty((), dtype=torch.int64).random_().item()
    torch.manual_seed(8)
    loader: Any = DataLoader(
        Numbers(), num_workers=num_workers, transform=told, collate_fn=first
    )
    found = list(loader)
    assert {threads for *_, threads in found} == {1}
    for ours, theirs, _ in found:
        assert ours == theirs == (ours[0], num_workers, base_seed + ours[0], 12)


async def test_async_code_is_told_too() -> None:
    """On the loop of a worker, and in the thread beside it."""

    class Asking(AsyncNumbers):
        async def __getitem__(self, index: int) -> Any:
            info = get_worker_info()
            return None if info is None else info.id

    def pair(number: Any) -> Any:
        info = torch_worker_info()
        return None if info is None else (info.id, number)

    loader = DataLoader(Asking(4), num_workers=2, transform=pair, collate_fn=first)
    assert set(await collect(loader)) <= {(0, 0), (1, 1)}


def seeds(_sample: Any) -> Any:
    """Return the seeds of the generators."""
    return torch.initial_seed(), random.random(), np.random.random()


class Transformed(Numbers):
    """Applies a function to each sample, also under torch's loader."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def __getitem__(self, index: int) -> Any:
        return self.function(index)


def seed_everything(worker: int) -> None:
    """Seed all, as recipes on the web do."""
    torch.manual_seed(1000 + worker)
    np.random.seed(1000 + worker)
    random.seed(1000 + worker)


def seed_numpy(worker: int) -> None:
    """Seed numpy and random from torch's seed, as torch's documentation does."""
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


@pytest.mark.usefixtures("fork_is_default")
@pytest.mark.slow
@pytest.mark.parametrize("rng", [None, "batch", "sample"])
@pytest.mark.parametrize("init", [seed_everything, seed_numpy])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_an_init_function_that_seeds_is_in_charge(
    num_workers: int, init: Any, rng: Any
) -> None:
    """Each sample finds what torch's workers find there: seed, numbers, order."""
    found = []
    for make in (TorchLoader, DataLoader):
        options: dict[str, Any] = {"rng": rng} if make is DataLoader else {}
        torch.manual_seed(8)
        loader: Any = make(
            Transformed(seeds),
            batch_size=2,
            num_workers=num_workers,
            worker_init_fn=init,
            collate_fn=list,
            **options,
        )
        found.append(list(loader))
    assert found[0] == found[1]
    if init is seed_everything:
        assert {seed for batch in found[1] for seed, *_ in batch} == {
            1000 + worker for worker in range(num_workers)
        }


def seed_one_of_two(worker: int) -> None:
    """Seed in worker 0 only."""
    if worker == 0:
        seed_everything(worker)


def draw_in_one_of_two(worker: int) -> None:
    """Draw in worker 1 only."""
    if worker == 1:
        draw()


@pytest.mark.usefixtures("fork_is_default")
@pytest.mark.slow
@pytest.mark.parametrize("init", [seed_one_of_two, draw_in_one_of_two])
@pytest.mark.parametrize("rng", ["batch", "sample", "worker"])
def test_an_init_function_that_draws_in_one_worker(rng: Any, init: Any) -> None:
    """No hang, all batches in order; under ``rng="worker"`` torch's to the bit."""
    kinds: list[Any] = [TorchLoader, partial(DataLoader, rng=rng)]
    found = []
    for make in kinds:
        torch.manual_seed(1)
        loader = make(Drawing(), 2, num_workers=2, worker_init_fn=init)
        found.append([(batch.tolist(), draws) for batch, draws in loader])
    for (indices, draws), (expected, theirs) in zip(*found, strict=True):
        assert indices == expected
        assert rng != "worker" or torch.equal(draws, theirs)


def test_an_init_function_that_does_not_seed_is_not() -> None:
    """It is called with the number, once; batches are seeded by their own number."""

    def init(worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        info.dataset.n = 100 + worker

    def look(_sample: Any) -> Any:
        info = get_worker_info()
        assert info is not None
        return info.id, info.dataset.n, torch.initial_seed()

    loader: Any = DataLoader(
        Numbers(), num_workers=2, worker_init_fn=init, transform=look, collate_fn=first
    )
    found = list(loader)
    assert {n - worker for worker, n, _ in found} == {100}
    assert len({seed for *_, seed in found}) == 12


@pytest.mark.usefixtures("fork_is_default")
def test_the_classic_way_to_shard() -> None:
    """An init function sets what part of a stream its worker reads."""

    class Part(IterableDataset[int]):
        start, end = 0, 10

        def __iter__(self) -> Any:
            return iter(range(self.start, self.end))

    def init(worker: int) -> None:
        info = torch_worker_info()
        assert info is not None
        dataset: Any = info.dataset
        dataset.start, dataset.end = 5 * worker, 5 * worker + 5

    found, expected = (
        [one.tolist() for one in make(Part(), 3, num_workers=2, worker_init_fn=init)]
        for make in (DataLoader, TorchLoader)
    )
    assert found == expected


def test_info_is_public() -> None:
    """A worker's code can be tested without a worker."""
    info = WorkerInfo(id=1, num_workers=2, seed=7, dataset=None)
    assert info.rng.torch.initial_seed() == 7
