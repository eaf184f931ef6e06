"""Databases that refuse, vanish and come back; odd names and wrong addresses."""

import asyncio
import logging
import pickle
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aioloader.datasets import SQLDataset
from aioloader.datasets._sql.address import DatabaseURL
from aioloader.datasets.sql import SQLFormat, SQLRows
from aioloader.errors import DatasetError, ObjectNotFoundError, ObjectPermissionError
from beside import beside
from datasets.pg import (
    PASSWORD,
    Database,
    Server,
    keys_of,
    listed,
    opened,
    read,
    rest_of,
    rows_of,
)
from datasets.test_cache_dir import as_nobody
from datasets.test_secrets import everything_said

SMALL = 1 << 18


def wide(postgresql: Database, count: int = 4000) -> None:
    postgresql.run(
        "CREATE TABLE t (id INT PRIMARY KEY, n INT DEFAULT 0, body TEXT)",
        f"INSERT INTO t SELECT i, 0, repeat('x', 1000) "
        f"FROM generate_series(0, {count - 1}) AS i",
    )


# -- refusals ---------------------------------------------------------------------

WAYS = pytest.mark.parametrize("make", [SQLDataset, SQLRows])


@pytest.fixture
def guest(postgresql: Database, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    postgresql.fill("t", 3)
    monkeypatch.setenv("PGPASSFILE", "/nonexistent")
    monkeypatch.delenv("PGPASSWORD", raising=False)
    return postgresql.url.replace("postgres@", "guest@"), f"{postgresql.schema}.t"


@pytest.mark.slow
@WAYS
@pytest.mark.filterwarnings(
    "ignore:password file"
)  # asyncpg warns about its permissions
@pytest.mark.parametrize(
    ("password", "line", "mode", "words"),
    [
        (f":{PASSWORD}x", "", 0o600, "password authentication failed for user"),
        (f":{PASSWORD}", "", 0o600, "permission denied for schema"),
        ("", "", 0o600, "password.*; check the user, PGPASSWORD or PGPASSFILE, and gr"),
        # The drivers read a password file, unless other users may read it, too.
        ("", "*:5432:postgres:guest:{}", 0o600, "permission denied"),
        ("", "*:*:*:guest:{}", 0o644, "password"),
        ("", "*:*:other:guest:{}", 0o600, "password"),
    ],
)
async def test_refused_credentials_are_not_shown(
    guest: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Any,
    password: str,
    line: str,
    mode: int,
    words: str,
) -> None:
    """Whether they are in the URL or in a file."""
    url, table = guest
    url = url.replace("guest@", f"guest{password}@")
    if line:
        path = tmp_path / "pgpass"
        path.write_text(line.format(PASSWORD))
        path.chmod(mode)
        monkeypatch.setenv("PGPASSFILE", str(path))
    with pytest.raises(ObjectPermissionError, match=words) as caught:
        await read(make, url, table)
    assert PASSWORD not in everything_said(caught.value)
    assert caught.value.location == DatabaseURL(url).label


@WAYS
async def test_the_environment_may_hold_the_password(
    postgresql: Database,
    guest: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    make: Any,
) -> None:
    postgresql.run(
        f"GRANT USAGE ON SCHEMA {postgresql.schema} TO guest",
        "GRANT SELECT ON t TO guest",
    )
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    assert [row["id"] for row in await read(make, *guest)] == [0, 1, 2]
    made = SQLFormat(*guest, key="id")
    assert PASSWORD.encode() not in pickle.dumps(made)
    assert await keys_of(pickle.loads(pickle.dumps(made))) == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("postgres?", "nothere?"), 'database "nothere" does not exist'),
        (("postgres@", "nobody@"), 'role "nobody" does not exist'),
        (("host=", "host=/nowhere"), "^cannot open table 't' of .*No such file or dir"),
    ],
)
async def test_missing_servers_and_databases_are_errors(
    postgresql: Database, change: tuple[str, str], words: str
) -> None:
    made = SQLFormat(postgresql.url.replace(*change), "t", key="id")
    with pytest.raises(DatasetError, match=words):
        await rows_of(made)


async def test_bad_sqlite_files_are_errors(tmp_path: Path, monkeypatch: Any) -> None:
    made = SQLFormat(f"sqlite:///{tmp_path}/x.db", "t", key="id")
    with pytest.raises(ObjectNotFoundError, match="no such file"):
        await rows_of(made)
    assert not (tmp_path / "x.db").exists()
    (tmp_path / "x.db").touch()
    with monkeypatch.context() as patch:  # root may read everything
        patch.setattr("os.access", lambda *_: False)
        with pytest.raises(ObjectPermissionError, match="permission denied"):
            await rows_of(made)
    (tmp_path / "x.db").write_bytes(b"no database at all" * 100)
    with pytest.raises(DatasetError, match="file is not a database"):
        await rows_of(made)


