"""HTTP servers that answer in threads, and one whose object changes."""

import contextlib
import re
import socket
import threading
from collections.abc import Callable, Collection, Mapping
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Self


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"
    served: Any

    def setup(self) -> None:
        super().setup()
        self.served.connections.append(self.connection)

    def do_GET(self) -> None:
        self.get()

    def do_HEAD(self) -> None:
        self.head()

    def do_PROPFIND(self) -> None:
        self.list()

    def get(self) -> None:
        """Answer a GET."""

    def head(self) -> None:
        """Answer a HEAD."""

    def list(self) -> None:
        """Answer a PROPFIND of WebDAV."""

    def answer(
        self, status: int, body: bytes, fields: Mapping[str, Any] | None = None
    ) -> None:
        """Send a body with its length, unless ``fields`` has another one."""
        self.send_head(status, {"Content-Length": len(body), **(fields or {})})
        with contextlib.suppress(ConnectionError):
            self.wfile.write(body)

    def send_head(self, status: int, fields: Mapping[str, Any]) -> None:
        self.send_response(status)
        for name, value in fields.items():
            self.send_header(name, str(value))
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


class Server:
    """Serves with its handler within the block, whose end closes all connections.

    Attributes:
        url: Its address.
        ended: Set at the end, for answers that wait for it.
    """

    handler: ClassVar[type[Handler]]

    def __enter__(self) -> Self:
        self.ended = threading.Event()
        self.connections: list[socket.socket] = []
        handler = type("Handler", (self.handler,), {"served": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = False
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.01])
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *_error: object) -> None:
        self.ended.set()
        self._server.shutdown()
        self._thread.join()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._server.server_close()


ALWAYS = range(10**9)


class Sender(Handler):
    """Answers as its server says; bad answers call ``send_part`` or ``answer``."""

    def head(self) -> None:
        date = {"Last-Modified": formatdate(1e9, usegmt=True)}
        length = {"Content-Length": len(self.served.body)}
        self.send_head(200, {**date, **self.fields(), **length})

    def get(self) -> None:
        served, number = self.served, self.served.count()
        length = len(served.body)
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        match = match if served.has_ranges else None
        start = int(match[1]) if match else 0
        stop = min(int(match[2]) + 1, length) if match else length
        asked, tag = self.headers.get("If-Match"), self.fields().get("ETag")
        # A weak tag matches nothing there (RFC 9110, 13.1.1).
        is_met = asked == tag and not str(asked).startswith("W/")
        if number in served.when:
            served.bad(self, start, stop)
        elif asked and not is_met and "unconditional" not in served.tags:
            self.answer(412, b"")
        elif match and start >= length:
            self.answer(416, b"", {"Content-Range": f"bytes */{length}"})
        else:
            self.send_part(206 if match else 200, start, stop, stop)

    def fields(self) -> dict[str, str]:
        """Return the header fields that identify the version."""
        fields, tags, version = dict[str, str](), self.served.tags, self.served.version
        if "strong" in tags:
            fields["ETag"] = f'"{version}"'
        if "weak" in tags:  # with a date it stays the same
            fields["ETag"] = f'W/"{1 if "date" in tags else version}"'
        if "date" in tags:
            fields["Last-Modified"] = formatdate(1e9 + version, usegmt=True)
        return fields

    def send_part(
        self, status: int, start: int, stop: int, sent: int, length: int | None = None
    ) -> None:
        """Send a range up to byte ``sent``; ``length`` replaces the real length."""
        fields, body = self.fields(), self.served.body
        if status == 206:
            fields["Content-Range"] = f"bytes {start}-{stop - 1}/{len(body)}"
        if length is not None:
            fields["Content-Length"] = str(length)
        self.answer(status, body[start:sent], fields)


Bad = Callable[[Sender, int, int], None]


def honest(to: Sender, start: int, stop: int) -> None:
    to.send_part(206, start, stop, stop)


def refuse(to: Sender, _start: int, _stop: int) -> None:
    to.answer(503, b"")


class ChangingServer(Server):
    """Serve one object under any name.

    Args:
        body: The object.
        tags: Its header fields: ``"strong"`` or ``"weak"`` for an ETag,  ``"date"`` for
            Last-Modified; with ``"unconditional"`` it ignores conditions.
        has_ranges: Whether it serves ranges.
        bad: Answers the requests whose numbers, from 0, are in ``when``.
        when: Their numbers.
    """

    handler = Sender

    def __init__(
        self,
        body: bytes,
        *,
        tags: str = "strong",
        has_ranges: bool = True,
        bad: Bad = honest,
        when: Collection[int] = (),
    ) -> None:
        self.body = body
        self.version = 1
        self.tags = tags.split()
        self.has_ranges = has_ranges
        self.bad, self.when = bad, when
        self.requests = 0
        self._later: tuple[int, bytes] | None = None

    def replace(self, body: bytes) -> None:
        self.body, self.version = body, self.version + 1

    def replace_after(self, body: bytes, requests: int) -> None:
        self._later = requests, body

    def fail_next(self, count: int) -> None:
        self.bad, self.when = refuse, range(self.requests, self.requests + count)

    def break_off(self, end: int, times: int) -> None:
        """Break off the next complete answers at byte ``end``."""

        def broken(to: Sender, start: int, stop: int) -> None:
            to.send_part(200, start, stop, end, length=stop)

        self.bad, self.when = broken, range(self.requests, self.requests + times)

    def count(self) -> int:
        """Count a request; return its number."""
        self.requests += 1
        if self._later is not None and self.requests > self._later[0]:
            self.replace(self._later[1])
            self._later = None
        return self.requests - 1
