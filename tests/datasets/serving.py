"""Plain clients of the object server, and servers to be asked."""

import asyncio
import contextlib
import http.client
import socket
import ssl
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
import trustme
import uvloop
from obstore.store import S3Store

from object_server import ObjectServer
from object_server import server as objects

DATA = bytes(range(256)) * 5000
OBJECTS = {
    "train/a b.bin": b"spaced",
    "train/big.bin": DATA,
    "train/ünicode & <x>.bin": b"marked",
    "train/100%.bin": b"percent",
    "empty": b"",
}
QUICK: dict[str, Any] = {
    "max_retries": 20,
    "retry_timeout": timedelta(seconds=20),
    "backoff": {"init_backoff": timedelta(milliseconds=1)},
}
BROKEN = (http.client.HTTPException, OSError)


@contextlib.contextmanager
def connected(
    server: ObjectServer, context: ssl.SSLContext | None = None
) -> Iterator[http.client.HTTPConnection]:
    """Connect a plain client, and hang up."""
    address = urlsplit(server.url).netloc
    connection = http.client.HTTPConnection(address, timeout=10)
    if context is not None:
        connection = http.client.HTTPSConnection(address, timeout=10, context=context)
    with contextlib.closing(connection):
        yield connection


def ask(
    connection: http.client.HTTPConnection,
    path: str,
    method: str = "GET",
    **fields: str,
) -> tuple[int, bytes, http.client.HTTPMessage]:
    """Return status, body and fields of an answer."""
    named = {name.replace("_", "-"): value for name, value in fields.items()}
    connection.request(method, quote(path), headers=named)
    response = connection.getresponse()
    return response.status, response.read(), response.headers


def fetch(server: ObjectServer, path: str = "/train/big.bin", **fields: str) -> bytes:
    """Return one body, by a connection of its own."""
    with connected(server) as connection:
        return ask(connection, path, **fields)[1]


def s3(server: ObjectServer, **options: Any) -> S3Store:
    """Return obstore's view of the bucket."""
    options["client_options"] = {"allow_http": True} | options.get("client_options", {})
    return S3Store(
        server.bucket,
        endpoint=server.url,
        region="us-east-1",
        skip_signature=True,
        **{"retry_config": QUICK, **options},
    )


@pytest.fixture
def server() -> Iterator[ObjectServer]:
    """Serve what no test changes."""
    with ObjectServer(OBJECTS) as made:
        yield made


@pytest.fixture(params=["asyncio", "uvloop"])
def each_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve on both loops."""
    make = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    monkeypatch.setattr(objects, "new_event_loop", make[request.param])


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """Return who signs."""
    return trustme.CA()


@pytest.fixture
def tls(authority: trustme.CA) -> ssl.SSLContext:
    """Return the server's side."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return context


@contextlib.contextmanager
def raw_socket(server: ObjectServer) -> Iterator[socket.socket]:
    """Connect without a client."""
    port = urlsplit(server.url).port
    with socket.create_connection(("127.0.0.1", port), timeout=10) as end:
        yield end


def made(name: str, start: int, stop: int) -> bytes:
    """Return a part of an object that exists nowhere: its offsets, in eights."""
    first = start // 8
    numbers = range(first, -(-stop // 8))
    block = b"".join(number.to_bytes(8, "little") for number in numbers)
    return block[start - 8 * first :][: stop - start]
