"""The datasets of plants.py: samples with a planted cost, and their cures.

``pause`` waits, as for a store; ``compute`` uses a core. A sample is a small tensor.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import subprocess
import sys
import tarfile
import time
from threading import Thread
from typing import TYPE_CHECKING, Any, Self

import torch

import aioloader
from aioloader.datasets import ObjectDataset, TarDataset

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

FILE_BYTES = 4_000


def compute(seconds: float) -> None:
    """Use a core for a while, in Python, holding the interpreter's lock."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def keep_busy(seconds: float) -> None:
    """Use two cores for a while, without the interpreter's lock."""
    threads = [Thread(target=_digest, args=(seconds,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _digest(seconds: float) -> None:
    end, block = time.thread_time() + seconds, bytes(1 << 18)
    while time.thread_time() < end:
        hashlib.sha256(block)


class Plain:
    """Plain samples.

    Args:
        length: Number of samples.
        pause: Seconds to wait for each.
        cpu: Seconds of a core for each.
        slow: How many times longer worker 0 waits.
        late: Seconds to wait for one sample in 320.
    """

    def __init__(
        self,
        length: int,
        pause: float = 0.0,
        cpu: float = 0.0,
        slow: int = 1,
        late: float = 0.0,
    ) -> None:
        self.length, self.pause, self.cpu, self.slow = length, pause, cpu, slow
        self.late = late

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        info = aioloader.get_worker_info()
        if self.pause:
            time.sleep(self.pause * (self.slow if info and not info.id else 1))
        if self.late and index % 320 == 0:
            time.sleep(self.late)
        if self.cpu:
            compute(self.cpu)
        return torch.tensor(index)


class Pinned:
    """Batches of 128 MB, ready in page-locked memory: only the copy takes time."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.batch = torch.zeros(1 << 25, pin_memory=True)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.batch


class Awaited:
    """Samples that coroutines wait for.

    Args:
        length: Number of samples.
        pause: Seconds to wait for each.
        held: Seconds for which each blocks the event loop.
        freed: Whether a thread does that instead.
    """

    def __init__(
        self, length: int, pause: float, held: float = 0.0, *, freed: bool = False
    ) -> None:
        self.length, self.pause, self.held, self.freed = length, pause, held, freed

    def __len__(self) -> int:
        return self.length

    async def __getitem__(self, index: int) -> torch.Tensor:
        await asyncio.sleep(self.pause)
        if self.held:
            await self.parse_headers()
        return torch.tensor(index)

    async def parse_headers(self) -> None:
        """Make a blocking call, as `requests` and many drivers do."""
        if self.freed:
            await asyncio.to_thread(time.sleep, self.held)
        else:
            time.sleep(self.held)  # noqa: ASYNC251  (that is the plant)


class Threaded(Awaited):
    """Samples from a client that blocks, each in a thread."""

    async def __getitem__(self, index: int) -> torch.Tensor:
        await asyncio.to_thread(time.sleep, self.pause)
        return torch.tensor(index)


class Pooled(Awaited):
    """Samples from a client that has so many connections."""

    def __init__(self, length: int, pause: float, *, size: int) -> None:
        super().__init__(length, pause)
        self.pool = asyncio.Semaphore(size)

    async def __getitem__(self, index: int) -> torch.Tensor:
        async with self.pool:
            return await super().__getitem__(index)


class Drawn:
    """Batches of indices, each of which takes a while to draw."""

    def __init__(self, batches: int, size: int, pause: float) -> None:
        self.batches, self.size, self.pause = batches, size, pause

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(self.batches):
            time.sleep(self.pause)
            yield [*range(number * self.size, (number + 1) * self.size)]


class Compute:
    """A transform, or a ``collate_fn``, that uses a core."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, value: Any) -> Any:
        """Compute; return the sample, or the samples as a batch."""
        compute(self.seconds)
        return torch.stack(value) if isinstance(value, list) else value


class FileServer:
    """Small files and a tar of them, on a server in a separate process.

    Args:
        count: Number of files.
        latency: Seconds before each answer.
    """

    def __init__(self, count: int, latency: float) -> None:
        self._command = [sys.executable, __file__, str(count), str(latency)]
        self._count = count

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self._url = self._process.stdout.readline().strip()
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.communicate()  # its stdin ends, and so does it

    def files(self) -> Any:
        """Return the files, a request each."""
        names = [f"{number}.bin" for number in range(self._count)]
        return ObjectDataset(self._url, names)

    def shards(self) -> Any:
        """Return the same samples from tars."""
        return Bodies(TarDataset([f"{self._url}/all.tar"]))


class Bodies:
    """The bytes of a stream's samples, for ``collate_fn``."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for sample in self.stream:
            yield sample["bin"]


def as_numbers(bodies: list[Any]) -> torch.Tensor:
    """Return the first bytes, as a batch."""
    return torch.tensor([bytes(body[:4]) == b"\0\0\0\0" for body in bodies])


def main() -> None:
    from served import ObjectServer  # noqa: PLC0415

    count, latency = int(sys.argv[1]), float(sys.argv[2])
    bodies = [number.to_bytes(FILE_BYTES, "little") for number in range(count)]
    objects: dict[str, bytes] = {
        f"{number}.bin": body for number, body in enumerate(bodies)
    }
    shard = io.BytesIO()
    with tarfile.open(fileobj=shard, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for number, body in enumerate(bodies):
            member = tarfile.TarInfo(f"{number:06}.bin")
            member.size = len(body)
            tar.addfile(member, io.BytesIO(body))
    objects["all.tar"] = shard.getvalue()
    with ObjectServer(objects, latency=latency) as server:
        print(server.url, flush=True)
        sys.stdin.read()  # ends with the parent


if __name__ == "__main__":
    main()
