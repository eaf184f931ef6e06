"""A dataset is the user's: no loader enters or exits it, or its iterators."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from aioloader import DataLoader
from samples import AsyncMap, SyncMap, SyncStream, collect, labels

Loader: Any = DataLoader  # options are tables here
EXPECTED = [[i, i + 1, i + 2, i + 3] for i in range(0, 20, 4)]


class Guarded:
    """Mixed into what is the user's: must not be entered, nor exited."""

    def __enter__(self) -> Any:
        raise AssertionError("entered")

    def __exit__(self, *_exc: object) -> None:
        raise AssertionError("exited")

    async def __aenter__(self) -> Any:
        raise AssertionError("entered")

    async def __aexit__(self, *_exc: object) -> None:
        raise AssertionError("exited")


class GuardedMap(Guarded, SyncMap):
    """As ``h5py.File`` and a Hugging Face ``Dataset`` are."""


class GuardedAsyncMap(Guarded, AsyncMap):
    """As a client's wrapper is."""


class GuardedCursor(Guarded):
    """An iterator of either colour."""

    def __init__(self) -> None:
        self.samples = iter(SyncStream())

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return next(self.samples)

    def __aiter__(self) -> Any:
        return self

    async def __anext__(self) -> Any:
        for sample in self.samples:
            return sample
        raise StopAsyncIteration


class GuardedStream(Guarded, IterableDataset[Any]):
    """As a WebDataset is; so are its iterators."""

    def __iter__(self) -> Any:
        return GuardedCursor()


class GuardedAsyncStream(Guarded):
    """The same for a loop."""

    def __aiter__(self) -> Any:
        return GuardedCursor()


MAPS = [GuardedMap, GuardedAsyncMap]
STREAMS = [GuardedStream, GuardedAsyncStream]
WORKERS: dict[str, Any] = {
    "none": lambda: {"num_workers": 0},
    "deadline": lambda: {"timeout": 60},
    "process": lambda: {"num_workers": 1},
    "loader reads": lambda: {"num_workers": 1, "fetch": "loader"},
    "thread": lambda: {"num_workers": 2, "workers": "thread"},
    "executor": lambda: {"num_workers": 1, "workers": ThreadPoolExecutor(1)},
    "processes": lambda: {
        "num_workers": 1,
        "workers": ProcessPoolExecutor(1, mp_context=get_context("fork")),
    },
}


@pytest.fixture
def options(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Return a loader's options; shut an executor down at the end."""
    options = WORKERS[request.param]()
    yield options
    if isinstance(options.get("workers"), (ThreadPoolExecutor, ProcessPoolExecutor)):
        options["workers"].shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("options", WORKERS, indirect=True)
@pytest.mark.parametrize("make", [*MAPS, *STREAMS])
def test_nothing_is_entered(make: Any, options: dict[str, Any]) -> None:
    """No dataset and no iterator, wherever it is read, in any epoch."""
    with Loader(make(), batch_size=4, **options) as loader:
        for _ in range(2):
            assert labels(list(loader)) == EXPECTED
        iterator = iter(loader)
        next(iterator)
        iterator.close()


@pytest.mark.slow
@pytest.mark.parametrize("options", WORKERS, indirect=True)
@pytest.mark.parametrize("make", [*MAPS, *STREAMS])
async def test_nothing_is_entered_by_tasks(make: Any, options: dict[str, Any]) -> None:
    """Nor on a loop; the caller's is one."""
    for loop in ("thread", "caller"):
        loader = Loader(make(), batch_size=4, loop=loop, **options)
        async with loader:
            assert labels(await collect(loader)) == EXPECTED