@WAYS
async def test_missing_tables_and_columns_fail(database: Database, make: Any) -> None:
    with pytest.raises(ObjectNotFoundError, match="nothere"):
        await read(make, database.url, "nothere")
    database.fill("t", 3)
    shown = "" if make is SQLRows else ": there is no column 'no'; there are id, value"
    for options in ({"key": "no"}, {"columns": ["id", "no"]}):
        with pytest.raises((DatasetError, ValueError), match=f"table 't' of .*{shown}"):
            await read(make, database.url, "t", **options)


@WAYS
async def test_dots_in_table_names_are_quoted(database: Database, make: Any) -> None:
    database.fill('"my.table"', 3)
    with pytest.raises(ObjectNotFoundError, match=r"dot is quoted, as in '\"my\.table"):
        await read(make, database.url, "my.table")
    assert len(await read(make, database.url, '"my.table"')) == 3


@WAYS
async def test_question_marks_in_paths_are_encoded(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "is it?n=1.db"
    Database(path).fill("t", 3)
    for words in ("", "?immutable=1"):
        url = f"sqlite:///{path}".replace("?", "%3F") + words
        assert len(await read(make, url, "t")) == 3
    with pytest.raises(ValueError, match=r"%3F for a \? in the name of a file"):
        await read(make, f"sqlite:///{tmp_path}/really?.db", "t")


@pytest.fixture
def unwritable() -> Iterator[str]:
    """Return a database in WAL mode, whose directory cannot be written."""
    with tempfile.TemporaryDirectory(prefix="aioloader-wal-") as folder:
        database = Database(Path(folder) / "a.db")
        database.run("PRAGMA journal_mode = WAL")
        database.fill("t", 3)
        Path(folder).chmod(0o555)
        yield database.url
        Path(folder).chmod(0o755)


@WAYS
async def test_immutable_reads_a_wal_in_a_read_only_folder(
    make: Any, unwritable: str
) -> None:
    """The error says so."""
    rows = await read(make, f"{unwritable}?immutable=1", "t")
    assert [row["id"] for row in rows] == [0, 1, 2]
    with as_nobody(), pytest.raises(DatasetError, match=r"\?immutable=1 to the URL"):
        await read(make, unwritable, "t")


@pytest.mark.slow
@pytest.mark.parametrize(
    "query", ["SELECT id FROM", "SELECT id FROM t) --", "SELECT 1; DROP TABLE t"]
)
async def test_broken_queries_are_errors(database: Database, query: str) -> None:
    database.fill("t", 3)
    with pytest.raises((DatasetError, ValueError), match=r"syntax|incomplete"):
        await rows_of(SQLFormat(database.url, query, key="id"))
    assert await keys_of(SQLFormat(database.url, "t", key="id")) == [0, 1, 2]


async def test_an_error_in_a_row_names_the_last_key(postgresql: Database) -> None:
    postgresql.fill("t", 5000)
    query = "SELECT id, 1 / (id - 4000) AS x, repeat('x', 100) AS y FROM t"
    made = SQLFormat(postgresql.url, query, key="id", partitions=1)
    async with opened(made, SMALL) as readers:
        rows: list[Any] = []
        with pytest.raises(DatasetError, match="division by zero") as caught:
            while True:
                rows += await readers[0].pull(100)
        assert 0 < len(rows) < 4000
        assert f"(every id, after {len(rows) - 1}) of" in str(caught.value)
        assert caught.value.attempts == 1


# -- names ------------------------------------------------------------------------

NASTY = [
    't"; DROP TABLE t; --', "t; DROP TABLE t", "t'); DROP TABLE t; --",
    "t AS q; DELETE FROM t", "t WHERE 1=1", "(t)", "sélect", "select", "{}",
]  # fmt: skip


@pytest.mark.slow
@WAYS
@pytest.mark.parametrize("name", NASTY)
async def test_names_are_never_code(database: Database, make: Any, name: str) -> None:
    database.fill("t", 3)
    cases: Any = [(name, {}), ("t", {"key": name}), ("t", {"columns": [name]})]
    for table, options in cases:
        with pytest.raises((DatasetError, ValueError)):
            await read(make, database.url, table, **options)
    assert len(await read(make, database.url, "t")) == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", NASTY)
async def test_any_name_can_be_read(database: Database, name: str) -> None:
    quoted = '"' + name.replace('"', '""') + '"'
    database.run(
        f'CREATE TABLE {quoted} ({quoted} INTEGER PRIMARY KEY, {quoted[:-1]}2" TEXT)'
    )
    database.run(f"INSERT INTO {quoted} VALUES (1, 'a'), (2, 'b'), (3, 'c')")
    made = SQLFormat(database.url, quoted, key=name, columns=[f"{name}2"], partitions=2)
    assert await keys_of(made, f"{name}2") == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"query": ""}, "'' is not a table"),
        ({"query": "a..b"}, "'a..b' is not a table"),
        ({"query": 'a"b'}, "is not a table|names must"),
        ({"query": "a\0b"}, "without NUL"),
        ({"key": ""}, "not empty"),
        ({"columns": []}, "at least one column"),
        ({"columns": "id"}, "columns must be a list of names, got 'id'"),
        ({"columns": ["a", "b", "a"]}, "columns must not repeat, got a, b, a"),
        ({"url": "mysql://host/name"}, r"got mysql://\.\.\."),
        ({"url": f"pg://me:{PASSWORD}@host"}, r"got pg://\.\.\.$"),
        ({"url": "data.db"}, "got no scheme"),
        ({"url": "sqlite://"}, "a database in memory belongs to one"),
        ({"url": "sqlite:///:memory:"}, "a database in memory belongs to one"),
        ({"url": "postgresql://host/x?a-b=1"}, r"parameters such as \?name=value"),
        ({"partitions": 0}, "partitions must be at least 1, got 0"),
        ({"deadline": -1}, "deadline must not be negative, got -1"),
        ({"parameters": [1]}, "parameters are for a query"),
        ({"infinity": "x"}, "infinity must be 'error' or 'null', got 'x'"),
        ({"numeric": 1, "keys": [1]}, "numeric must be 'decimal' or 'float', got 1"),
        ({"query": "SELECT 1", "keys": [1]}, "table must be a table: name a query by"),
        ({"connections": 0, "keys": [1]}, "connections must be at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], words: str) -> None:
    given = {"url": "sqlite:///x.db", "query": "t", "key": "id", **arguments}
    make: Any = SQLRows if "keys" in given else SQLDataset
    with pytest.raises((ValueError, TypeError), match=words):
        make(given.pop("url"), given.pop("query"), **given)


@pytest.mark.parametrize(
    ("url", "label"),
    [
        (
            "postgresql://me:s%20'\\x@h1:1,[::1]:2/my%20db?sslmode=no",
            "postgresql://h1:1,[::1]:2/my%20db",
        ),
        ("postgresql:///x?host=/t&port=9", "postgresql:///x?host=/t&port=9"),
        ("postgresql://%2Ft/x?user=me&password=a+b", "postgresql://%2Ft/x"),
        ("postgresql://", "postgresql://"),
    ],
)
def test_drivers_get_the_postgresql_url_unchanged(url: str, label: str) -> None:
    """Except for defaults; errors show no secret of it."""
    address = DatabaseURL(url)
    assert address.label == label
    before, _, query = url.partition("?")
    driver = address.for_driver()
    assert driver.startswith(f"{before}?fallback_application_name=aioloader&")
    assert driver.endswith(f"&{query}&client_encoding=UTF8".replace("&&", "&"))
    kept = query.replace("+", "%2B")
    assert address.for_asyncpg() == f"{before}?{kept}"
    assert DatabaseURL(f"{before}?connect_timeout=1").for_asyncpg() == f"{before}?"
    said = address.scrub("x s '\\x or s%20'\\x or a+b")
    if "'" in url:
        assert said == "x *** or *** or a+b"
    elif "+" in url:
        assert said == "x s '\\x or s%20'\\x or ***"


def test_drivers_get_the_sqlite_path_as_a_uri(tmp_path: Path) -> None:
    path = tmp_path / "a b%#.db"
    path.touch()
    address = DatabaseURL(f"sqlite:///{path}?immutable=1")
    uri = f"file:{tmp_path}/a%20b%25%23.db?immutable=1&mode=ro"
    assert address.for_driver() == uri
    assert DatabaseURL("sqlite:///x.db").path == str(Path.cwd() / "x.db")


# -- servers that vanish ----------------------------------------------------------


@pytest.fixture
def running(server: Server) -> Any:
    yield server
    server.start()


@pytest.mark.slow
async def test_reading_survives_a_restart_of_the_server(
    postgresql: Database, running: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """All ranges resume after their last keys, in one new snapshot."""
    wide(postgresql)
    made = SQLFormat(
        postgresql.url, "t", key="id", partitions=4, columns=["id", "body"]
    )
    with caplog.at_level(logging.WARNING, "aioloader"):
        async with opened(made, SMALL) as readers:
            parts = [[*await reader.pull(10)] for reader in readers[:3]]
            await beside(running.stop)
            rest = [asyncio.create_task(rest_of(reader)) for reader in readers]
            await beside(running.start)
            more = await asyncio.gather(*rest)
    parts = [[*part, *rows] for part, rows in zip([*parts, []], more, strict=True)]
    keys = [row["id"] for part in parts for row in part]
    assert keys == [*range(4000)]
    said = [record.getMessage() for record in caplog.records]
    assert sum("the snapshot of" in line for line in said) == 1
    assert any("retrying" in line for line in said)


@pytest.mark.slow
async def test_reading_gives_up_on_a_dead_server(
    postgresql: Database, running: Server
) -> None:
    wide(postgresql)
    made = SQLFormat(postgresql.url, "t", key="id", partitions=[2000], deadline=0.5)
    async with opened(made, SMALL) as readers:
        rows = [*await readers[1].pull(10)]
        await beside(running.stop)
        with pytest.raises(DatasetError, match=r"given up after \d+ tries") as caught:
            while True:
                rows += await readers[1].pull(100)
        label = DatabaseURL(postgresql.url).label
        text = str(caught.value)
        where = f"(id >= 2000, after {rows[-1]['id']}) of {label!r}: "
        assert text.startswith(f"cannot read table 't' {where}")
        assert caught.value.attempts > 1
        assert caught.value.location == label


CUT = "SELECT pg_terminate_backend(pid, 20000) FROM pg_stat_activity WHERE"


async def test_a_cut_reader_keeps_its_snapshot(
    postgresql: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """It does not see what was written meanwhile."""
    wide(postgresql)
    made = SQLFormat(postgresql.url, "t", key="id", partitions=1)
    with caplog.at_level(logging.WARNING, "aioloader"):
        async with opened(made, SMALL) as readers:
            rows = [*await readers[0].pull(10)]
            reader = f"{CUT} query LIKE 'COPY%ORDER BY%'"
            await beside(lambda: postgresql.run("UPDATE t SET n = 1", reader))
            rows += await rest_of(readers[0])
    assert [row["id"] for row in rows] == [*range(4000)]
    assert {int(row["n"]) for row in rows} == {0}
    (said,) = [record.getMessage() for record in caplog.records]
    assert "connection" in said
    assert said.endswith("retrying")


async def test_a_cut_leader_gives_later_ranges_a_new_snapshot(
    postgresql: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """Ranges under way keep the old one; a warning says so."""
    wide(postgresql)
    made = SQLFormat(postgresql.url, "t", key="id", partitions=[2000])
    with caplog.at_level(logging.WARNING, "aioloader"):
        async with opened(made, SMALL) as readers:
            await readers[0].pull(10)
            leader = f"{CUT} state = 'idle in transaction'"
            await beside(lambda: postgresql.run("UPDATE t SET n = 1", leader))
            second, first = [await rest_of(reader) for reader in reversed(readers)]
    assert [row["id"] for row in first + second] == [*range(10, 4000)]
    assert {int(row["n"]) for row in first} == {0}
    assert {int(row["n"]) for row in second} == {1}
    (said,) = [record.getMessage() for record in caplog.records]
    assert "reading continues with a new one" in said


@pytest.mark.slow
async def test_rows_survive_a_restart(postgresql: Database, running: Server) -> None:
    """If the server comes back before the deadline."""
    postgresql.fill("t", 100)
    async with listed(postgresql) as rows:
        assert (await rows[0])["id"] == 0
        await beside(running.stop)
        reads = [asyncio.create_task(rows[n]) for n in range(20)]
        await asyncio.sleep(0)
        await beside(running.start)
        assert [row["id"] for row in await asyncio.gather(*reads)] == [*range(20)]
    async with listed(postgresql, deadline=0.3) as rows:
        await rows[0]
        await beside(running.stop)
        with pytest.raises(DatasetError, match=r"given up after \d+ tries"):
            await rows[1]


async def test_a_locked_file_is_waited_for(sqlite: Database) -> None:
    """A writer without a WAL locks it for a moment."""
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
