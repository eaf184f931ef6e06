"""Tables on a server that gives files only whole: read from copies on disk."""

import tempfile
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from aioloader import DataLoader
from aioloader.datasets import ArrowDataset, ParquetDataset
from aioloader.datasets._arrow import copies
from datasets.serving import Handler, Server
from datasets.shards import read
from datasets.tables import write_parquet as write


class _Handler(Handler):
    protocol_version = "HTTP/1.1"

    def get(self) -> None:
        self.served.asked.append(self.path)
        self.answer(200, self.path_of().read_bytes(), self.date())

    def head(self) -> None:
        length = self.path_of().stat().st_size
        self.send_head(200, {"Content-Length": length, **self.date()})

    def path_of(self) -> Path:
        path: Path = self.served.folder / self.path.lstrip("/")
        return path

    def date(self) -> dict[str, str]:
        modified = self.path_of().stat().st_mtime
        return {"Last-Modified": formatdate(modified, usegmt=True)}


class Whole(Server):
    handler = _Handler

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[str] = []


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
    with Whole(folder) as server:
        dataset = made(
            f"{server.url}/{{0..2}}.{kind}",
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
        assert len(server.asked) <= 2 * 3 * 3
    assert not any(temporary.iterdir())


async def test_many_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_MOST_BYTES", 0)
    monkeypatch.setattr(copies, "_LEAST_COPIES", 1)
    for at in range(4):
        write(tmp_path / f"{at}.parquet", pa.table({"n": [at]}))
    with Whole(tmp_path) as server:
        options = {"client_options": {"allow_http": True}}
        dataset = ParquetDataset(
            f"{server.url}/{{0..3}}.parquet", store_options=options
        )
        rows, _ = await read(dataset)
        assert [row["n"] for row in rows] == [*range(4)]
    assert len(server.asked) >= 8
