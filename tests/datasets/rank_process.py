"""Ranks in separate processes, in one gloo group, which run commands of the parent."""

import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh

from aioloader import DataLoader, datasets
from python_process import reserved_port

dist: Any = torch.distributed
ROOT = Path(__file__).parents[2]


class RankProcess:
    """One rank, as the parent sees it.

    Args:
        rank: Its number.
        world_size: How many there are.
        method: The address where the group meets: ``tcp://`` or ``file://``.
    """

    def __init__(self, rank: int, world_size: int, method: str) -> None:
        arguments = [str(rank), str(world_size), method]
        self.process = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"},
        )

    def send(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the rank has died"
        return json.loads(line)

    def do(self, **command: Any) -> Any:
        self.send(**command)
        return self.answer()

    def end(self) -> None:
        with self.process as process:
            process.kill()


@contextlib.contextmanager
def ranks(count: int = 2) -> Iterator[list[RankProcess]]:
    with reserved_port() as port, contextlib.ExitStack() as stack:
        url = f"tcp://127.0.0.1:{port}"
        made = [RankProcess(rank, count, url) for rank in range(count)]
        for process in made:
            stack.callback(process.end)
        assert [rank.answer() for rank in made] == ["ready"] * count
        yield made


class Rank:
    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.iterator: Any = None
        self.mesh: Any = None

    async def meet(self, shape: list[int]) -> list[Any]:
        """Join a mesh: its first dimension has the ranks, the others their peers."""
        names = ("dp", "tp")[: len(shape)]
        mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=names)
        self.mesh = mesh["dp"]
        self.rank, self.world_size = self.mesh.get_local_rank(), self.mesh.size()
        return [self.rank, self.world_size]

    def stream(
        self, kind: str, store: str | None = None, gone: str = "", **options: Any
    ) -> Any:
        stream = getattr(datasets, kind)(**options)
        if store is not None:
            stream = stream.agree(dist.FileStore(store), timeout=5)
        if gone:
            shutil.rmtree(gone)
        return stream.shard(self.rank, self.world_size)

    async def open(self, **stream: Any) -> list[Any]:
        self.iterator = aiter(self.stream(**stream))
        return list(await self.iterator.pull(1))

    async def rest(self) -> list[Any]:
        samples: list[Any] = []
        while block := await self.iterator.pull(1000):
            samples += block
        await self.iterator.aclose()
        return samples

    async def load(self, workers: int = 0, **stream: Any) -> list[Any]:
        where: Any = {"num_workers": workers, "fetch": "workers"} if workers else {}
        where["tail"] = "uneven"
        loader: Any = DataLoader(self.stream(**stream), 4, collate_fn=list, **where)
        async with loader:
            return [sample async for batch in loader for sample in batch]

    async def deliver(self, epochs: int = 1, **options: Any) -> list[Any]:
        """Return the batches of some epochs of a loader for the mesh."""
        asked = {name: options.pop(name) for name in ("tail", "batch_size")}
        stream = getattr(datasets, options.pop("kind"))(**options)
        loader: Any = DataLoader(stream, collate_fn=list, rank=self.mesh, **asked)
        delivered = []
        async with loader:
            for _ in range(epochs):
                batches = [batch async for batch in loader]
                if asked["tail"] == "pad":
                    batches = [[batch, mask.tolist()] for batch, mask in batches]
                delivered.append(batches)
        return delivered

    async def begin(self, count: int, **stream: Any) -> list[Any]:
        """Take some batches of an epoch that all ranks end together."""
        agreeing = self.stream(**stream).agree(timeout=1)
        self.loader: Any = DataLoader(agreeing, collate_fn=list, tail="drop")
        self.iterator = aiter(self.loader)
        return [await anext(self.iterator) for _ in range(count)]

    async def finish(self) -> list[Any]:
        async with self.loader:
            return [batch async for batch in self.iterator]

    async def report(self, seconds: float, epoch: int = 0) -> list[str]:
        """Read an epoch of samples that take ``seconds``, and compare the ranks."""

        class Slow:
            def __len__(self) -> int:
                return 4

            def __getitem__(self, index: int) -> int:
                time.sleep(seconds)
                return index

        loader: Any = DataLoader(Slow())
        loader.set_epoch(epoch)
        assert len(list(loader)) == 4
        assert not loader.report().remarks
        return list(loader.report(ranks="train").remarks)


def _plain(sample: Any) -> Any:
    if isinstance(sample, dict):
        return {name: _plain(value) for name, value in sample.items()}
    if isinstance(sample, (bytes, np.generic)):
        return sample.decode() if isinstance(sample, bytes) else sample.item()
    return sample if isinstance(sample, (list, int, str)) else repr(sample)


def say(answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    rank, world_size, method = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group(
        "gloo", init_method=method, rank=rank, world_size=world_size
    )
    say("ready")
    this = Rank(rank, world_size)
    with asyncio.Runner() as runner:
        for line in sys.stdin:
            command = json.loads(line)
            job = getattr(this, command.pop("do"))
            try:
                say([_plain(item) for item in runner.run(job(**command))])
            except Exception as error:  # noqa: BLE001  (the parent wants to see it)
                say(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
