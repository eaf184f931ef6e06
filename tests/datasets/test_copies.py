"""Tables on a server that gives files only whole: read from copies on disk."""

import contextlib
import functools
import socket
import tempfile
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from aioloader import DataLoader
from aioloader.datasets import ArrowDataset, ParquetDataset
from aioloader.datasets._arrow import copies
from datasets.shards import read
from datasets.tables import write_parquet as write


class Whole(SimpleHTTPRequestHandler):
    """Files as Python's own server gives them: it knows no ranges."""

    protocol_version = "HTTP/1.1"
    asked: list[str]
    sockets: list[socket.socket]

    def setup(self) -> None:
        """Note the connection."""
        super().setup()
        self.sockets.append(self.connection)

    def log_message(self, *_args: Any) -> None:
        """Keep quiet."""

    def do_GET(self) -> None:
        """Note what is asked for."""
        self.asked.append(self.path)
        super().do_GET()


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve a folder; yield its URL and what is asked for."""
    handler = type("Handler", (Whole,), {"asked": [], "sockets": []})
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(handler, directory=str(folder))
    )
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler.asked  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        thread.join()
        # Clients may keep connections for a while, and their threads are waited for.
        for connection in handler.sockets:  # type: ignore[attr-defined]
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        server.server_close()


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
async def test_files_without_ranges(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows, each file asked for once; and nothing is left on disk."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    folder = tmp_path / "files"
    folder.mkdir()
    for at in range(3):
        table = pa.table({"n": range(50 * at, 50 * at + 50)})
        if kind == "parquet":
            write(folder / f"{at}.{kind}", table)
        else:
            with pa.ipc.new_file(str(folder / f"{at}.{kind}"), table.schema) as file:
                file.write_table(table, max_chunksize=20)
    made: Any = ParquetDataset if kind == "parquet" else ArrowDataset
    with serving(folder) as (url, asked):
        dataset = made(
            f"{url}/{{0..2}}.{kind}",
            interleave=2,
            store_options={"client_options": {"allow_http": True}},
        )
        rows, _ = await read(dataset)
        assert sorted(row["n"] for row in rows) == [*range(150)]
        assert not any(temporary.iterdir())
        loader: Any = DataLoader(dataset, 10)
        batches = [batch async for batch in loader]
        assert sum(len(batch["n"]) for batch in batches) == 150
        # Two in vain, for ranges; and one for the whole file.
        assert len(asked) <= 2 * 3 * 3
    assert not any(temporary.iterdir())


async def test_many_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used go, and are copied again."""
    monkeypatch.setattr(copies, "_MOST_BYTES", 0)
    monkeypatch.setattr(copies, "_LEAST_COPIES", 1)
    for at in range(4):
        write(tmp_path / f"{at}.parquet", pa.table({"n": [at]}))
    with serving(tmp_path) as (url, asked):
        options = {"client_options": {"allow_http": True}}
        dataset = ParquetDataset(f"{url}/{{0..3}}.parquet", store_options=options)
        rows, _ = await read(dataset)
        assert [row["n"] for row in rows] == [*range(4)]
    assert len(asked) >= 8
