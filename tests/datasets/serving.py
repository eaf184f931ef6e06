"""What servers of the tests share: a thread that answers, and the end of it."""

import contextlib
import socket
import threading
from collections.abc import Mapping
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
        """Send a body with its length, unless a field says another one."""
        self.send_head(status, {"Content-Length": len(body), **(fields or {})})
        with contextlib.suppress(ConnectionError):
            self.wfile.write(body)

    def send_head(self, status: int, fields: Mapping[str, Any]) -> None:
        self.send_response(status)
        for name, value in fields.items():
            self.send_header(name, str(value))
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


class Server:
    """Serves by its handler within the block; then all connections are closed.

    Attributes:
        url: Where.
    """

    handler: ClassVar[type[Handler]]

    def __enter__(self) -> Self:
        self.connections: list[socket.socket] = []
        handler = type("Handler", (self.handler,), {"served": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = False
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.01])
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *_error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._server.server_close()
