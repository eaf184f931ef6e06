"""SQL: how fast are the rows of a table, and is the event loop free meanwhile?

A million narrow rows in batches of 1,024, and 20,000 blobs of 10 KB in batches of 64,
in the order of the key, from PostgreSQL and from SQLite. All except the limit, the bare
ADBC reader, yield a dict of column to int64 or float64 tensor, or to a list of bytes.
An epoch starts with connecting.

``blocked`` is the longest time in which the caller could do nothing else: the delay of
a heartbeat in its loop where batches come by ``async for``, else the longest
``next()``.
"""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import time
from collections.abc import AsyncIterable, Iterable
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from databases import FULL, SMALL, Table, address, serve, sqlite_file
from harness import Contender, Figures, Limit, Metric, Options, Question, Target, main
from meter import Meter

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Callable,
        Generator,
        Iterator,
        Sequence,
    )

Batch = dict[str, Any]
Batches = Iterable[Batch] | AsyncIterable[Batch]
BEAT = 0.001
KINDS = ("postgresql", "sqlite")


def query(table: Table, where: str = "") -> str:
    return f"SELECT * FROM {table.name} {where} ORDER BY id"


# -- contenders -----------------------------------------------------------------------


def ours(url: str, table: Table, *, interleave: int = 1, loop: str = "thread") -> Any:
    import aioloader  # noqa: PLC0415
    from aioloader.datasets import SQLDataset  # noqa: PLC0415

    dataset: Any = SQLDataset(url, table.name, key="id", interleave=interleave)
    loader: Any = aioloader.DataLoader(dataset, table.batch, loop=loop)
    return Asynchronous(loader) if loop == "caller" else loader


