"""A server of one object that changes, and tells more or less of it."""

import contextlib
import http.server
import re
import socket
import threading
from email.utils import formatdate
from types import TracebackType
from typing import Any, Self


class ChangingServer:
    """Serve one object, by whatever name.

    Args:
        body: The object.
        tags: What it tells: ``"strong"`` or ``"weak"`` for an ETag, ``"date"`` for
            Last-Modified; with ``"unconditional"`` it ignores conditions.
        has_ranges: Whether it gives parts.
    """

    def __init__(
        self, body: bytes, *, tags: str = "strong", has_ranges: bool = True
    ) -> None:
        self.body = body
        self.version = 1
        self.tags = tags.split()
        self.has_ranges = has_ranges
        self.requests = 0
        # Whether it answers each GET as if the object were empty.
        self.seems_empty = False
        self.connections: list[socket.socket] = []
        self._failing = 0
        self._breaking = (0, 0)
        self._later: tuple[int, bytes] | None = None

    def replace(self, body: bytes) -> None:
        """Let there be another object from now on."""
        self.body, self.version = body, self.version + 1

    def replace_after(self, body: bytes, requests: int) -> None:
        """Let there be another object after so many requests."""
        self._later = requests, body

    def fail_next(self, count: int) -> None:
        """Answer the next requests with status 503."""
        self._failing = count

    def break_off(self, at: int, times: int) -> None:
        """Let the next answers that are longer end at a byte."""
        self._breaking = at, times

    def fails(self) -> bool:
        """Count a request, and tell whether it fails."""
        self.requests += 1
        if self._later is not None and self.requests > self._later[0]:
            self.replace(self._later[1])
            self._later = None
        self._failing -= 1
        return self._failing >= 0

    def cut(self, body: bytes) -> bytes:
        """Return as much of a body as is to be sent."""
        at, times = self._breaking
        if not times or len(body) <= at:
            return body
        self._breaking = at, times - 1
        return body[:at]

    def __enter__(self) -> Self:
        handler = type("Handler", (_Handler,), {"served": self})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = False
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.01])
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    served: ChangingServer

    def setup(self) -> None:
        super().setup()
        self.served.connections.append(self.connection)

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.served.body)))
        self.send_header("Last-Modified", formatdate(1e9, usegmt=True))
        self.end_headers()

    def do_GET(self) -> None:
        served = self.served
        if served.seems_empty:
            self._answer(416 if served.has_ranges else 200, b"")
            return
        if served.fails():
            self._answer(503, b"")
            return
        body, tags = served.body, served.tags
        fields: dict[str, str] = {}
        if "strong" in tags:
            fields["ETag"] = f'"{served.version}"'
        if "weak" in tags:  # with a date it stays the same
            fields["ETag"] = f'W/"{1 if "date" in tags else served.version}"'
        if "date" in tags:
            fields["Last-Modified"] = formatdate(1e9 + served.version, usegmt=True)
        asked = self.headers.get("If-Match")
        # A weak tag matches nothing there (RFC 9110, 13.1.1).
        is_met = asked == fields.get("ETag") and not str(asked).startswith("W/")
        if asked and not is_met and "unconditional" not in tags:
            self._answer(412, b"")
            return
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not found or not served.has_ranges:
            self._answer(200, body, fields)
            return
        start, stop = int(found[1]), min(int(found[2]) + 1, len(body))
        if start >= len(body):
            self._answer(416, b"", {"Content-Range": f"bytes */{len(body)}"})
            return
        fields["Content-Range"] = f"bytes {start}-{stop - 1}/{len(body)}"
        self._answer(206, body[start:stop], fields)

    def _answer(
        self, status: int, body: bytes, fields: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (fields or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(self.served.cut(body))

    def log_message(self, *_: Any) -> None:
        """Say nothing."""
