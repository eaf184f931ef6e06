"""Stores of every kind with the same twelve objects, and a server with faults."""

import asyncio
import gc
import io
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import obstore
import pytest
import pytest_asyncio
from obstore.store import MemoryStore
from pyarrow import csv

from aioloader.datasets import FileDataset, ObjectDataset, Requests, SQLRows
from datasets.changing import Handler, Server
from datasets.pg import Database, database, postgresql, server, sqlite
from python_process import reserved_port

__all__ = ["database", "postgresql", "server", "sqlite"]

CONTENTS = {
    f"{folder}/{name}.bin": f"{folder}-{name}".encode() * repeat
    for folder in ("cats", "dogs")
    for name, repeat in [
        ("a b", 1),
        ("empty", 0),
        ("big", 50_000),
        ("per%20cent", 3),
        ("ünicode", 4),
        ("z", 5),
    ]
}
KINDS = ("files", "local", "memory", "http", "s3", "sqlite", "postgresql")
SECRET = "MARKER7secret"

# Enough time for one retry.
QUICK = {
    "max_retries": 1,
    "retry_timeout": timedelta(seconds=1),
    "backoff": {"init_backoff": timedelta(milliseconds=1)},
}
# One try, and no retry.
ONCE = Requests(base_delay=1e12, max_delay=1e12)


class Prefixed(Handler):
    """Answers as the first part of the path says."""

    def get(self) -> None:
        self.served.heads.append(f"{self.requestline}\n{self.headers}")
        path = unquote(self.path.partition("?")[0])
        kind, _, key = path.removeprefix("/").partition("/")
        if kind.isdigit():
            self.answer(int(kind), SECRET.encode())
        elif kind == "redirect":
            to = quote(f"/ok/{key}") + f"?sig={SECRET}"
            self.answer(302, b"", {"Location": to})
        elif kind == "loop":
            self.answer(302, b"", {"Location": self.path})
        elif key not in CONTENTS:
            self.answer(404, b"none")
        else:
            if kind == "hang":
                self.served.entered.set()
                self.served.ended.wait()
            self.send(kind, CONTENTS[key])

    head = list = get

    def send(self, kind: str, body: bytes) -> None:
        start, stop, status = 0, len(body), 200
        fields: dict[str, Any] = {"ETag": '"1"'}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked and kind != "norange":
            start, stop = int(asked[1]), min(int(asked[2] or stop) + 1, stop)
            total = "*" if kind == "star" else len(body)
            fields["Content-Range"] = f"bytes {start}-{stop - 1}/{total}"
            status = 206
        stop -= kind == "short" and start > 0
        fields["Content-Length"], sent = stop - start, stop
        if kind == "cut" or (kind == "short" and not start):
            sent -= (stop - start) // 2
        if kind == "heal" and sum(" /heal/" in head for head in self.served.heads) == 1:
            del fields["ETag"]
            sent -= 1
        self.answer(status, body[start:sent], fields)


class Loopback(Server):
    """An HTTP server; the first part of a path decides how it answers.

    ``/ok/`` answers; ``/norange/`` ignores ranges; ``/star/`` sends them without the
    total size; ``/cut/`` breaks every body off at half; ``/short/`` breaks it off and
    then sends less of the rest than it announces; ``/heal/`` breaks off the first body
    only; ``/hang/`` waits for the end; ``/redirect/`` goes to ``/ok/``, ``/loop/`` to
    itself; ``/503/`` and other numbers are that status.
    """

    handler = Prefixed

    def __init__(self) -> None:
        self.heads: list[str] = []
        self.entered = threading.Event()

    def at(self, kind: str, user: str = "", query: str = "") -> str:
        """Return the base URL of requests that are answered by ``kind``."""
        return f"{self.url.replace('//', f'//{user}')}/{kind}{query}"


@pytest.fixture(scope="session", autouse=True)
def runtime() -> None:
    """Start Arrow's runtime, which opens a pipe, before descriptors are counted."""
    csv.read_csv(io.BytesIO(b"a\n1\n"))


@pytest.fixture
def loopback() -> Iterator[Loopback]:
    with Loopback() as served:
        yield served
        gc.collect()  # datasets that the test did not close


def wait_until_hung_up(port: int) -> None:
    """Wait until obstore has closed its connections in the background."""
    deadline = time.monotonic() + 5
    while connections(port) and time.monotonic() < deadline:
        time.sleep(0.001)


def connections(port: int) -> int:
    """Return how many connections to ``port`` are not closed by this end."""
    table = Path("/proc/net/tcp")
    lines = table.read_text().splitlines()[1:] if table.exists() else []
    rows = [line.split() for line in lines]
    established, close_wait = "01", "08"
    return sum(
        row[2].endswith(f":{port:04X}") and row[3] in {established, close_wait}
        for row in rows
    )