class Asynchronous:
    """Exposes only the asynchronous interface of a loader."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __aiter__(self) -> AsyncIterator[Batch]:
        batches: AsyncIterator[Batch] = aiter(self._loader)
        return batches


def tensors(names: Sequence[str], rows: Sequence[Any]) -> Batch:
    """Make a tensor, or a list of bytes, of each column."""
    columns = zip(names, zip(*rows, strict=True), strict=True)
    return {
        name: list(column) if isinstance(column[0], bytes) else torch.tensor(column)
        for name, column in columns
    }


async def asyncpg_cursor(url: str, table: Table) -> AsyncGenerator[Batch, None]:
    """Fetch a batch at a time from a cursor of asyncpg."""
    import asyncpg  # noqa: PLC0415

    connection = await asyncpg.connect(url)
    try:
        async with connection.transaction():
            cursor = await connection.cursor(query(table))
            while rows := await cursor.fetch(table.batch):
                # the caller that iterates closes it
                yield tensors(list(rows[0].keys()), rows)  # noqa: ASYNC119
    finally:
        await connection.close()


def sqlite_cursor(url: str, table: Table) -> Generator[Batch, None, None]:
    """Fetch a batch at a time from a cursor of sqlite3."""
    with closing(sqlite3.connect(sqlite_file(url))) as connection:
        cursor = connection.execute(query(table))
        names = [one[0] for one in cursor.description]
        while rows := cursor.fetchmany(table.batch):
            yield tensors(names, rows)


class Recipe(IterableDataset[Batch]):
    """The usual recipe: a server-side cursor, and one dict per row.

    Each worker reads a range of the keys.
    """

    def __init__(self, url: str, table: Table) -> None:
        self._url = url
        self._table = table

    def __iter__(self) -> Iterator[Batch]:
        worker, count = get_worker_info(), self._table.rows
        mine, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        bounds = f"{count * mine // workers} AND id < {count * (mine + 1) // workers}"
        sql = query(self._table, f"WHERE id >= {bounds}")
        read = self._sqlite if self._url.startswith("sqlite") else self._postgresql
        return read(sql)

    def _postgresql(self, sql: str) -> Iterator[Batch]:
        import psycopg  # noqa: PLC0415
        from psycopg.rows import dict_row  # noqa: PLC0415

        with (
            psycopg.connect(self._url) as connection,
            connection.cursor("rows", row_factory=dict_row) as cursor,
        ):
            cursor.itersize = 2_000
            yield from cursor.execute(sql)

    def _sqlite(self, sql: str) -> Iterator[Batch]:
        with closing(sqlite3.connect(sqlite_file(self._url))) as connection:
            connection.row_factory = sqlite3.Row
            for row in connection.execute(sql):
                yield dict(row)


def recipe(url: str, table: Table, *, workers: int) -> Batches:
    loader: DataLoader[Batch] = DataLoader(
        Recipe(url, table), table.batch, num_workers=workers
    )
    return loader


def adbc(url: str, table: Table) -> Generator[Batch, None, None]:
    """The limit: batches of Arrow as the driver makes them, and no tensors."""
    with closing(connect(url)) as connection, connection.cursor() as cursor:
        cursor.execute(query(table))
        for batch in cursor.fetch_record_batch():
            yield {"id": batch.column("id").to_numpy()}


def connect(url: str) -> Any:
    if url.startswith("sqlite"):
        import adbc_driver_sqlite.dbapi as driver  # noqa: PLC0415

        return driver.connect(sqlite_file(url))
    import adbc_driver_postgresql.dbapi as postgresql  # noqa: PLC0415

    return postgresql.connect(url)


# -- the clock ------------------------------------------------------------------------


class Tally:
    """The results: rows, the sum of their keys, and the longest a step took."""

    def __init__(self) -> None:
        self.rows = 0
        self.keys = 0
        self.blocked = 0.0

    def add(self, batch: Batch) -> None:
        """Count a batch."""
        self.rows += len(batch["id"])
        self.keys += int(batch["id"].sum())

    def check(self, table: Table) -> None:
        """Check that each row came exactly once."""
        if self.rows != table.rows or self.keys != table.rows * (table.rows - 1) // 2:
            raise RuntimeError(f"{self.rows} rows seen, {table.rows} expected")


def drain(batches: Iterable[Batch]) -> Tally:
    tally, steps = Tally(), iter(batches)
    while True:
        asked = time.perf_counter()
        batch = next(steps, None)
        tally.blocked = max(tally.blocked, time.perf_counter() - asked)
        if batch is None:
            return tally
        tally.add(batch)


async def adrain(batches: AsyncIterable[Batch]) -> Tally:
    tally = Tally()
    heart = asyncio.create_task(beat(tally))
    await asyncio.sleep(2 * BEAT)
    async for batch in batches:
        tally.add(batch)
    await asyncio.sleep(2 * BEAT)
    heart.cancel()
    return tally


async def beat(tally: Tally) -> None:
    """Record by how much a sleep was too long."""
    while True:
        start = time.perf_counter()
        await asyncio.sleep(BEAT)
        late = time.perf_counter() - start - BEAT
        tally.blocked = max(tally.blocked, late)


def epoch(make: Callable[[str, Table], Batches], url: str, table: Table) -> Tally:
    batches = make(url, table)
    if isinstance(batches, AsyncIterable):
        tally = asyncio.run(adrain(batches))
    else:
        tally = drain(batches)
    tally.check(table)
    return tally


def run(
    make: Callable[[str, Table], Batches], kind: str, what: str, options: Options
) -> Figures:
    """Read the small table, so that all is imported, and then the measured one."""
    url = address(kind, options.url)
    epoch(make, url, SMALL[what])
    table = (SMALL if options.quick else FULL)[what]
    gc.collect()
    with Meter() as meter:
        tally = epoch(make, url, table)
    threads = {f"cpu:{name}": one for name, one in meter.threads.items() if one > 0.01}
    return {
        "rows": table.rows / meter.wall,
        "cpu": meter.cpu / table.rows * 1e6,
        "blocked_ms": tally.blocked * 1e3,
        **threads,
    }


# -- the question ---------------------------------------------------------------------


def makers(kind: str) -> dict[str, Callable[[str, Table], Batches]]:
    if kind == "sqlite":
        cursor, driver = "sqlite3 cursor", sqlite_cursor
    else:
        cursor, driver = "asyncpg cursor", asyncpg_cursor
    return {
        "aioloader": ours,
        "aioloader interleave 4": partial(ours, interleave=4),
        "aioloader caller": partial(ours, loop="caller"),
        cursor: driver,
        "torch recipe 0 workers": partial(recipe, workers=0),
        "torch recipe 2 workers": partial(recipe, workers=2),
        "limit": adbc,
    }


def contenders() -> dict[str, Contender]:
    return {
        f"{kind} {what}: {name}": Contender(
            partial(run, make, kind, what),
            against=f"{kind} {what}: limit",
            extra=name.endswith("interleave 4"),
            max_rounds=2 if "recipe" in name else 100,
        )
        for kind in KINDS
        for what in FULL
        for name, make in makers(kind).items()
    }


QUESTION = Question(
    name="sql",
    text="How fast are the rows of a table, and for how long is the caller held up?",
    contenders=contenders(),
    metrics=[
        Metric("rows", "rows/s"),
        Metric("cpu", "CPU us/row", ",.2f", higher=False),
        Metric("blocked_ms", "blocked ms", ",.1f", higher=False),
        Metric("rss_mb", "MB", higher=False),
    ],
    targets=[
        Target(
            f"{kind} rows: aioloader",
            [f"{kind} rows: torch recipe {count} workers" for count in (0, 2)],
            5,
        )
        for kind in KINDS
    ],
    limits=[
        Limit(f"{kind} {what}: aioloader caller", "blocked_ms", 20)
        for kind in KINDS
        for what in FULL
    ],
    serve=serve,
)

if __name__ == "__main__":
    main(QUESTION)
