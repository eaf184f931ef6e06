"""What plain code returns is awaited, on the loader's loop if there is one."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

import pytest

from aioloader import DataLoader
from samples import SyncMap, collect

EXPECTED = [[0, 1, 2, 3], [4, 5, 6, 7]]
WAYS: dict[str, Any] = {
    "for": {},
    "async for": {},
    "transform": {"transform": abs},
    "threads": {"num_workers": 2, "workers": "thread"},
    "processes": {"num_workers": 2},
}


class Client:
    """Belongs to the loop that it was made on."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    async def get(self, index: int) -> int:
        """Answer on that loop alone."""
        assert asyncio.get_running_loop() is self._loop
        return index


class OfClient(SyncMap):
    """Plain, over a client that the lifespan opens."""

    client: Any = None

    def __getitem__(self, index: int) -> Any:
        return self.client.get(index)


@contextlib.asynccontextmanager
async def opened(dataset: OfClient) -> AsyncIterator[None]:
    """Open the client on the loop of the lifespan."""
    dataset.client = Client()
    yield


async def same(sample: int) -> int:
    """Return it; the loader has a loop for this."""
    return sample


@pytest.mark.parametrize("way", ["for", "async for", "threads", "processes"])
def test_clients_are_used_on_the_loop_of_the_lifespan(way: str) -> None:
    """Plain reads are awaited where async transforms run."""
    loader: Any = DataLoader(
        OfClient(8), 4, transform=same, lifespan=opened, **WAYS[way]
    )
    found = asyncio.run(collect(loader)) if way == "async for" else list(loader)
    assert [batch.tolist() for batch in found] == EXPECTED


@pytest.mark.parametrize("way", ["async for", "threads"])
async def test_clients_are_used_on_the_callers_loop(way: str) -> None:
    """If the loader is asked to use it; nothing else tells it of coroutines."""
    dataset = OfClient(8)
    dataset.client = Client()
    loader: Any = DataLoader(dataset, 4, loop="caller", **WAYS[way])
    assert [batch.tolist() async for batch in loader] == EXPECTED


class Request:
    """An awaitable that is no coroutine."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __await__(self) -> Generator[Any, None, int]:
        return same(self._index).__await__()


class Wrapper(SyncMap):
    """Plain, over awaitables."""

    def __init__(self, wrap: Callable[[Any], Any]) -> None:
        super().__init__(8)
        self._wrap = wrap

    def __getitem__(self, index: int) -> Any:
        return self._wrap(index)


def first(batch: Any) -> Any:
    """Return the batch of awaited values."""
    batch = batch.get("x") if isinstance(batch, dict) else batch
    return batch[0] if isinstance(batch, list) else batch


@pytest.mark.slow
@pytest.mark.parametrize("way", [way for way in WAYS if way != "transform"])
@pytest.mark.parametrize(
    "wrap",
    [
        Request,
        lambda index: (same(index), index),
        lambda index: {"x": same(index), "y": index},
        lambda index: {"y": index, "x": [same(index), (Request(index), index)]},
    ],
    ids=["object", "tuple", "dict", "nested"],
)
def test_awaitables_are_found_in_containers(wrap: Any, way: str) -> None:
    """As in what torch's wrappers return."""
    loader: Any = DataLoader(Wrapper(wrap), 4, **WAYS[way])
    found = asyncio.run(collect(loader)) if way == "async for" else list(loader)
    assert [first(batch).tolist() for batch in found] == EXPECTED


class Hanging(SyncMap):
    """Its second batch never comes."""

    def __getitem__(self, index: int) -> Any:
        return same(index) if index < 2 else self.hang()

    async def hang(self) -> None:
        """Wait forever."""
        await asyncio.get_running_loop().create_future()


def refused(_failure: Any) -> None:
    """Fail the test: the iteration is over, and no sample has failed."""
    raise AssertionError


@pytest.mark.parametrize("way", ["threads", "transform", "for"])
@pytest.mark.parametrize("loop", ["thread", "caller"])
async def test_closing_cancels_what_is_awaited(way: str, loop: Any) -> None:
    """As it cancels the coroutines of an async dataset."""
    arguments = {**WAYS[way], "loop": loop, "on_error": refused}
    loader: Any = DataLoader(Hanging(8), 2, **arguments)
    iterator = aiter(loader)
    await anext(iterator)
    await loader.aclose()  # a warning, if it gave up after ten seconds


def test_the_error_of_an_awaitable_names_its_sample() -> None:
    """Also where others of the batch are awaited at once."""

    async def fail(index: int) -> int:
        if index == 3:
            raise ValueError(index)
        return index

    for way in ("for", "transform", "threads"):
        loader: Any = DataLoader(Wrapper(fail), 4, **WAYS[way])
        with pytest.raises(ValueError, match="3") as caught:
            next(iter(loader))
        assert "sample index 3" in caught.value.__notes__[0]
