"""A worker's number, seed, dataset and threads; and what its init function sets up."""

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


def test_the_loaders_process_has_no_worker_info() -> None:
    assert get_worker_info() is None
    iterator = iter(DataLoader(Numbers(), num_workers=1))
    next(iterator)
    assert get_worker_info() is None
    assert torch_worker_info() is None


def told(_sample: Any) -> Any:
    """Return a worker's info, ours and torch's, and its number of threads."""
    ours: Any = get_worker_info()
    theirs: Any = torch_worker_info()
    assert ours.dataset is theirs.dataset
    return (
        (ours.id, ours.num_workers, ours.seed, ours.dataset.n),
        (theirs.id, theirs.num_workers, theirs.seed, theirs.dataset.n),
        torch.get_num_threads(),
    )


@pytest.mark.parametrize("num_workers", [1, 2])
def test_worker_info_agrees_with_torchs(num_workers: int) -> None:
    """The seed is the base seed plus the worker's number."""
    torch.manual_seed(8)
    base_seed = torch.empty((), dtype=torch.int64).random_().item()
    torch.manual_seed(8)
    loader: Any = DataLoader(
        Numbers(), num_workers=num_workers, transform=told, collate_fn=first
    )
    infos = list(loader)
    assert {threads for *_, threads in infos} == {1}
    for ours, theirs, _ in infos:
        assert ours == theirs == (ours[0], num_workers, base_seed + ours[0], 12)


async def test_async_code_has_worker_info() -> None:
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
    return torch.initial_seed(), random.random(), np.random.random()


class Transformed(Numbers):
    """Applies a function to each sample, also under torch's loader."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def __getitem__(self, index: int) -> Any:
        return self.function(index)


def seed_everything(worker: int) -> None:
    """Seed all generators, as recipes on the web do."""
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
def test_seeds_of_an_init_function_are_kept(
    num_workers: int, init: Any, rng: Any
) -> None:
    """Each sample has the seeds and numbers of torch's workers, in the same order."""
    batches = []
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
        batches.append(list(loader))
    assert batches[0] == batches[1]
    if init is seed_everything:
        assert {seed for batch in batches[1] for seed, *_ in batch} == {
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
def test_an_init_function_may_draw_in_one_worker(rng: Any, init: Any) -> None:
    """All batches arrive in order; those of ``rng="worker"`` are torch's to the bit."""
    kinds: list[Any] = [TorchLoader, partial(DataLoader, rng=rng)]
    epochs = []
    for make in kinds:
        torch.manual_seed(1)
        loader = make(Drawing(), 2, num_workers=2, worker_init_fn=init)
        epochs.append([(batch.tolist(), draws) for batch, draws in loader])
    for (indices, draws), (expected, theirs) in zip(*epochs, strict=True):
        assert indices == expected
        assert rng != "worker" or torch.equal(draws, theirs)


def test_batches_are_seeded_after_a_plain_init_function() -> None:
    """By their own number; the function is called once, with the worker's number."""

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
    samples = list(loader)
    assert {n - worker for worker, n, _ in samples} == {100}
    assert len({seed for *_, seed in samples}) == 12


@pytest.mark.usefixtures("fork_is_default")
def test_an_init_function_can_shard_a_stream() -> None:
    """By the worker's part of it."""

    class Part(IterableDataset[int]):
        start, end = 0, 10

        def __iter__(self) -> Any:
            return iter(range(self.start, self.end))

    def init(worker: int) -> None:
        info = torch_worker_info()
        assert info is not None
        dataset: Any = info.dataset
        dataset.start, dataset.end = 5 * worker, 5 * worker + 5

    ours, theirs = (
        [b.tolist() for b in make(Part(), 3, num_workers=2, worker_init_fn=init)]
        for make in (DataLoader, TorchLoader)
    )
    assert ours == theirs


def test_worker_info_can_be_constructed() -> None:
    """So a worker's code can be tested without a worker."""
    info = WorkerInfo(id=1, num_workers=2, seed=7, dataset=None)
    assert info.rng.torch.initial_seed() == 7
