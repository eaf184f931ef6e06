"""An object server on loopback whose faults can be planned, for tests and benchmarks.

Real sockets, served by one thread with a separate event loop. Answers on a connection
are sent in the order of its requests; connections are independent. Memory holds the
objects given as bytes and, for those made on demand, one piece per answer in progress.
"""

import asyncio
import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self, TypeAlias

import uvloop
from typing_extensions import Buffer

from object_server.answers import (
    BUCKET,
    MAX_KEYS,
    Answer,
    Make,
    Request,
    Shelf,
    answer,
    failure,
)
from object_server.faults import Faults
from object_server.tally import Tally

_Started: TypeAlias = "Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]"
_PIECE = 1 << 18
_LINGER_NOT = struct.pack("ii", 1, 0)  # close with a reset
_GRACE = 1.0  # seconds for clients to hang up, when the server stops
_STEPS = 50  # pieces of a paced body per second


@dataclass(eq=False)
class _Talk:
    """One connection, and the task that answers its requests."""

    task: "asyncio.Task[object]"
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    is_busy: bool = False
    is_over: bool = False  # closed by the server while idle
    free_at: float = 0.0  # when a paced line has sent everything

    @classmethod
    async def begin(cls, raw: socket.socket, context: ssl.SSLContext | None) -> Self:
        """Talk over an accepted socket, with TLS if there is a context for it."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, raw, ssl=context
        )
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        return cls(task, reader, writer)

    def reset(self) -> None:
        """Close the connection with a reset."""
        if not self.writer.is_closing():
            raw = self.writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
            self.writer.transport.abort()

    async def request_head(self) -> bytes:
        """Return the head of the next request.

        Raises:
            ConnectionAbortedError: If the server has closed the connection.
        """
        head = await self.reader.readuntil(b"\r\n\r\n")
        if self.is_over:
            raise ConnectionAbortedError("the server has hung up")
        return head

    def hang_up(self) -> bool:
        """Close an idle connection; return whether the client has yet to see that."""
        if self.is_busy:
            self.reset()
        elif not self.writer.is_closing():
            self.is_over = True
            if self.writer.can_write_eof():
                self.writer.write_eof()
            else:
                self.writer.close()
        return not self.is_busy

    async def close(self) -> None:
        """Send the remaining bytes, and close the connection."""
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    async def pace(self, amount: int, bytes_per_second: float | None) -> None:
        """Wait until a line of that speed would have sent ``amount`` more."""
        if bytes_per_second:
            now = asyncio.get_running_loop().time()
            self.free_at = max(now, self.free_at) + amount / bytes_per_second
            await asyncio.sleep(self.free_at - now)


class ObjectServer(Tally):
    """Serves objects over HTTP or HTTPS on loopback, while a ``with`` block runs.

    GET and HEAD of ``{url}/{name}``, and as an S3 bucket, path style and unsigned, of
    ``{url}/bucket/{name}``, with ListObjectsV2. Ranges, ETag, If-Match, If-Range, keep-
    alive, pipelining. Leaving the block waits, up to a second, for clients to
    disconnect, and raises an error of ``make``, if there was one; both block the
    calling thread.

    Args:
        objects: Contents by name.
        make: ``make(name, start, stop)`` returns a part of an object in ``sizes``.
        sizes: Sizes in bytes, by name, of the objects that ``make`` makes.
        faults: Shares of requests that fail.
        latency: Seconds before each answer.
        bytes_per_second: Speed of the bodies of one connection; None: unlimited.
        ssl_context: If given, the server uses HTTPS.

    Attributes:
        faults: As above; may be changed at any time, like the next two.
        latency: As above.
        bytes_per_second: As above.
        max_keys: Most names on one page of a listing.
        url: The server's URL, without a trailing slash.
        bucket: Name of the bucket.

    Example:
        >>> from urllib.request import urlopen
        >>> with ObjectServer({"a": b"hello"}) as server:
        ...     with urlopen(f"{server.url}/a") as answer:
        ...         answer.read()
        b'hello'
    """

    bucket = BUCKET

    def __init__(
        self,
        objects: Mapping[str, Buffer] | None = None,
        *,
        make: Make | None = None,
        sizes: Mapping[str, int] | None = None,
        faults: Faults | None = None,
        latency: float = 0.0,
        bytes_per_second: float | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__()
        self.faults: Faults = faults or Faults()
        self.latency = latency
        self.bytes_per_second = bytes_per_second
        self.max_keys = MAX_KEYS
        self.url: str = ""
        self._shelf = Shelf(objects or {}, make, sizes or {})
        self._ssl = ssl_context
        self._talks: set[_Talk] = set()
        self._tasks: dict[asyncio.Task[None], socket.socket] = {}
        self._failure: Exception | None = None

    # -- for the test -----------------------------------------------------------------

    def replace(self, name: str, data: Buffer) -> None:
        """Replace ``name`` by ``data``; answers in progress continue."""
        self._shelf.replace(name, data)

    # -- its thread -------------------------------------------------------------------

    def __enter__(self) -> Self:
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        scheme = "https" if self._ssl else "http"
        self.url = f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
        started: _Started = Future()
        self._thread = threading.Thread(
            target=self._run, args=(listener, started), name="aioloader-object-server"
        )
        self._thread.start()
        self._loop, self._stop = started.result()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        failed, self._failure = self._failure, None
        if failed is not None and exc_type is None:
            raise failed

    def _run(self, listener: socket.socket, started: _Started) -> None:
        with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve(listener, started))

    async def _serve(self, listener: socket.socket, started: _Started) -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        listener.settimeout(0)
        loop.add_reader(listener, self._accept, listener)
        started.set_result((loop, stop))
        await stop.wait()
        loop.remove_reader(listener)
        await self._hang_up()

    def _accept(self, listener: socket.socket) -> None:
        """Start a task for a client, without the loop's own server.

        uvloop's server with TLS does not close while a client has not sent anything. A
        task can be cancelled then.
        """
        with contextlib.suppress(BlockingIOError, ConnectionError):
            raw, _ = listener.accept()
            raw.settimeout(0)
            task = asyncio.get_running_loop().create_task(self._talk(raw))
            self._tasks[task] = raw
            task.add_done_callback(self._forget)

    def _forget(self, task: "asyncio.Task[None]") -> None:
        self._tasks.pop(task).close()  # a task cancelled before it started does not

    async def _hang_up(self) -> None:
        """End all connections; idle clients get time to notice."""
        tasks = list(self._tasks)
        idle = {talk.task for talk in self._talks if talk.hang_up()}
        for task in tasks:
            if task not in idle:
                task.cancel()
        if idle:
            await asyncio.wait(idle, timeout=_GRACE)
        for talk in self._talks:
            talk.writer.transport.abort()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- one connection ---------------------------------------------------------------

    async def _talk(self, raw: socket.socket) -> None:
        try:
            talk = await _Talk.begin(raw, self._ssl)
        except OSError:
            return  # it does not use TLS, or has disconnected
        self._talks.add(talk)
        await self._converse(talk)
        self._talks.discard(talk)

    async def _converse(self, talk: _Talk) -> None:
        """Answer the requests of one connection, and close it."""
        try:
            while await self._exchange(talk, await talk.request_head()):
                pass
        except (EOFError, OSError, asyncio.LimitOverrunError):
            pass  # the client has disconnected, or is not HTTP
        except Exception as exc:  # noqa: BLE001  (raised where the server is left)
            self._failure = self._failure or exc
        finally:
            await talk.close()

    async def _exchange(self, talk: _Talk, head: bytes) -> bool:
        """Answer one request; return whether the connection continues."""
        request = Request.parse(head)
        talk.is_busy = True
        with self._request(request.name) as number:
            goes_on = await self._reply(talk, request, number)
        talk.is_busy = False
        return goes_on

    async def _reply(self, talk: _Talk, request: Request, number: int) -> bool:
        fault = self.faults.draw(number)
        if self.latency:
            await asyncio.sleep(self.latency)
        honest = answer(request, self._shelf, self.max_keys)
        if fault is None:
            await self._send(talk, request, honest)
            return not request.is_last
        self._add_fault(fault.kind)
        cut = honest.start + int((honest.stop - honest.start) * fault.where)
        match fault.kind:
            case "errors":
                is_slow = fault.where >= 0.5
                reply = (503, "SlowDown") if is_slow else (500, "InternalError")
                await self._send(talk, request, failure(*reply))
            case "lying":
                await self._send(talk, request, replace(honest, stop=cut))
            case "hangs":
                await talk.reader.read()
                return False
            case "truncated":
                await self._send(talk, request, honest, stop=cut)
                return False
            case _:
                if fault.where > 0.5:
                    await self._send(talk, request, honest, stop=cut)
                talk.reset()
                return False
        return not request.is_last

    async def _send(
        self, talk: _Talk, request: Request, reply: Answer, stop: int | None = None
    ) -> None:
        """Send the head of ``reply``, and its body up to ``stop``."""
        speed = self.bytes_per_second
        talk.writer.write(reply.head())
        piece = max(1, min(_PIECE, int(speed / _STEPS))) if speed else _PIECE
        end = reply.stop if stop is None else stop
        end = 0 if request.method == "HEAD" else end
        for start in range(reply.start, end, piece):
            data = memoryview(reply.read(start, min(start + piece, end))).cast("B")
            await talk.pace(len(data), speed)
            talk.writer.write(data)
            self._add_bytes(request.name, len(data))
            await talk.writer.drain()
