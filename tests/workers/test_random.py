"""Random draws depend on the batch, not on the worker or the number of workers."""

import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader

from aioloader import DataLoader
from samples import collect
from working import AsyncDrawing, AsyncNumbers, Drawing, Numbers, Stream, draw, draw_own

MANY_WORKERS = "ignore:This DataLoader will create:UserWarning"
WAYS: list[dict[str, Any]] = [
    {"num_workers": 0, "rng": "batch"},
    {"num_workers": 0, "rng": "batch", "prefetch_factor": 3},
    {"num_workers": 1},
    {"num_workers": 2},
    {"num_workers": 2, "prefetch_factor": 5},
    {"num_workers": 2, "persistent_workers": True},
    {"num_workers": 5},
]


def epochs(loader: Any, count: int = 2) -> list[list[list[float]]]:
    with loader:
        return [[flat(batch) for batch in loader] for _ in range(count)]


def flat(batch: Any) -> list[float]:
    """Return a batch as numbers."""
    if isinstance(batch, torch.Tensor):
        return [float(number) for number in batch.flatten()]
    return [number for part in batch for number in flat(part)]


def states() -> str:
    """Return the states of the global generators."""
    return f"{torch.get_rng_state().tolist()}{random.getstate()}{np.random.get_state()}"


def make(dataset: Any, **options: Any) -> Any:
    """Return a loader that draws its base seed from a separate generator."""
    generator = torch.Generator().manual_seed(3)
    return DataLoader(dataset, batch_size=5, generator=generator, **options)


@pytest.mark.slow
@pytest.mark.filterwarnings(MANY_WORKERS)
@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("shuffle", [False, True])
def test_any_workers_draw_the_same(options: dict[str, Any], shuffle: bool) -> None:
    """torch, random and numpy, drawn by dataset, transform and collate function."""

    def collate(samples: list[Any]) -> Any:
        return [*samples, draw()]

    def augment(sample: Any) -> Any:
        return torch.tensor(float(sample[0])), sample[1], draw()

    options = {**options, "transform": augment, "collate_fn": collate}
    before = states()
    ours = epochs(make(Drawing(), shuffle=shuffle, **options), 1)
    assert states() == before
    options = {"transform": augment, "collate_fn": collate, "shuffle": shuffle}
    expected = epochs(make(Drawing(), num_workers=0, rng="batch", **options), 1)
    assert ours == expected
    numbers = [number for batch in ours[0] for number in batch]
    assert len(set(numbers)) > 100


@pytest.mark.slow
def test_epochs_draw_differently_and_runs_alike() -> None:
    first, second = epochs(make(Drawing(), num_workers=2))
    assert first != second
    assert epochs(make(Drawing(), num_workers=1)) == [first, second]
    loader = make(Drawing(), num_workers=2, persistent_workers=True)
    third, fourth = epochs(loader)
    assert third == first
    assert fourth not in (first, third)


@pytest.mark.slow
@pytest.mark.parametrize("in_order", [False, True])
async def test_async_for_draws_the_same(in_order: bool) -> None:
    """From plain and from async datasets, ordered or not."""
    runs = []
    for dataset in (Numbers(), AsyncNumbers(12)):
        for options in ({"num_workers": 0, "rng": "batch"}, {"num_workers": 2}):
            loader = make(dataset, transform=draw, in_order=in_order, **options)
            batches = [flat(batch) for batch in await collect(loader)]
            runs.append(batches if in_order else sorted(batches))
    assert all(run == runs[0] for run in runs)


@pytest.mark.slow
@pytest.mark.parametrize("fetch", ["auto", "loader"])
def test_draws_do_not_depend_on_where_samples_are_read(fetch: Any) -> None:
    """If reading draws nothing."""
    loaders = [
        make(Numbers(), num_workers=2, fetch=f, transform=draw)
        for f in (fetch, "workers")
    ]
    assert epochs(loaders[0]) == epochs(loaders[1])


