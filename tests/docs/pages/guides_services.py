"""Requests to the service."""

import asyncio
from typing import Any


def after(page: dict[str, Any]) -> None:
    """Ask the app while it reads, and afterwards."""
    import httpx  # noqa: PLC0415

    async def ask() -> None:
        app = page["app"]
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://service") as client,
        ):
            answer = {"done": False}
            while not answer["done"]:
                answer = (await client.get("/total")).json()
                await asyncio.sleep(0)
            assert answer["total"] == sum(range(100, 200))
            sample = (await client.get("/sample", params={"size": 8})).json()
            assert len(set(sample["ids"])) == 8
            streamed = await client.get("/predictions")
            assert streamed.text.count("\n") == 7
            assert streamed.text.startswith("[10.0, 10.04987")
        mean = await page["mean"]()
        assert abs(mean - sum(n**0.5 for n in range(100, 200)) / 100) < 1e-9

    asyncio.run(ask())
