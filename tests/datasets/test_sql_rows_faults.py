"""Rows by key of databases that refuse, vanish and come back."""

import asyncio
import pickle
import sqlite3
import uuid
from pathlib import Path
from typing import Any

import pytest

from aioloader.datasets.sql import SQLRows
from aioloader.errors import (
    DatasetError,
    ObjectNotFoundError,
    ObjectPermissionError,
)
from beside import beside
from datasets.pg import PASSWORD, Database, Server, database, postgresql, server, sqlite
from datasets.sql_reads import listed
from datasets.test_secrets import everything_said

__all__ = ["database", "postgresql", "server", "sqlite"]


async def test_no_such_table_or_column(database: Database) -> None:
    """Told when it is listed."""
    database.fill("t", 3)
    with pytest.raises(ObjectNotFoundError, match="cannot list the keys of table 'no'"):
        await SQLRows.discover(database.url, "no", key="id")
    with pytest.raises(DatasetError, match="no"):
        await SQLRows.discover(database.url, "t", key="no")
    async with SQLRows(database.url, "t", key="id", columns=["no"], keys=[1]) as rows:
        with pytest.raises(DatasetError, match="no"):
            await rows[0]


@pytest.mark.parametrize("name", ['t"; DROP TABLE t; --', "t; DROP TABLE t", "1=1"])
async def test_names_are_never_code(database: Database, name: str) -> None:
    """They are names of nothing, and nothing happens."""
    database.fill("t", 3)
    cases: list[tuple[str, dict[str, Any]]] = [
        (name, {"key": "id"}),
        ("t", {"key": name}),
        ("t", {"key": "id", "columns": [name]}),
    ]
    for table, options in cases:
        with pytest.raises((DatasetError, ValueError)):
            async with SQLRows(database.url, table, keys=[1], **options) as rows:
                await rows[0]
    async with listed(database) as rows:
        assert len(rows) == 3


@pytest.mark.parametrize("password", [f":{PASSWORD}x", f":{PASSWORD}"])
async def test_credentials(postgresql: Database, password: str) -> None:
    """Refused, and told without them."""
    postgresql.fill("t", 3)
    ((schema,),) = postgresql.run("SELECT current_schema()::text")
    url = postgresql.url.replace("postgres@", f"guest{password}@")
    rows = SQLRows(url, f"{schema}.t", key="id", keys=[1])
    async with rows:
        with pytest.raises(ObjectPermissionError, match="check the user") as caught:
            await rows[0]
    assert PASSWORD not in everything_said(caught.value) + repr(rows) + repr(vars(rows))
    with pytest.raises(pickle.PicklingError, match="PGPASSWORD"):
        pickle.dumps(rows)


@pytest.mark.filterwarnings("ignore:password file")
@pytest.mark.parametrize(
    ("line", "mode", "words"),
    [
        ("localhost:5432:postgres:guest:{}", 0o600, "permission denied"),
        ("*:*:*:guest:{}", 0o644, "password"),
        ("*:*:other:guest:{}", 0o600, "password"),
    ],
)
async def test_a_password_file(
    postgresql: Database,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    mode: int,
    words: str,
) -> None:
    """asyncpg reads it as libpq does; one that others may read is passed over."""
    postgresql.fill("t", 3)
    ((schema,),) = postgresql.run("SELECT current_schema()::text")
    path = tmp_path / "pgpass"
    path.write_text(line.format(PASSWORD))
    path.chmod(mode)
    monkeypatch.setenv("PGPASSFILE", str(path))
    monkeypatch.delenv("PGPASSWORD", raising=False)
    url = postgresql.url.replace("postgres@", "guest@")
    async with SQLRows(url, f"{schema}.t", key="id", keys=[1]) as rows:
        with pytest.raises(ObjectPermissionError, match=words) as caught:
            await rows[0]
    assert PASSWORD not in everything_said(caught.value)


@pytest.mark.slow
async def test_a_restart_in_between(postgresql: Database, server: Server) -> None:
    """Reads wait for the server to come back."""
    postgresql.fill("t", 100)
    async with listed(postgresql) as rows:
        assert (await rows[0])["id"] == 0
        await beside(server.stop)
        reads = [asyncio.create_task(rows[at]) for at in range(20)]
        try:
            await asyncio.sleep(0)
        finally:
            await beside(server.start)
        assert [row["id"] for row in await asyncio.gather(*reads)] == [*range(20)]


@pytest.mark.slow
async def test_a_server_that_stays_away(postgresql: Database, server: Server) -> None:
    """After the deadline an error says so."""
    postgresql.fill("t", 100)
    async with listed(postgresql, deadline=0.3) as rows:
        await rows[0]
        await beside(server.stop)
        try:
            with pytest.raises(DatasetError, match=r"given up after \d+ tries"):
                await rows[1]
        finally:
            await beside(server.start)


async def test_a_file_that_is_locked(sqlite: Database) -> None:
    """A writer without a log locks it for a moment: that is waited for."""
    sqlite.fill("t", 3)
    sqlite.run("PRAGMA journal_mode = DELETE")
    path = sqlite.url.removeprefix("sqlite:///")
    writer = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    writer.execute("BEGIN EXCLUSIVE")
    async with SQLRows(sqlite.url, "t", key="id", keys=[1]) as rows:
        read = asyncio.create_task(rows[0])
        await asyncio.sleep(0)
        await asyncio.to_thread(writer.execute, "COMMIT")
        assert (await read)["id"] == 1
    writer.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"table": "SELECT 1"},
            "table must be a table: name a query by creating a view",
        ),
        ({"connections": 0}, "connections must be at least 1, got 0"),
        ({"url": "x.db"}, "url must be sqlite:///path"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], words: str) -> None:
    """They are refused when the dataset is made."""
    given = {"url": "sqlite:///x.db", "table": "t", "key": "id", **arguments}
    with pytest.raises(ValueError, match=words):
        SQLRows(given.pop("url"), given.pop("table"), keys=[1], **given)
    with pytest.raises(TypeError, match="columns must be a list"):
        SQLRows("sqlite:///x.db", "t", key="id", columns="id", keys=[1])


def test_uuids_stay_what_they_are() -> None:
    """Only integers become an array."""
    keys = [uuid.UUID(int=1), uuid.UUID(int=2)]
    assert SQLRows("sqlite:///x.db", "t", key="id", keys=keys).keys == keys
