"""Columns of every type of PostgreSQL and SQLite, with NULLs and mixed types."""

import contextlib
import datetime as dt
import decimal
import re
import uuid
import zoneinfo
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import asyncpg
import numpy as np
import pytest

from aioloader import DataLoader
from aioloader.datasets import SQLDataset, SQLRows
from aioloader.datasets.sql import SQLFormat
from aioloader.errors import DatasetError
from datasets.pg import (
    Database,
    Server,
    listed,
    opened,
    read,
    rest_of,
    resumed,
    rows_of,
)

# Loaded before a loop runs: Arrow reads a file when it first shows a time.
UTC = zoneinfo.ZoneInfo("UTC")
UUID = uuid.UUID("12345678-1234-1234-1234-123456789abc")
# A type of PostgreSQL, a literal, and the value that is read.
TYPES: dict[str, tuple[str, Any]] = {
    "int2": ("-3", np.int16(-3)),
    "int4": ("70000", np.int32(70000)),
    "int8": ("9223372036854775807", np.int64(2**63 - 1)),
    "oid": ("4000000000", np.int64(4_000_000_000)),
    "float4": ("1.5", np.float32(1.5)),
    "float8": ("'NaN'", np.float64("nan")),
    "numeric(10,2)": ("12.34", decimal.Decimal("12.34")),
    "money": ("'1,234.50'", decimal.Decimal("1234.50")),
    "bool": ("true", np.True_),
    "text": ("'it''s é'", "it's é"),
    "varchar(3)": ("'abc'", "abc"),
    "char(3)": ("'a'", "a  "),
    "bytea": ("'\\x00ff'", b"\x00\xff"),
    "date": ("'2020-01-02'", dt.date(2020, 1, 2)),
    "time": ("'12:34:56.789'", dt.time(12, 34, 56, 789000)),
    "timestamp": ("'2020-01-02 03:04:05'", dt.datetime(2020, 1, 2, 3, 4, 5)),
    "timestamptz": ("'2020-01-02 03:04+02'", dt.datetime(2020, 1, 2, 1, 4, tzinfo=UTC)),
    "uuid": (f"'{UUID}'", UUID),
    "json": ("'{\"a\": 1}'", '{"a": 1}'),
    "jsonb": ("'{\"a\": 1}'", '{"a": 1}'),
    "mood": ("'sad'", "sad"),
    "inet": ("'10.0.0.1'", "10.0.0.1/32"),
    "int4range": ("'[1,5)'", "[1,5)"),
    "bit(3)": ("'101'", "101"),
    "int4[]": ("'{1,2,3}'", [1, 2, 3]),
    "float8[]": ("'{1.5,2}'", [1.5, 2.0]),
    "numeric[]": ("'{1.5,2}'", [decimal.Decimal("1.5"), decimal.Decimal(2)]),
    "oid[]": ("'{4000000000}'", [4_000_000_000]),
    "text[]": ("'{a,b}'", ["a", "b"]),
    "mood[]": ("'{sad,ok}'", ["sad", "ok"]),
    "vector(3)": ("'[1,2,3]'", [1.0, 2.0, 3.0]),
    "halfvec(2)": ("'[1,2]'", [1.0, 2.0]),
}


async def test_postgresql_types_are_read(postgresql: Database) -> None:
    """Types that Arrow lacks become decimals or text; each may be NULL."""
    columns = [f"c{n} {kind}" for n, kind in enumerate(TYPES)]
    values = [literal for literal, _ in TYPES.values()]
    postgresql.run(
        "CREATE EXTENSION IF NOT EXISTS vector SCHEMA public",
        "CREATE TYPE mood AS ENUM ('ok', 'sad')",
    )
    postgresql.run(
        "SELECT set_config('search_path', current_schema() || ',public', false)",
        f"CREATE TABLE t (id INT PRIMARY KEY, {', '.join(columns)})",
        f"INSERT INTO t VALUES (1, {', '.join(values)})",
        "INSERT INTO t VALUES (2)",
    )
    first, second = await rows_of(SQLFormat(postgresql.url, "t", key="id"))
    for n, (kind, (_, expected)) in enumerate(TYPES.items()):
        value = first[f"c{n}"]
        if isinstance(value, np.ndarray):
            value = value.tolist()
        assert value == expected or expected != expected, kind  # noqa: PLR0124  (NaN)
        if isinstance(expected, np.generic):
            assert type(value) is type(expected), kind
        assert second[f"c{n}"] is None, kind


