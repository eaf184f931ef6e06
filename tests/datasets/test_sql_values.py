"""PostgreSQL's exact numbers and infinite dates: kept, or an error with the row."""

import datetime as dt
import decimal
import pickle
from typing import Any

import numpy as np
import pytest

from aioloader import DataLoader
from aioloader.datasets import SQLDataset, SQLRows
from aioloader.datasets._sql.format import SQLFormat
from aioloader.errors import DatasetError
from datasets.pg import Database, postgresql, server
from datasets.sql_reads import listed, opened, rest_of, rows_of

__all__ = ["postgresql", "server"]

# More digits than a float has; NaN, which Arrow's decimals have not.
EXACT = ["12345678901234567890.123456789", "0.1", "NaN", "9007199254740993", "1e-40"]
INFINITE = [
    ("date", "'infinity'"),
    ("timestamptz", "'-infinity'"),
    ("date[]", "'{2020-01-01,NULL,infinity}'"),
    pytest.param("date", "'-infinity'", marks=pytest.mark.fuzz),
    pytest.param("timestamp", "'infinity'", marks=pytest.mark.fuzz),
    pytest.param("timestamp[]", "'{-infinity}'", marks=pytest.mark.fuzz),
]


def fill_exact(database: Database) -> None:
    rows = ", ".join(
        f"({n}, '{text}', '{{{text},NULL}}', '92233720368547758.07')"
        for n, text in enumerate(EXACT)
    )
    database.run(
        "CREATE TABLE t (id INT PRIMARY KEY, x numeric, xs numeric[], m money)",
        f"INSERT INTO t VALUES {rows}, ({len(EXACT)}, NULL, NULL, NULL)",
    )


async def values_of(database: Database, kind: str, **options: Any) -> list[Any]:
    if kind == "keys":
        async with listed(database, **options) as rows:
            return await rows.__getitems__(range(len(rows)))
    query = "SELECT * FROM t WHERE id >= $1" if kind == "query" else "t"
    parameters = (0,) if kind == "query" else ()
    made = SQLFormat(
        database.url, query, key="id", parameters=parameters, partitions=2, **options
    )
    return await rows_of(made)


WAYS = pytest.mark.parametrize("kind", ["ranges", "query", "keys"])


@WAYS
async def test_exact_numbers_keep_their_digits(postgresql: Database, kind: str) -> None:
    fill_exact(postgresql)
    rows = await values_of(postgresql, kind)
    expected = [str(decimal.Decimal(text)) for text in EXACT]
    assert [str(row["x"]) for row in rows] == [*expected, "None"]
    assert [str(row["xs"][0]) for row in rows[:-1]] == expected
    assert rows[0]["xs"][1] is None
    assert rows[0]["m"] == decimal.Decimal("92233720368547758.07")


@WAYS
async def test_exact_numbers_as_floats(postgresql: Database, kind: str) -> None:
    fill_exact(postgresql)
    rows = await values_of(postgresql, kind, numeric="float")
    found = [row["x"] for row in rows[:-1]]
    np.testing.assert_array_equal(found, [float(text) for text in EXACT])
    assert float(rows[1]["xs"][0]) == 0.1
    assert float(rows[0]["m"]) == 92233720368547758.07


async def test_batches_of_exact_numbers(postgresql: Database) -> None:
    fill_exact(postgresql)
    stream = SQLDataset(postgresql.url, "t", key="id", columns=["x"], partitions=1)
    loader: Any = DataLoader(stream.shuffle(9), 9)
    (batch,) = [batch async for batch in loader]
    assert sorted(map(str, batch["x"])) == sorted(
        [*map(str, map(decimal.Decimal, EXACT)), "None"]
    )
    async with opened(SQLFormat(postgresql.url, "t", key="id")) as readers:
        block = await readers[0].pull(9)
        assert [*map(str, pickle.loads(pickle.dumps(block)))] == [*map(str, block)]


@pytest.mark.one_loop
@WAYS
@pytest.mark.parametrize(("type_", "value"), INFINITE)
async def test_an_infinite_date_is_an_error(
    postgresql: Database, kind: str, type_: str, value: str
) -> None:
    postgresql.run(
        f"CREATE TABLE t (id INT PRIMARY KEY, n INT, d {type_})",
        f"INSERT INTO t VALUES (6, 60, NULL), (7, 70, {value}), (8, 80, NULL)",
    )
    words = r"row of .* with id = 7 has an infinite date in column 'd'.*infinity='null'"
    with pytest.raises(DatasetError, match=words):
        for row in await values_of(postgresql, kind):
            if hasattr(row, "error"):
                raise row.error
    rows = await values_of(postgresql, kind, infinity="null")
    assert [row["n"] for row in rows] == [60, 70, 80]
    found = rows[1]["d"]
    if isinstance(found, list):
        assert found[-1] is None
        assert found[:-1] in ([], [dt.date(2020, 1, 1), None])
    else:
        assert found is None


async def test_only_the_row_with_an_infinite_date_fails(postgresql: Database) -> None:
    postgresql.run(
        "CREATE TABLE t (id INT PRIMARY KEY, d date, other timestamp)",
        "INSERT INTO t SELECT n, '9999-12-31', 'infinity' FROM generate_series(0, 9) n",
        "UPDATE t SET other = NULL WHERE id <> 5",
    )
    made = SQLFormat(postgresql.url, "t", key="id", partitions=1)
    async with opened(made) as readers:
        rows: list[Any] = await rest_of(readers[0])
    assert "id = 5 has an infinite date in column 'other'" in str(rows[5].error)
    assert [row["id"] for row in rows[:5] + rows[6:]] == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert rows[0]["d"] == dt.date(9999, 12, 31)
    stream = SQLDataset(postgresql.url, "t", key="id")
    loader: Any = DataLoader(stream.map(lambda row: row["id"]), 3, on_error="skip")
    found = [n async for batch in loader for n in batch.tolist()]
    assert sorted(found) == [0, 1, 2, 3, 4, 6, 7, 8, 9]


async def test_a_key_may_not_be_infinite(postgresql: Database) -> None:
    """A driver takes it for some day, out of order."""
    postgresql.run("CREATE TABLE t (id date PRIMARY KEY)")
    postgresql.run("INSERT INTO t VALUES ('2020-01-01'), ('infinity')")
    with pytest.raises(ValueError, match="key 'id' is infinite in some rows"):
        await rows_of(SQLFormat(postgresql.url, "t", key="id", infinity="null"))


async def test_ranges_of_infinite_dates(postgresql: Database) -> None:
    postgresql.run(
        "CREATE TABLE t (id INT PRIMARY KEY, d daterange)",
        "INSERT INTO t VALUES (1, '[2020-01-01,infinity]')",
    )
    (row,) = await values_of(postgresql, "ranges")
    assert row["d"] == "[2020-01-01,infinity]"
    with pytest.raises(DatasetError, match="id = 1 has an infinite date"):
        await values_of(postgresql, "keys")


def test_other_words_are_an_error() -> None:
    with pytest.raises(ValueError, match="numeric must be 'decimal' or 'float', got 1"):
        SQLRows("sqlite:///x", "t", key="id", keys=(), numeric=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="infinity must be 'error' or 'null', got 'x'"):
        SQLDataset("sqlite:///x", "t", key="id", infinity="x")  # type: ignore[arg-type]
