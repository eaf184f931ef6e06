"""A loader inside of a web service: FastAPI in the process, httpx as its client."""

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from aioloader import DataLoader
from samples import AsyncMap, AsyncStream, SyncMap, SyncStream, labels

EXPECTED = [[i, i + 1, i + 2, i + 3] for i in range(0, 20, 4)]


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
