"""A loader inside of a web service: FastAPI in the process, httpx as its client."""

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from aioloader import DataLoader
from samples import AsyncMap, AsyncStream, SyncMap, SyncStream, labels

EXPECTED = [[i, i + 1, i + 2, i + 3] for i in range(0, 20, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["thread", "caller"])
@pytest.mark.parametrize("make", [SyncMap, AsyncMap, SyncStream, AsyncStream])
async def test_requests_iterate_at_once(make: Any, loop: Any) -> None:
    """Each request has its epoch; the loader is opened and closed with the service."""
    loader = DataLoader(make(), batch_size=4, loop=loop)
    app = FastAPI()

    @app.get("/batches")
    async def batches() -> list[list[int]]:
        return labels([batch async for batch in loader])

    transport = httpx.ASGITransport(app)
    async with loader, httpx.AsyncClient(transport=transport, base_url="http://a") as c:
        answers = await asyncio.gather(*(c.get("/batches") for _ in range(3)))
    assert [answer.json() for answer in answers] == [EXPECTED] * 3


class Returning(SyncMap):
    """Plain, over coroutines of a client that belongs to a loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(8)
        self.loop = loop

    def __getitem__(self, index: int) -> Any:
        return self.read(index)

    async def read(self, index: int) -> int:
        """Read on the loop of the client alone."""
        assert asyncio.get_running_loop() is self.loop
        return index


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2, "workers": "thread"}])
async def test_what_plain_code_returns_is_awaited_on_the_callers_loop(
    workers: Any,
) -> None:
    """If the loader is asked to use it."""
    dataset = Returning(asyncio.get_running_loop())
    loader: Any = DataLoader(dataset, 4, loop="caller", **workers)
    assert [batch.tolist() async for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


class Blocking(SyncMap):
    """Plain code that runs a loop itself, over an async dataset that it holds."""

    def __init__(self) -> None:
        super().__init__(8)
        self.inner = AsyncMap(8)

    def __getitem__(self, index: int) -> Any:
        return asyncio.run(self.inner[index])


@pytest.mark.parametrize("loop", ["thread", "caller"])
async def test_plain_code_never_runs_on_a_loop(loop: Any) -> None:
    """Whatever it holds."""
    found = [batch async for batch in DataLoader[Any](Blocking(), 4, loop=loop)]
    assert labels(found) == [[0, 1, 2, 3], [4, 5, 6, 7]]