def test_draws_between_batches_are_undisturbed() -> None:
    """With num_workers=0 and rng="batch"."""
    expected: list[float] = []
    ours: list[float] = []
    for options in ({}, {"num_workers": 0, "rng": "batch", "prefetch_factor": 2}):
        torch.manual_seed(1)
        numbers = expected if not options else ours
        dataset: Any = Drawing() if options else Numbers()
        numbers.extend(torch.rand(1).item() for _ in make(dataset, **options))
    assert ours == expected


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 3])
def test_threads_draw_the_same_from_worker_info(num_workers: int) -> None:
    """Their ``get_worker_info().rng`` is that of processes."""
    expected = epochs(make(Numbers(), num_workers=1, transform=draw_own))
    before = states()
    with ThreadPoolExecutor(num_workers) as executor:
        for workers in ("thread", executor):
            options: Any = {"workers": workers, "num_workers": num_workers}
            assert epochs(make(Numbers(), transform=draw_own, **options)) == expected
    assert states() == before


@pytest.mark.slow
@pytest.mark.filterwarnings(MANY_WORKERS)
@pytest.mark.parametrize("rng", ["batch", "sample"])
def test_coroutines_draw_by_sample_from_worker_info(rng: Any) -> None:
    """``get_worker_info().rng`` is the sample's, however many run at once."""

    async def augment(sample: Any) -> Any:
        return *sample, draw_own()

    runs = [
        epochs(make(AsyncDrawing(12), transform=augment, rng=rng, **options))
        for options in (
            {"num_workers": 1, "concurrency": 1},
            {"num_workers": 1, "concurrency": 64},
            {"num_workers": 3, "concurrency": 4},
        )
    ]
    assert runs[0] == runs[1] == runs[2]
    numbers = [number for batch in runs[0][0] for number in batch[5:]]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_dataset", "num_workers", "persists"),
    [
        (Drawing, 1, False),
        (Drawing, 2, False),
        (Drawing, 2, True),
        (Stream, 1, False),
        (Stream, 2, False),
    ],
)
def test_draws_by_worker_are_those_of_torch(
    make_dataset: Any, num_workers: int, persists: bool
) -> None:
    """With rng="worker", bit by bit, epoch by epoch."""
    runs = []
    for make_loader in (TorchLoader, partial(DataLoader, rng="worker")):
        torch.manual_seed(2)
        loader: Any = make_loader(
            make_dataset(),
            batch_size=4,
            num_workers=num_workers,
            persistent_workers=persists,
        )
        runs.append([[flat(batch) for batch in loader] for _ in range(2)])
        loader._iterator = None  # ends the workers
    assert runs[0] == runs[1]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_draws_by_sample_do_not_depend_on_batches(num_workers: int) -> None:
    """With rng="sample"."""
    runs = []
    for size in (1, 5, 12):
        generator = torch.Generator().manual_seed(3)
        loader: Any = DataLoader(
            Numbers(),
            size,
            generator=generator,
            num_workers=num_workers,
            rng="sample",
            transform=draw,
        )
        runs.append(torch.cat(list(loader)).tolist())
    assert runs[0] == runs[1] == runs[2]
    assert len({tuple(row) for row in runs[0]}) == 12


class Jitter:
    """An augmentation that has its own generator."""

    def __init__(self, generator: Any) -> None:
        self.steps = [generator]

    def __call__(self, number: float) -> float:
        return number + float(self.steps[0].random())


class Jittered:
    """A dataset whose workers each have a copy of a generator."""

    def __init__(self, augment: Any) -> None:
        self.augment = augment

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.augment(float(index)), dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize(
    "generator",
    [random.Random(0), np.random.default_rng(0), np.random.RandomState(0)],
    ids=lambda generator: type(generator).__name__,
)
@pytest.mark.parametrize(
    "options",
    [{}, {"persistent_workers": True}, {"multiprocessing_context": "forkserver"}],
    ids=str,
)
def test_generators_of_a_dataset_draw_as_in_torch(generator: Any, options: Any) -> None:
    """With rng="worker" each worker makes the batches that it makes in torch."""
    torchs_options = {**options, "multiprocessing_context": "fork"}
    dataset: Any = Jittered(Jitter(generator))
    with DataLoader(dataset, 4, num_workers=2, rng="worker", **options) as loader:
        epochs = [[batch.tolist() for batch in loader] for _ in range(2)]
    torchs = TorchLoader(dataset, 4, num_workers=2, **torchs_options)
    assert epochs == [[batch.tolist() for batch in torchs] for _ in range(2)]
