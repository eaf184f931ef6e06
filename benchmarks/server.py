"""The object server of the remote benchmarks: loopback HTTP with a fixed latency.

Serves ``objects`` bodies of ``size`` bytes under ``/0``, ``/1``, ...: eight bytes of
little-endian key, then a shared block of noise. Every answer is sent ``latency``
seconds after its request was read, in the order of the requests of its connection. A
raw protocol on uvloop, because it must cost less than any client.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import socket
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Self, cast

import uvloop

HEADER_BYTES = 8
_RANGE = re.compile(rb"\r\nrange: *bytes=(\d*)-(\d*)", re.IGNORECASE)
_DATE = b"Thu, 01 Jan 2026 00:00:00 GMT"
_NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
_UNSATISFIABLE = b"HTTP/1.1 416 Range Not Satisfiable\r\nContent-Length: 0\r\n\r\n"


class Objects:
    """The objects and the bytes of every answer about them."""

    def __init__(self, objects: int, size: int, latency: float) -> None:
        self.objects = objects
        self.size = size
        self.latency = latency
        self._block = memoryview(os.urandom(size))

    def answer(self, head: bytes) -> list[bytes | memoryview]:
        """Give the pieces of the answer to one request head."""
        method, target, _ = head.split(b" ", 2)
        name = target[1:]
        if not name.isdigit() or int(name) >= self.objects:
            return [_NOT_FOUND]
        found = _RANGE.search(head)
        start, stop = self._bounds(found) if found else (0, self.size)
        if start >= stop:
            return [_UNSATISFIABLE]
        lines = self._lines(name, start, stop, partial=found is not None)
        if method == b"HEAD":
            return [lines]
        key = int(name).to_bytes(HEADER_BYTES, "little")[start:stop]
        return [lines + key, self._block[max(start, HEADER_BYTES) : stop]]

    def _bounds(self, found: re.Match[bytes]) -> tuple[int, int]:
        first, last = found.groups()
        if not first:
            return max(0, self.size - int(last)), self.size
        return int(first), min(int(last) + 1 if last else self.size, self.size)

    def _lines(self, name: bytes, start: int, stop: int, *, partial: bool) -> bytes:
        span = b"Content-Range: bytes %d-%d/%d\r\n" % (start, stop - 1, self.size)
        return (
            b'HTTP/1.1 %s\r\nContent-Length: %d\r\nETag: "%s"\r\n%s'
            b"Last-Modified: %s\r\nAccept-Ranges: bytes\r\n\r\n"
        ) % (
            b"206 Partial Content" if partial else b"200 OK",
            stop - start,
            name,
            span if partial else b"",
            _DATE,
        )


class Connection(asyncio.Protocol):
    """One keep-alive connection; pipelined requests are answered in order."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._loop = asyncio.get_running_loop()
        self._unread = b""
        self._due: deque[bytes] = deque()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport; let the kernel take a whole object in one write."""
        raw = transport.get_extra_info("socket")
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Drop the pending answers."""
        self._transport = None

    def data_received(self, data: bytes) -> None:
        """Start the clock of every request that is complete."""
        *heads, self._unread = (self._unread + data).split(b"\r\n\r\n")
        for head in heads:
            self._due.append(head)
            self._loop.call_later(self._objects.latency, self._send)

    def _send(self) -> None:
        head = self._due.popleft()
        if self._transport is not None:
            self._transport.writelines(self._objects.answer(head))


class ServerProcess:
    """A server in a separate process; leaving the ``with`` block stops it."""

    def __init__(self, objects: int, size: int, latency: float) -> None:
        options = ["--objects", objects, "--size", size, "--latency", latency]
        self._command = [sys.executable, str(Path(__file__)), *map(str, options)]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        self.pid = self._process.pid
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        self._process.communicate()


async def serve(objects: Objects) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Connection(objects), "127.0.0.1", 0, backlog=1024
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    # the parent's death closes stdin, and with it the server
    gone = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), gone.set)
    await gone.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--objects", type=int, default=2_000)
    parser.add_argument("--size", type=int, default=102_400)
    parser.add_argument("--latency", type=float, default=0.03)
    uvloop.run(serve(Objects(**vars(parser.parse_args()))))


if __name__ == "__main__":
    main()
