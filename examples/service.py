"""A web service that answers while a loader streams files in the same event loop.

Run it with ``python examples/service.py``, then ask how often a word occurs in Python's
standard library: ``curl 'localhost:8000/count?word=async'``.
"""

import asyncio
import contextlib
import re
import sysconfig
from collections import Counter
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from aioloader import DataLoader
from aioloader.datasets import FileDataset


def split(source: bytes) -> Counter[bytes]:
    """Count the words of one file."""
    return Counter(re.findall(rb"[a-zA-Z_]\w*", source))


def merge(counts: list[Counter[bytes]]) -> Counter[bytes]:
    """Add up the counts of one batch."""
    return sum(counts, Counter[bytes]())


class Index:
    """Word counts that grow while files stream in."""

    def __init__(self, pattern: str, root: str) -> None:
        files = FileDataset(pattern, root=root)
        self.loader: DataLoader[Counter[bytes]] = DataLoader(
            files, batch_size=16, transform=split, collate_fn=merge, loop="caller"
        )
        self.words: Counter[bytes] = Counter()
        self.is_complete = False

    async def fill(self) -> None:
        """Stream all files once."""
        async with self.loader:
            async for counts in self.loader:
                self.words.update(counts)
        self.is_complete = True


def make_app(pattern: str = "*.py", root: str | None = None) -> Starlette:
    """Return the service; it starts indexing at startup."""
    index = Index(pattern, root or sysconfig.get_path("stdlib"))

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        filling = asyncio.create_task(index.fill())
        yield
        filling.cancel()
        await asyncio.wait([filling])

    async def count(request: Request) -> JSONResponse:
        word = request.query_params.get("word", "")
        found = index.words[word.encode()]
        return JSONResponse({"count": found, "complete": index.is_complete})

    return Starlette(routes=[Route("/count", count)], lifespan=lifespan)


if __name__ == "__main__":
    uvicorn.run(make_app(), port=8000)