@pytest.fixture
def serve(
    loopback: Loopback, closed_at_the_end: list[Any]
) -> Callable[..., ObjectDataset]:
    def make(
        kind: str, *keys: str, user: str = "", query: str = "", **options: Any
    ) -> ObjectDataset:
        url = loopback.at(kind, user, query)
        if options.pop("s3", False):
            options |= {"endpoint": url, "region": "us-east-1"}
            url = "s3://bucket"
        options = {"retry_config": QUICK, **options}
        made = ObjectDataset(url, keys, store_options=options, requests=ONCE)
        closed_at_the_end.append(made)
        return made

    return make


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    """Run moto's S3 server in a separate process."""
    script = (
        "import os, time\n"
        "from moto.server import ThreadedMotoServer\n"
        "parent = os.getppid()\n"
        "server = ThreadedMotoServer('127.0.0.1', 0, verbose=False)\n"
        "server.start()\n"
        "print(server.get_host_and_port()[1], flush=True)\n"
        "while os.getppid() == parent:\n"
        "    time.sleep(1)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        # Close the pipe: the test that opened it may count descriptors.
        process.stdout.close()
        yield port
        process.kill()


@pytest.fixture(scope="session")
def s3_bucket(s3_port: int) -> str:
    base = f"http://127.0.0.1:{s3_port}/bucket"
    for path, body in {"": b"", "/train/cats/": b""}.items():
        request = urllib.request.Request(base + path, body, method="PUT")
        urllib.request.urlopen(request).close()
    store = obstore.store.S3Store(
        "bucket",
        endpoint=f"http://127.0.0.1:{s3_port}",
        region="us-east-1",
        access_key_id="id",
        secret_access_key="key",
        client_options={"allow_http": True},
    )
    for key, body in CONTENTS.items():
        obstore.put(store, f"train/{key}", body)
    return "s3://bucket/train"


@pytest.fixture
def s3(s3_bucket: str, s3_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the URL of the bucket; credentials are in the environment."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3_port}")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", f"id-{SECRET}")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    yield s3_bucket
    gc.collect()  # datasets that the test did not close
    wait_until_hung_up(s3_port)


@pytest.fixture
def unused_port() -> Iterator[int]:
    with reserved_port() as port:
        yield port


@pytest.fixture
def contents() -> dict[str, bytes]:
    return dict(CONTENTS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for key, body in CONTENTS.items():
        path = tmp_path / key
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(body)
    return tmp_path


@pytest.fixture
def forbidden(tmp_path: Path) -> Path:
    """Return a file that this user may not read, even as root."""
    if os.geteuid():
        path = tmp_path / "forbidden"
        path.touch(mode=0)
        return path
    path = Path("/proc/sys/vm/compact_memory")
    if not path.exists():
        pytest.skip("root may read every file here")
    return path


@pytest.fixture
def memory() -> MemoryStore:
    store = MemoryStore()
    for key, body in CONTENTS.items():
        obstore.put(store, key, body)
    return store


def table_of(database: Database) -> SQLRows:
    """Return the contents as rows of a table, by their names."""
    is_sqlite = database.kind == "sqlite"
    blob, literal = ("BLOB", "x'{}'") if is_sqlite else ("BYTEA", "'\\x{}'")
    collation = "BINARY" if is_sqlite else '"C"'
    rows = (
        f"('{key}', {literal.format(body.hex())})" for key, body in CONTENTS.items()
    )
    database.run(
        f"CREATE TABLE t (id TEXT COLLATE {collation} PRIMARY KEY, body {blob})",
        f"INSERT INTO t VALUES {', '.join(rows)}",
    )
    return SQLRows(database.url, "t", key="id", columns=["body"])


@pytest_asyncio.fixture
async def closed_at_the_end() -> AsyncIterator[list[Any]]:
    made: list[Any] = []
    yield made
    for dataset in made:
        await dataset.aclose()


@pytest.fixture(params=KINDS)
def dataset(
    request: pytest.FixtureRequest,
    s3_port: int,  # so that no test seems to leak the servers
    server: Any,
) -> Iterator[FileDataset | ObjectDataset | SQLRows]:
    kind, get = request.param, request.getfixturevalue
    if kind in {"sqlite", "postgresql"}:
        rows = table_of(get(kind))
        get("closed_at_the_end").append(rows)
        yield rows
        return
    if kind == "files":
        yield FileDataset("**/*.bin", root=get("folder"))
        return
    if kind == "http":
        web: Loopback = get("loopback")
        made = ObjectDataset(web.at("ok"), sorted(CONTENTS))
    else:
        made = ObjectDataset(get({"local": "folder"}.get(kind, kind)))
    yield made
    store: Any = made._store
    store.close()  # whether or not the test did


@pytest_asyncio.fixture
async def noise() -> AsyncIterator[list[dict[str, Any]]]:
    """Collect the calls of the loop's exception handler; there must be none."""
    heard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, c: heard.append(c))
    yield heard
    gc.collect()
    assert not heard


# Files that always run on both loops; ``make fuzz`` runs the others on uvloop.
ON_BOTH_LOOPS = {
    "test_indexed_reads",
    "test_interleave",
    "test_laws",
    "test_objects",
    "test_places",
    "test_rows",
    "test_stream_steps",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave tests that do not use the loop directly to ``make fuzz``, on uvloop."""
    for item in items:
        is_here = "tests/datasets/" in item.path.as_posix()
        if is_here and "uvloop" in item.name and item.path.stem not in ON_BOTH_LOOPS:
            item.add_marker(pytest.mark.fuzz)
