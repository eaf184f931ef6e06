"""Filters: row groups are skipped by statistics, and rows are what pyarrow reads."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import compute as pc
from pyarrow import parquet as pq

from aioloader.datasets import ParquetDataset
from aioloader.datasets._arrow.filters import Filters
from aioloader.datasets._arrow.parquet import ParquetFormat
from aioloader.errors import DatasetError
from datasets.shards import check_resumes, read
from datasets.tables import (
    Local,
    contents,
    expected,
    plain,
    put,
    read_all,
    read_shard,
    shards,
    write,
)

N = pc.field("n")


@pytest.fixture
def numbered(tmp_path: Path) -> str:
    table = pa.table(
        {
            "n": range(100),
            "text": [None if n % 10 == 3 else f"{n % 7}" for n in range(100)],
            "s": [{"a": n} for n in range(100)],
            "x": np.arange(100) / 4,
        }
    )
    return write(tmp_path / "numbered.parquet", table)


@pytest.mark.slow
@pytest.mark.parametrize("is_remote", [False, True], ids=["file", "object"])
@pytest.mark.parametrize(("filters", "groups"), [
    ([("n", ">=", 55)], [2, 3, 4]),
    ([[("n", "<", 3)], [("x", ">", 24.0)]], [0, 4]),
    (N.isin([5, 45]), [0, 2]),
    (pc.field("s", "a") > 70, [3, 4]),
    ([("text", "==", "5")], [0, 1, 2, 3, 4]),
    (pc.field("text").is_null() & (N < 30), [0, 1]),
    ((N + 1) * 2 == 84, [0, 1, 2, 3, 4]),
    ([("n", "in", {-1, 1000})], []),
])  # fmt: skip
async def test_reads_what_pyarrow_reads(
    filters: Any, groups: list[int], is_remote: bool, numbered: str
) -> None:
    for columns in (None, ["text"]):
        made = ParquetFormat(
            numbered, Local(is_remote=is_remote), columns=columns, filters=filters
        )
        assert [n for _, n, *void in await shards(made) if not void] == groups
        table = pq.read_table(numbered, columns=columns, filters=filters)
        rows = await read_all(made)
        assert plain(rows) == expected(table)


async def test_what_is_skipped_is_not_requested(numbered: str) -> None:
    """Its footer apart; and it stays a shard, after those that are read."""
    local = Local(is_remote=True)
    made = ParquetFormat(numbered, local, filters=N >= 80)
    found = await shards(made)
    assert found[0] == [numbered, 4]
    assert found[1:] == [[numbered, n, "skipped"] for n in range(4)]
    count = len(local.spans)
    assert await read_shard(made, found[2]) == []
    assert len(local.spans) == count


@pytest.mark.slow
async def test_a_stream_goes_on_where_it_was(numbered: str) -> None:
    made = ParquetDataset(
        numbered, filters=[("text", "!=", "5")], shuffle=True, interleave=3
    )
    whole, _ = await read(made)
    assert {row["n"] for row in whole} == {
        n for n in range(100) if n % 7 != 5 and n % 10 != 3
    }
    await check_resumes(made, whole, range(0, len(whole), 7))


async def test_nothing_is_left(numbered: str) -> None:
    made = ParquetDataset(numbered, filters=N < 0)
    assert (await read(made))[0] == []
    for rank in range(5):
        assert (await read(made.shard(rank, 5)))[0] == []


async def test_what_is_left_is_cut(numbered: str) -> None:
    """Each reader has some, where more shards than readers have nothing."""
    made = ParquetDataset(numbered, filters=N >= 60)  # two row groups of five
    parts = [(await read(made.shard(rank, 4)))[0] for rank in range(4)]
    found = [[row["n"] for row in part] for part in parts]
    assert sum(found, []) == [*range(60, 100)]  # noqa: RUF017
    assert min(map(len, found)) > 0


async def test_files_whose_types_differ(tmp_path: Path) -> None:
    """Statistics of another type are no reason to skip; rows are compared unified."""
    paths = [
        write(tmp_path / f"{at}.parquet", pa.table({"n": column, "id": [at, at]}))
        for at, column in enumerate(
            [
                pa.array([1, 5], pa.int32()),
                pa.array([2.5, 7.5]),
                pa.nulls(2),
                pa.array([300, 5], pa.int64()),
            ]
        )
    ]
    for filters in ([("n", ">", 4)], N.is_null() | (N == 5)):
        made = ParquetFormat(paths, Local(), filters=filters)
        table = pa.concat_tables(
            map(pq.read_table, paths), promote_options="permissive"
        )
        kept = table.filter(filters if isinstance(filters, pc.Expression) else N > 4)
        assert plain(await read_all(made)) == kept.to_pylist()


async def test_a_filter_of_a_column_that_a_file_lacks(tmp_path: Path) -> None:
    a = write(tmp_path / "a.parquet", pa.table({"n": [1, 2], "id": [0, 1]}))
    b = write(tmp_path / "b.parquet", pa.table({"id": [2, 3]}))
    with pytest.raises(DatasetError, match=r"'b\.parquet' has no column 'n'"):
        await shards(ParquetFormat([a, b], Local(), columns=["id"], filters=N > 1))
    schema = pa.schema([("id", pa.int64()), ("n", pa.int64())])
    made = ParquetFormat([a, b], Local(), schema=schema, filters=N.is_null() | (N > 1))
    assert [row["id"] for row in await read_all(made)] == [1, 2, 3]


async def test_nulls_are_replaced_after_the_filter(numbered: str) -> None:
    filters = pc.field("text").is_null()
    made = ParquetFormat(
        numbered, Local(), columns=["text"], nulls={"text": ""}, filters=filters
    )
    assert await read_all(made) == [{"text": ""}] * 10


async def test_damaged_text_among_filtered_rows(tmp_path: Path) -> None:
    table = pa.table({"n": range(6), "s": ["aa", "bb", "cc", "dd", "ee", "ff"]})
    path = write(tmp_path / "a.parquet", table, use_dictionary=False,
                 compression="none", write_page_checksum=False)  # fmt: skip
    put(path, contents(path).replace(b"cc", b"\xff\xff", 1))
    made = ParquetFormat(path, Local(), filters=N != 4)
    rows: list[Any] = await read_all(made)
    assert [getattr(row, "error", None) is None for row in rows] == [
        True, True, False, True, True,
    ]  # fmt: skip
    assert "row 2" in str(rows[2].error)


def test_a_state_is_bound_to_all_of_a_long_list() -> None:
    """pyarrow shows its ends; and sets have no order."""
    values = [*range(100)]
    others = [*range(50), 777, *range(51, 100)]
    first, second, third = (
        ParquetDataset("x", filters=filters).describe()["filters"]
        for filters in (
            pc.field("n").isin(values),
            pc.field("n").isin(others),
            pc.field("n").isin(list(values)),
        )
    )
    assert first != second
    assert first == third
    words = [{"b", "a", "c"}, frozenset(("c", "b", "a"))]
    shown = [Filters([("s", "in", one)]).describe() for one in words]
    assert shown[0] == shown[1] == Filters([("s", "in", ["a", "b", "c"])]).describe()


def test_wrong_filters_are_errors() -> None:
    for filters in ([], "n > 1", [("n", ">")], [("n", "~", 1)]):
        with pytest.raises(
            ValueError, match="filters must be an expression of pyarrow"
        ):
            ParquetDataset("x", filters=filters)


async def test_filters_that_do_not_suit(numbered: str) -> None:
    for filters in ([("z", ">", 1)], [("text", ">", 1)]):
        with pytest.raises(ValueError, match=r"filters=.* do not fit the columns n, t"):
            await shards(ParquetFormat(numbered, Local(), filters=filters))


TERMS = st.tuples(
    st.sampled_from(["n", "x", "text"]),
    st.sampled_from(["==", "!=", "<", ">", "<=", ">="]),
    st.integers(-1, 101),
).map(lambda t: (t[0], t[1], str(t[2]) if t[0] == "text" else t[2]))


@pytest.mark.fuzz
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(TERMS, min_size=1, max_size=3), min_size=1, max_size=3))
async def test_any_filters(numbered: str, filters: Any) -> None:
    made = ParquetFormat(numbered, Local(), filters=filters)
    table = pq.read_table(numbered, filters=filters)
    assert plain(await read_all(made)) == expected(table)