@pytest.fixture(scope="module")
def latin(server: Server) -> Iterator[str]:
    """Return the URL of a database of Latin-1, by a role that prefers it."""
    server.run("CREATE ROLE latin SUPERUSER LOGIN")
    server.run("ALTER ROLE latin SET client_encoding = 'LATIN1'")
    server.run("CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    yield server.url(account="latin").replace("/postgres?", "/latin?")
    server.run("DROP DATABASE latin")
    server.run("DROP ROLE latin")


@pytest.mark.parametrize("make", [SQLDataset, SQLRows])
@pytest.mark.parametrize("options", ["", "%20-cclient_encoding%3DLATIN1",
                                     "&client_encoding=LATIN1"])  # fmt: skip
async def test_text_is_decoded_whatever_the_client_encoding(
    make: Any, options: str, latin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Latin-1, "Ã©" has the bytes that "é" has in UTF-8."""
    texts = ["é", "Ã©", "ÿ"]
    connection = await asyncpg.connect(latin)
    await connection.execute("DROP TABLE IF EXISTS t")
    await connection.execute("CREATE TABLE t (id TEXT PRIMARY KEY, s TEXT)")
    for text in texts:
        await connection.execute("INSERT INTO t VALUES ($1, $1)", text)
    await connection.close()
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    rows = await read(make, latin + options, "t", columns=["s"])
    assert [row["s"] for row in rows] == sorted(texts, key=lambda t: t.encode("latin"))


async def test_dates_outside_of_pythons_years_are_numpys(postgresql: Database) -> None:
    postgresql.run(
        "CREATE TABLE t (id INT PRIMARY KEY, d date, ts timestamp)",
        "INSERT INTO t SELECT n, '2020-01-01' FROM generate_series(0, 5) AS n",
        "UPDATE t SET d = '0044-03-15 BC' WHERE id = 3",
        "UPDATE t SET ts = '12000-01-01' WHERE id = 4",
    )
    rows = await rows_of(SQLFormat(postgresql.url, "t", key="id"))
    assert rows[3]["d"] == np.datetime64("-0043-03-15")
    assert rows[4]["ts"] == np.datetime64("12000-01-01", "us")
    async with listed(postgresql) as table:
        for n in (3, 4):
            words = f"row of table 't' with id = {n} has a value that Python cannot.*"
            with pytest.raises(DatasetError, match=f"{words}years 1 to 9999.*a view"):
                await table.__getitems__([0, 1, 2, n, 5])


async def test_the_advice_for_nulls_can_be_followed(database: Database) -> None:
    database.fill("t", 3)
    database.run("UPDATE t SET value = NULL WHERE id = 1")
    for query in ("t", "SELECT id, COALESCE(value, 7) AS value FROM t"):
        loader: Any = DataLoader(SQLDataset(database.url, query, key="id"), 3)
        if query != "t":
            (batch,) = [batch async for batch in loader]
            assert sorted(batch["value"].tolist()) == [0, 1, 7]
            continue
        with pytest.raises(TypeError, match="COALESCE in the query of a database"):
            [batch async for batch in loader]


async def test_sqlite_types_are_read(sqlite: Database) -> None:
    sqlite.run(
        "CREATE TABLE t (id INTEGER PRIMARY KEY, i INTEGER, r REAL, t TEXT, b BLOB, "
        "d DECIMAL(9, 2), day DATE, yes BOOLEAN, any)",
        "INSERT INTO t VALUES (1, 5, 1, 'é', x'00ff', 1 << 60, '2020-01-02', 1, 'x')",
        "INSERT INTO t (id) VALUES (2)",
        "INSERT INTO t VALUES (3, -1, 2.5, '', x'', 3.5, '', 0, 'y')",
    )
    rows = await rows_of(SQLFormat(sqlite.url, "t", key="id"))
    first = [1, 5, 1.0, "é", b"\0\xff", 2.0**60, "2020-01-02", 1, "x"]
    assert [*rows[0].values()] == first
    assert [*rows[1].values()] == [2] + [None] * 8
    assert [*rows[2].values()] == [3, -1, 2.5, "", b"", 3.5, "", 0, "y"]
    kinds = [type(rows[0][name]) for name in ("i", "r", "d")]
    assert kinds == [np.int64, np.float64, np.float64]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "early", "late", "result"),
    [
        # The driver takes them for integers; the type is corrected later.
        ("REAL", "NULL", "0.5", 0.5),
        ("TEXT", "NULL", "'x'", "x"),
        ("BLOB", "NULL", "x'01'", b"\1"),
        ("", "NULL", "0.5", 0.5),
        ("", "NULL", "'x'", "x"),
        ("", "NULL", "x'01'", b"\1"),
        ("DATE", "NULL", "'2020-01-02'", "2020-01-02"),
        ("INTEGER", "7", "2.5", "is int64 in its first rows and double"),
        ("INTEGER", "7", "'five'", "is int64 in its first rows and string"),
        ("REAL", "7", "'five'", "is double in its first rows and string"),
        ("DECIMAL", "7", f"{2**53 + 1}", f"is double and has the integer {2**53 + 1}"),
    ],
)
async def test_the_first_value_after_nulls_decides_the_type(
    sqlite: Database, kind: str, early: str, late: str, result: Any
) -> None:
    """A later value of another type is an error."""
    sqlite.fill("n", 5000)
    sqlite.run(f"CREATE TABLE t (id INTEGER PRIMARY KEY, x {kind})")
    sqlite.run(f"INSERT INTO t SELECT id, iif(id = 4000, {late}, {early}) FROM n")
    made = SQLFormat(sqlite.url, "t", key="id", partitions=1)
    rows: list[Any] = []
    async with opened(made, budget=1 << 15) as readers:
        with contextlib.ExitStack() as stack:
            if early != "NULL":
                words = f"column 'x' {result}"
                error = stack.enter_context(pytest.raises(DatasetError, match=words))
            while len(block := await readers[0].pull(1000)):
                assert hasattr(block, "collate")
                rows += block
        if early != "NULL":
            assert 1000 < len(rows) <= 4000
            assert f"after {len(rows) - 1}" in str(error.value)
            with pytest.raises(DatasetError):
                await readers[0].pull(1)
            return
    expected = [{"id": n, "x": result if n == 4000 else None} for n in range(5000)]
    assert rows == expected


@pytest.mark.parametrize("bad", ["x'ff41'", "CAST(x'ff41' AS TEXT)"])
async def test_mixed_columns_are_read_as_texts(sqlite: Database, bad: str) -> None:
    """Text that is not UTF-8 fails only its row."""
    sqlite.run("CREATE TABLE t (id INTEGER PRIMARY KEY, x)")
    sqlite.run("INSERT INTO t VALUES (1, 7), (2, 0.1), (3, 'x'), (4, NULL), (5, 8)")
    made = SQLFormat(sqlite.url, "SELECT x, id FROM t", key="id", columns=["x"])
    sqlite.fill("n", 2000)
    sqlite.run("INSERT INTO t SELECT id + 6, 'y' FROM n")
    sqlite.run(f"INSERT INTO t VALUES (3000, {bad}), (3001, 9)")
    *rows, failed, last = await rows_of(made)
    assert [row["x"] for row in rows[:5]] == ["7", "0.1", "x", None, "8"]
    assert (len(rows), last) == (2005, {"x": "9"})
    words = "row of query .* with id = 3000 has text in column 'x' that is not UTF-8"
    with pytest.raises(DatasetError, match=words):
        raise failed.error  # type: ignore[attr-defined]


async def test_blobs_may_be_keys_of_sqlite(sqlite: Database) -> None:
    """Positions hold them in hexadecimal."""
    sqlite.run("CREATE TABLE t (id BLOB PRIMARY KEY, n INTEGER)")
    sqlite.run("INSERT INTO t VALUES (x'', 0), (x'00', 1), (x'7f41', 2), (x'ff', 3)")
    made = SQLFormat(sqlite.url, "t", key="id", partitions=3)
    assert [row["n"] for row in await rows_of(made)] == [0, 1, 2, 3]
    whole = SQLFormat(sqlite.url, "t", key="id", partitions=1)
    for count in range(5):
        assert [r["n"] for r in await resumed(whole, 0, count)] == [0, 1, 2, 3]
    async with listed(sqlite) as rows:
        assert rows.keys == [b"", b"\0", b"\x7fA", b"\xff"]
        assert [row["n"] for row in await rows.__getitems__([2, 0, 1])] == [2, 0, 1]


# -- keys that cannot be one ------------------------------------------------------


NULL_KEY = r"table 't' of .*: key 'id' is NULL in some"
NO_KEYS = [
    # Rows with a NULL would be in no range.
    ("sqlite", "INTEGER UNIQUE", "(1), (NULL)", NULL_KEY),
    ("postgresql", "INTEGER UNIQUE", "(1), (NULL)", NULL_KEY),
    *(
        ("postgresql", kind, "(NULL)", "cannot be a key; use bpchar, bytea, date")
        for kind in ("float8", "numeric", "json", "bool", "int4[]")
    ),
    # A driver reads it as some day, which is out of order.
    ("postgresql", "date", "('2020-01-01'), ('infinity')", "is infinite in some rows"),
    # SQLite sorts mixed types by type first, and Arrow cannot hold them.
    *(
        ("sqlite", "UNIQUE", values, "must be integer, all text or all blob")
        for values in ("(1), ('x')", "(1.5), (2)", "('a'), (x'00')", "(1), (2.5), (3)")
    ),
    # Mixed numbers have one order: the error comes when the value is read.
    ("sqlite", "UNIQUE", "(1), (1.5), (2)", "column 'id' is int64 .* and double later"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("base", "kind", "values", "words"), NO_KEYS, ids=str)
async def test_unsuitable_keys_are_refused(
    base: str, kind: str, values: str, words: str, request: Any, server: Any
) -> None:
    database = request.getfixturevalue(base)
    database.run(f"CREATE TABLE t (id {kind})", f"INSERT INTO t VALUES {values}")
    options: Any = {"partitions": 1} if "later" in words else {"infinity": "null"}
    made = SQLFormat(database.url, "t", key="id", **options)
    with pytest.raises((ValueError, DatasetError), match=words):
        await rows_of(made)


@pytest.mark.slow
@pytest.mark.parametrize("twice", [0, 1, 63, 64, 998, 1998])
async def test_keys_must_be_unique(database: Database, twice: int) -> None:
    database.fill("n", 2000)
    database.run("CREATE TABLE t (id INTEGER, x TEXT)")
    after = f"CASE WHEN id > {twice} THEN 1 ELSE 0 END"
    database.run(f"INSERT INTO t SELECT id - {after}, name FROM n")
    made = SQLFormat(database.url, "t", key="id", partitions=2)
    words = f"key 'id' is not unique: {twice} appears twice"
    with pytest.raises(DatasetError, match=words):
        await rows_of(made)


async def test_resuming_at_a_repeated_key_is_an_error(database: Database) -> None:
    database.run("CREATE TABLE t (id TEXT)")
    database.run("INSERT INTO t VALUES ('a'), ('b'), ('b'), ('c')")
    made = SQLFormat(database.url, "t", key="id", partitions=1)
    async with AsyncExitStack() as stack:
        shards = await made.shards(stack)
        reader = made.open(shards[0], {"key": "b"}, 9)
        with pytest.raises(DatasetError, match="not unique: 'b' appears twice"):
            await rest_of(reader)
        await reader.aclose()


@pytest.mark.parametrize("collation", ["NOCASE", "RTRIM"])
async def test_collations_that_equate_texts_are_refused(
    sqlite: Database, collation: str
) -> None:
    """Reading cannot resume between equal texts; a query can tell them apart."""
    sqlite.run(f"CREATE TABLE t (id TEXT COLLATE {collation} PRIMARY KEY)")
    sqlite.run("INSERT INTO t VALUES ('a'), ('B'), ('c')")
    words = "the collation of key 'id' equates different texts; make a key in a query"
    with pytest.raises(ValueError, match=words):
        await rows_of(SQLFormat(sqlite.url, "t", key="id", partitions=1))
    query = "SELECT id COLLATE BINARY AS id FROM t WHERE id <> ?"
    made = SQLFormat(sqlite.url, query, key="id", parameters=["x"], partitions=1)
    for count in (1, 2):
        assert [row["id"] for row in await resumed(made, 0, count)] == ["B", "a", "c"]


async def test_keys_may_have_a_postgresql_collation(postgresql: Database) -> None:
    postgresql.run('CREATE TABLE t (id TEXT COLLATE "POSIX")')
    postgresql.run("INSERT INTO t VALUES ('A'), ('a'), ('b')")
    query = "SELECT id FROM t WHERE id <> $1"
    made = SQLFormat(postgresql.url, query, key="id", parameters=["x"], partitions=1)
    assert len(await resumed(made, 0, 1)) == 3


# -- postgreSQL's exact numbers and infinite dates ------------------------------------

# More digits than floats have, and NaN, which Arrow's decimals lack.
EXACT = ["12345678901234567890.123456789", "0.1", "NaN", "9007199254740993", "1e-40"]
INFINITE = [
    ("date", "'infinity'"),
    ("timestamptz", "'-infinity'"),
    ("date[]", "'{2020-01-01,NULL,infinity}'"),
    ("days", "'{2020-01-01,NULL,infinity}'"),
    pytest.param("date", "'-infinity'", marks=pytest.mark.fuzz),
    pytest.param("timestamp", "'infinity'", marks=pytest.mark.fuzz),
    pytest.param("timestamp[]", "'{-infinity}'", marks=pytest.mark.fuzz),
]


def fill_exact(database: Database) -> None:
    rows = ", ".join(
        f"({n}, '{text}', '{{{text},NULL}}', '92233720368547758.07', '{{1.5}}')"
        for n, text in enumerate(EXACT)
    )
    database.run(
        "CREATE TABLE t (id INT PRIMARY KEY, x numeric, xs numeric[], m money, "
        "ms money[])",
        f"INSERT INTO t VALUES {rows}, ({len(EXACT)}, NULL, NULL, NULL, NULL)",
    )


async def values_of(
    database: Database, kind: str, table: str = "t", **options: Any
) -> list[Any]:
    if kind == "keys":
        async with listed(database, table, **options) as rows:
            return await rows.__getitems__(range(len(rows)))
    query = f"SELECT * FROM {table} WHERE id >= $1" if kind == "query" else table
    parameters = (0,) if kind == "query" else ()
    made = SQLFormat(
        database.url, query, key="id", parameters=parameters, partitions=2, **options
    )
    return await rows_of(made)


WAYS = pytest.mark.parametrize("kind", ["ranges", "query", "keys"])


@WAYS
async def test_exact_numbers_keep_their_digits(postgresql: Database, kind: str) -> None:
    """With numeric="float", they become the nearest floats."""
    fill_exact(postgresql)
    rows = await values_of(postgresql, kind)
    expected = [str(decimal.Decimal(text)) for text in EXACT]
    assert [str(row["x"]) for row in rows] == [*expected, "None"]
    assert [str(row["xs"][0]) for row in rows[:-1]] == expected
    assert rows[0]["xs"][1] is None
    assert rows[0]["m"] == decimal.Decimal("92233720368547758.07")
    assert list(rows[0]["ms"]) == [decimal.Decimal("1.5")]
    rows = await values_of(postgresql, kind, numeric="float")
    floats = [row["x"] for row in rows[:-1]]
    np.testing.assert_array_equal(floats, [float(text) for text in EXACT])
    assert float(rows[1]["xs"][0]) == 0.1
    assert float(rows[0]["m"]) == 92233720368547758.07
    assert float(rows[0]["ms"][0]) == 1.5


@pytest.mark.slow
@pytest.mark.one_loop
@WAYS
@pytest.mark.parametrize(("type_", "literal"), INFINITE)
async def test_an_infinite_date_is_an_error(
    postgresql: Database, kind: str, type_: str, literal: str
) -> None:
    postgresql.run(
        "CREATE DOMAIN days AS date[]",
        f"CREATE TABLE t (id INT PRIMARY KEY, n INT, d {type_})",
        f"INSERT INTO t VALUES (6, 60, NULL), (7, 70, {literal}), (8, 80, NULL)",
    )
    words = r"row of .* with id = 7 has an infinite date in column 'd'.*infinity='null'"
    with pytest.raises(DatasetError, match=words):
        for row in await values_of(postgresql, kind):
            if hasattr(row, "error"):
                raise row.error
    rows = await values_of(postgresql, kind, infinity="null")
    assert [row["n"] for row in rows] == [60, 70, 80]
    value = rows[1]["d"]
    if isinstance(value, list):
        assert value[-1] is None
        assert value[:-1] in ([], [dt.date(2020, 1, 1), None])
    else:
        assert value is None


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
    ids = [n async for batch in loader for n in batch.tolist()]
    assert sorted(ids) == [0, 1, 2, 3, 4, 6, 7, 8, 9]


# The type of a column, and a value.
NESTED = {
    "visit": "'(infinity,1)'",
    "visit[]": "'{\"(infinity,1)\"}'",
    "tag": "'(1,4000000000)'",
    "daterange": "'[2020-01-01,infinity]'",
    "days": "'[2020-01-01,infinity]'",
    "span": "'[2020-01-01,infinity]'",
    "tsrange[]": "'{\"[2020-01-01,infinity]\"}'",
    "datemultirange": "'{[2020-01-01,infinity]}'",
    "day[]": "'{infinity}'",
    "pay[]": "'{1.5}'",
    "number[]": "'{4000000000}'",
}


@pytest.mark.slow
@WAYS
async def test_dates_money_and_oids_within_other_types_are_refused(
    postgresql: Database, kind: str
) -> None:
    """Drivers misread some of them; the cast in the error reads text."""
    columns = [f"c{n} {type_}" for n, type_ in enumerate(NESTED)]
    postgresql.run(
        "CREATE DOMAIN day AS date",
        "CREATE DOMAIN pay AS money",
        "CREATE DOMAIN number AS oid",
        "CREATE DOMAIN span AS daterange",
        "CREATE TYPE visit AS (at day, n INT)",
        "CREATE TYPE tag AS (n numeric, o oid)",
        "CREATE TYPE days AS RANGE (subtype = date)",
        f"CREATE TABLE t (id INT PRIMARY KEY, {', '.join(columns)})",
        f"INSERT INTO t VALUES (1, {', '.join(NESTED.values())})",
    )
    casts = []
    for n in range(len(NESTED)):
        words = rf"column 'c{n}' is of type .*; write (CAST\(\"c{n}\" AS TEXT\))"
        with pytest.raises((ValueError, DatasetError), match=words) as refused:
            await values_of(postgresql, kind, columns=[f"c{n}"])
        assert "cannot represent" not in str(refused.value)
        casts += re.findall(words, str(refused.value))
    sql = f"SELECT id, {', '.join(f'{c} AS c{n}' for n, c in enumerate(casts))} FROM t"
    postgresql.run(f"CREATE VIEW v AS {sql}")
    (row,) = await values_of(postgresql, kind, table="v")
    texts = [row["c0"], row["c8"], row["c10"]]
    assert texts == ["(infinity,1)", "{infinity}", "{4000000000}"]


@WAYS
async def test_money_in_a_composite_is_refused(postgresql: Database, kind: str) -> None:
    """Also by asyncpg, which cannot decode such a type."""
    postgresql.run(
        "CREATE TYPE price AS (n INT, m money)",
        "CREATE TABLE t (id INT PRIMARY KEY, p price)",
        "INSERT INTO t VALUES (1, '(1,1.5)')",
    )
    with pytest.raises((ValueError, DatasetError), match=r"price.*CAST\(.*TEXT"):
        await values_of(postgresql, kind)


@WAYS
async def test_numbers_within_other_types_are_exact(
    postgresql: Database, kind: str
) -> None:
    """In composites, ranges and arrays of domains."""
    postgresql.run(
        "CREATE DOMAIN amount AS numeric",
        "CREATE DOMAIN small AS INT",
        "CREATE TYPE spot AS (n INT, x numeric)",
        "CREATE TABLE t (id INT PRIMARY KEY, a amount[], s small[], point spot, "
        "span int4range)",
        "INSERT INTO t VALUES (1, '{1.10,NaN}', '{3}', '(3,0.1)', '[1,5)')",
    )
    (row,) = await values_of(postgresql, kind, numeric="float", columns=["a"])
    assert row["a"][0] == 1.1
    (row,) = await values_of(postgresql, kind)
    assert [*map(repr, row["a"])] == ["Decimal('1.10')", "Decimal('NaN')"]
    assert [*row["s"]] == [3]
    assert {**row["point"]} == {"n": 3, "x": decimal.Decimal("0.1")}
    assert row["span"] == asyncpg.Range(1, 5) if kind == "keys" else "[1,5)"
