"""Shards with samples at known places, and a server that counts what it is asked for.

A sample is one member of a tar: noise that starts with its number, eight bytes of
little-endian. Bodies are multiples of 512, so each starts at a place that is known, and
the server also serves it as an object of its own, ``/100 KB/00017``: the bytes of both
kinds of requests come from the same mapped files. Each answer is sent after a delay
that is uniform between two bounds, from when its request was read.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import mmap
import os
import random
import re
import sys
import tarfile
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import uvloop

from server import Connection, ServerProcess

NUMBER_BYTES = 8
_HEADER_BYTES = 512
_RANGE = re.compile(rb"\r\nrange: *bytes=(\d+)-(\d*)", re.IGNORECASE)
_DATE = b"Thu, 01 Jan 2026 00:00:00 GMT"


class Shape(NamedTuple):
    """Bytes of a sample, how many shards there are, and samples in each."""

    size: int
    shards: int
    per_shard: int

    @property
    def count(self) -> int:
        """How many samples there are."""
        return self.shards * self.per_shard


SHAPES = {"100 KB": Shape(102_400, 16, 256), "4 KB": Shape(4_096, 16, 1_024)}


def number_of(body: Any, size: int) -> int:
    """Read the number of a sample, and check that it is whole."""
    view = memoryview(body)
    assert len(view) == size
    return int.from_bytes(view[:NUMBER_BYTES], "little")


def body_of(number: int, size: int) -> bytes:
    return number.to_bytes(NUMBER_BYTES, "little") + os.urandom(size - NUMBER_BYTES)


def names_of(shape: Shape) -> list[str]:
    return [f"{shard:03}.tar" for shard in range(shape.shards)]


def paths_of(folder: str, label: str) -> list[str]:
    """Name the local shards of a shape."""
    return [str(Path(folder) / label / name) for name in names_of(SHAPES[label])]


def tar_of(first: int, count: int, size: int) -> bytes:
    """Make a shard with the samples from ``first`` on."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for number in range(first, first + count):
            member = tarfile.TarInfo(f"{number:09}.bin")
            member.size = size
            tar.addfile(member, io.BytesIO(body_of(number, size)))
    return file.getvalue()


def write(folder: str) -> None:
    """Write the shards of all shapes."""
    for label, (size, _, count) in SHAPES.items():
        (Path(folder) / label).mkdir()
        for shard, path in enumerate(paths_of(folder, label)):
            Path(path).write_bytes(tar_of(shard * count, count, size))


class Files:
    """The files of a folder, and the answers about them."""

    def __init__(self, folder: str, low: float, high: float) -> None:
        self._folder = Path(folder)
        self._delays = low, high
        self._random = random.Random(1)
        self._mapped: dict[str, memoryview] = {}
        self._requests = 0

    @property
    def latency(self) -> float:
        """Seconds until the next answer."""
        return self._random.uniform(*self._delays)

    def answer(self, head: bytes) -> list[bytes | memoryview]:
        """Give the pieces of the answer to one request head."""
        method, target, _ = head.split(b" ", 2)
        name = unquote(target[1:].decode())
        if name == "count":
            return [_lines(b"200 OK", b"count", 9), b"%9d" % self._requests]
        self._requests += 1
        body = self._find(name)
        if body is None:
            return [_lines(b"404 Not Found", b"none", 0)]
        tag, size, status, span = name.encode(), len(body), b"200 OK", b""
        if found := _RANGE.search(head):
            start, last = found.groups()
            first, stop = int(start), min(int(last or size) + 1, size)
            body, status = body[first:stop], b"206 Partial Content"
            span = b"Content-Range: bytes %d-%d/%d\r\n" % (first, stop - 1, size)
            if first >= size:
                return [_lines(b"416 Range Not Satisfiable", tag, 0)]
        lines = _lines(status, tag, len(body), span)
        return [lines] if method == b"HEAD" else [lines, body]

    def _find(self, name: str) -> memoryview | None:
        """Return a file, or the part of a tar that is an object."""
        folder, _, last = name.rpartition("/")
        if folder in SHAPES and last.isdigit():
            size, shards, per_shard = SHAPES[folder]
            shard, place = divmod(int(last), per_shard)
            if shard >= shards:
                return None
            whole = self._map(f"{folder}/{shard:03}.tar")
            start = place * (_HEADER_BYTES + size) + _HEADER_BYTES
            return whole[start : start + size] if whole is not None else None
        return self._map(name)

    def _map(self, name: str) -> memoryview | None:
        if name not in self._mapped:
            try:
                with (self._folder / name).open("rb") as file:
                    data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except OSError:
                return None
            self._mapped[name] = memoryview(data)
        return self._mapped[name]


def _lines(status: bytes, tag: bytes, length: int, span: bytes = b"") -> bytes:
    return (
        b'HTTP/1.1 %s\r\nContent-Length: %d\r\nETag: "%s"\r\n%s'
        b"Last-Modified: %s\r\nAccept-Ranges: bytes\r\n\r\n"
    ) % (status, length, tag.replace(b" ", b"-"), span, _DATE)


class FileServer(ServerProcess):
    """The server in a separate process; leaving the ``with`` block stops it."""

    def __init__(self, folder: str, low: float, high: float) -> None:
        self._command = [sys.executable, __file__, folder, str(low), str(high)]


def requests_of(url: str) -> int:
    """Return how many requests a server has answered."""
    with urllib.request.urlopen(f"{url}/count") as answer:
        return int(answer.read())


async def serve(files: Files) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Connection(files),  # type: ignore[arg-type]
        "127.0.0.1",
        0,
        backlog=1024,
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    gone = asyncio.Event()  # the parent's death closes stdin, and with it the server
    loop.add_reader(sys.stdin.fileno(), gone.set)
    await gone.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("low", type=float)
    parser.add_argument("high", type=float)
    uvloop.run(serve(Files(**vars(parser.parse_args()))))


if __name__ == "__main__":
    main()
