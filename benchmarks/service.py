"""Service: how does a loader in the same event loop affect a web service?

A Starlette service under uvicorn answers 50 requests a second while a CPU-heavy sync
dataset (about 2 ms a sample, batches of 16) streams in the same loop. The times are
those that a client in another process sees, compared with the times without any loader.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from torch.utils.data import DataLoader, Dataset

from harness import Contender, Figures, Metric, Options, Question, Target, main
from meter import Meter

if TYPE_CHECKING:
    from starlette.requests import Request

BATCH = 16
SAMPLES = 1_600
Load = Callable[["Progress"], Coroutine[Any, Any, None]]


class Progress:
    """How many batches a loader has delivered."""

    def __init__(self) -> None:
        self.batches = 0


class Heavy(Dataset[torch.Tensor]):
    """About 2 ms of CPU per sample, half of it Python, half of it numpy."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        state = index
        for _ in range(16_000):
            state = (state * 1_103_515_245 + 12_345) & 0x7FFFFFFF
        noise = np.random.default_rng(state).standard_normal(40_000, dtype=np.float32)
        return torch.from_numpy(np.sort(noise)[:64])


async def hello(request: Request) -> JSONResponse:
    return JSONResponse({"hello": request.query_params["n"]})


async def no_loader(progress: Progress) -> None:  # noqa: ARG001
    await asyncio.get_running_loop().create_future()


async def ours(progress: Progress) -> None:
    import aioloader  # noqa: PLC0415

    loader: Any = aioloader.DataLoader(Heavy(), BATCH, shuffle=True)
    async with loader:
        while True:
            async for _ in loader:
                progress.batches += 1


async def torch_plain(progress: Progress) -> None:
    loader = DataLoader(Heavy(), BATCH, shuffle=True)
    while True:
        for _ in loader:
            progress.batches += 1
            await asyncio.sleep(0)


async def torch_thread(progress: Progress) -> None:
    loader = DataLoader(Heavy(), BATCH, shuffle=True)
    while True:
        batches = iter(loader)
        while await asyncio.to_thread(next, batches, None) is not None:
            progress.batches += 1


async def ask(port: int, seconds: float) -> Figures:
    """Run the client in a separate process and read its measurements."""
    script = str(Path(__file__).with_name("client.py"))
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, script, "--port", str(port), "--seconds", str(seconds)),
        stdout=asyncio.subprocess.PIPE,
    )
    printed, _ = await client.communicate()
    figures: Figures = json.loads(printed)
    return figures


async def stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


async def observe(load: Load, options: Options) -> Figures:
    """Serve, load and answer, all in this loop except the client."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=128)
    config = uvicorn.Config(
        Starlette(routes=[Route("/", hello)]),
        log_level="warning",
        timeout_keep_alive=60,
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve([listening]))
    progress = Progress()
    loading = asyncio.create_task(load(progress))
    with Meter() as meter:
        figures = await ask(listening.getsockname()[1], 2 if options.quick else 10)
    rate = progress.batches * BATCH / meter.wall
    failed = loading.done()
    await stop(loading)
    server.should_exit = True
    await serving
    if failed:
        loading.result()
    return {**figures, "samples": rate, "cpu": meter.cpu / meter.wall}


def contender(load: Load, *, against: str = "no loader") -> Contender:
    def run(options: Options) -> Figures:
        return uvloop.run(observe(load, options))

    return Contender(run, against=against)


QUESTION = Question(
    name="service",
    text="A service answers 50 requests/s while a heavy sync dataset streams beside.",
    contenders={
        "no loader": contender(no_loader),
        "aioloader async for": contender(ours),
        "torch for": contender(torch_plain),
        "torch next in a thread": contender(torch_thread),
    },
    metrics=[
        Metric("p99", "p99 ms", ".1f", higher=False),
        Metric("p50", "p50 ms", ".2f", higher=False),
        Metric("max", "max ms", ".1f", higher=False),
        Metric("samples", "samples/s"),
        Metric("cpu", "cores used", ".2f", higher=False),
    ],
    targets=[Target("aioloader async for", ["torch for"], 1.0)],
    rounds=3,
)

if __name__ == "__main__":
    main(QUESTION)
