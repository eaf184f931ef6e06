"""Parquet: pyarrow's rows, from any row on, and filters; damage is an error."""

import asyncio
import base64
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import compute as pc
from pyarrow import parquet as pq
from pyarrow.parquet import encryption

from aioloader.datasets import ParquetDataset, write_parquet
from aioloader.datasets._arrow import files
from aioloader.datasets._arrow.parquet import ParquetFormat
from aioloader.datasets._arrow.ranges import FetchedRanges
from aioloader.errors import DatasetError, TruncatedReadError
from datasets.shards import check_resumes, put, read
from datasets.tables import (
    PLACES,
    Local,
    contents,
    expected,
    flip,
    outcome,
    plain,
    read_all,
    read_shard,
    shards,
    write,
)


@pytest.fixture
def numbered(tmp_path: Path) -> str:
    table = pa.table({"n": range(50), "text": [f"{n}" for n in range(50)]})
    return write(tmp_path / "numbered.parquet", table)


# -- what is read ------------------------------------------------------------------


async def test_the_first_row_group_decides_the_columns(tmp_path: Path) -> None:
    """All of its rows do, not only the first one."""
    schema = pa.schema({"a": pa.int16(), "b": pa.list_(pa.float32())})
    await write_parquet([{"a": 1}, {"b": "x"}], tmp_path / "found")
    rows = pq.read_table(tmp_path / "found/part-000000.parquet").to_pylist()
    assert rows == [{"a": 1, "b": None}, {"a": None, "b": "x"}]
    written: list[Any] = [{"a": 1}, {"b": np.ones(2, np.float32)}]
    await write_parquet(written, tmp_path / "given", schema=schema)
    assert pq.read_schema(tmp_path / "given/part-000000.parquet").equals(schema)


# -- columns -----------------------------------------------------------------------


async def test_only_wanted_bytes_are_requested(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    columns = {name: noise.random(100_000) for name in "abc"}
    path = write(tmp_path / "a.parquet", pa.table(columns), rows=100_000)
    local = Local(is_remote=True)
    made = ParquetFormat(path, local, columns=["c", "a"])
    assert len(await read_all(made, budget=1 << 22, limit=5000)) == 100_000
    group = pq.read_metadata(path).row_group(0)
    chunks = [group.column(i) for i in (0, 2)]
    wanted = sorted(
        (chunk.dictionary_page_offset, chunk.dictionary_page_offset
         + chunk.total_compressed_size) for chunk in chunks
    )  # fmt: skip
    spans = sorted(local.spans[1:])
    assert spans[0][0] == wanted[0][0]
    assert spans[-1][1] == wanted[1][1]
    assert sum(stop - start for start, stop in spans) == sum(b - a for a, b in wanted)


async def test_other_files_may_have_more_columns(numbered: str, tmp_path: Path) -> None:
    table = pa.table({"more": [0.5], "text": ["last"], "n": [50]})
    wider = write(tmp_path / "more.parquet", table)
    with pytest.warns(UserWarning, match=r"more.parquet' has columns \['more'\] that"):
        rows = await read_all(ParquetFormat([numbered, wider], Local()))
    assert plain(rows[-1]) == {"n": 50, "text": "last"}
    named = ParquetFormat([numbered, wider], Local(), columns=["n"])
    assert plain((await read_all(named))[-1]) == {"n": 50}


async def test_wrong_columns_are_errors(numbered: str) -> None:
    for columns in ([], ["n", "n"]):
        with pytest.raises(ValueError, match="distinct names"):
            ParquetFormat(numbered, Local(), columns=columns)
    with pytest.raises(TypeError, match="must be a list of names, got 'n'"):
        ParquetFormat(numbered, Local(), columns="n")
    with pytest.raises(ValueError, match=r"nulls= names \['x'\], not in columns"):
        ParquetFormat(numbered, Local(), columns=["n"], nulls={"x": 0})
    with pytest.raises(DatasetError, match="has no column 'x'; its columns are 'n', '"):
        await shards(ParquetFormat(numbered, Local(), nulls={"x": 0}))
    with pytest.raises(ValueError, match=r"nulls=\{'n': 'a'\} does not fit.*int64"):
        await shards(ParquetFormat(numbered, Local(), nulls={"n": "a"}))


# -- reading ahead -----------------------------------------------------------------


async def test_failed_and_short_requests_are_raised(numbered: str) -> None:
    """The store's error is raised, not pyarrow's."""
    for name, error in (("fail_at", DatasetError), ("short_at", TruncatedReadError)):
        local = Local(is_remote=True)
        setattr(local, name, 1)
        made = ParquetFormat(numbered, local)
        with pytest.raises(error, match=r"on fire|gave .* bytes from byte"):
            await read_shard(made, (numbered, 0))
        assert len(await read_shard(made, (numbered, 0))) == 20


async def test_closing_ends_requests_and_threads(numbered: str) -> None:
    local = Local(is_remote=True)
    made = ParquetFormat(numbered, local)
    await shards(made)
    local.gate = asyncio.Event()
    reader = made.open((numbered, 0), {}, 1 << 20)
    reader.begin()
    await local.entered.wait()
    pull = asyncio.create_task(reader.pull(1))
    await asyncio.sleep(0)
    pull.cancel()
    await asyncio.wait([pull])
    await reader.aclose()
    assert local.in_flight == 0
    await reader.aclose()


def test_reading_after_the_loop_has_closed_is_an_error() -> None:
    async def read(_start: int, _stop: int) -> bytes:
        return b""

    async def begin() -> None:
        ranges.begin()

    ranges = FetchedRanges(read, 9, [], budget=10, location="there")
    asyncio.run(begin())
    with pytest.raises(DatasetError, match="event loop is closed"):
        ranges.read(0, 9)


async def test_a_footer_is_read_once_for_its_row_groups(
    numbered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = Local(is_remote=True)
    made = ParquetFormat([numbered, numbered + "2"], local)
    put(numbered + "2", contents(numbered))
    assert len(await read_all(made)) == 100
    assert len(local.spans) == 2 + 6
    monkeypatch.setattr(files, "_CACHE_BYTES", 1)
    local.spans.clear()
    assert len(await read_all(made)) == 100
    assert len(local.spans) == 2 + 6 + 2
    assert local.closed == 2


# -- damage ------------------------------------------------------------------------


@PLACES
async def test_damage_names_its_row_group(is_remote: bool, numbered: str) -> None:
    chunk = pq.read_metadata(numbered).row_group(1).column(0)
    flip(numbered, chunk.dictionary_page_offset + chunk.total_compressed_size - 1)
    made = ParquetFormat(numbered, Local(is_remote=is_remote))
    assert len(await read_shard(made, (numbered, 0))) == 20
    text = r"row group 1 of 'numbered\.parquet' cannot be read, from row 0 on: .*CRC"
    with pytest.raises(DatasetError, match=text):
        await read_shard(made, (numbered, 1))
    assert len(await read_shard(made, (numbered, 2))) == 10


async def test_a_missing_row_group_is_an_error(numbered: str) -> None:
    made = ParquetFormat(numbered, Local())
    with pytest.raises(DatasetError, match="has 3 row groups, number 3 is wanted"):
        await read_shard(made, (numbered, 3))


@pytest.mark.slow
async def test_a_damaged_footer_does_not_end_the_process(tmp_path: Path) -> None:
    """pyarrow does not catch exceptions of C++ when asked for single columns."""
    path = write(tmp_path / "a.parquet", pa.table({"n": [[1], [2, 3]]}))
    whole = contents(path)
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    errors = []
    for i in range(footer + 14, footer + 40):  # where the schema says what is nested
        for bit in range(8):
            put(path, whole)
            flip(path, i, bit)
            result = await outcome(path, Local())
            errors += [str(result)] if isinstance(result, DatasetError) else []
    assert any("row group 0 of 'a.parquet' has a footer that" in e for e in errors)


async def test_row_groups_next_to_a_damaged_one_are_read(tmp_path: Path) -> None:
    """If the footer is damaged only in the part about one of them."""
    path = write(tmp_path / "a.parquet", pa.table({"n": range(50)}))
    whole = contents(path)
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    lengths: list[Any] = []
    for place in range(footer + 164, footer + 172):  # where the second one's column is
        put(path, whole)
        flip(path, place, 5)
        made = ParquetFormat(path, Local())
        results = [await length_of(made, (path, number)) for number in range(3)]
        lengths += [results] if "has a footer that" in str(results[1]) else []
    assert [20, 10] in [[first, last] for first, _, last in lengths]


async def length_of(made: ParquetFormat, shard: Any) -> int | str:
    try:
        return len(await read_shard(made, shard))
    except DatasetError as error:
        return str(error)


async def test_a_metadata_file_is_an_error(numbered: str, tmp_path: Path) -> None:
    """A ``_metadata`` file has only the columns of other files."""
    metadata = pq.read_metadata(numbered)
    metadata.set_file_path("numbered.parquet")
    path = tmp_path / "_metadata.parquet"
    metadata.write_metadata_file(path)
    error = await outcome(path, Local())
    assert isinstance(error, DatasetError)
    assert "has columns in other files: 'numbered.parquet'" in str(error)


# -- small row groups, which are decoded together -------------------------------------

GROUPS, ROWS = 40, 50


@pytest.fixture
def small(tmp_path: Path) -> str:
    table = pa.table({"n": range(GROUPS * ROWS), "m": np.random.rand(GROUPS * ROWS)})
    return write(tmp_path / "small.parquet", table, rows=ROWS)


async def test_only_the_damaged_row_group_is_lost(small: str) -> None:
    chunk = pq.read_metadata(small).row_group(7).column(1)
    data = bytearray(contents(small))
    data[chunk.dictionary_page_offset + chunk.total_compressed_size - 8] ^= 255
    put(small, data)
    rows, _ = await read(ParquetDataset(small), errors=DatasetError)
    assert "row group 7" in str(rows.pop(7 * ROWS))
    lost = range(7 * ROWS, 8 * ROWS)
    assert [row["n"] for row in rows] == [
        n for n in range(GROUPS * ROWS) if n not in lost
    ]


# -- filters: row groups are skipped by statistics -------------------------------------

N = pc.field("n")


@pytest.fixture
def hundred(tmp_path: Path) -> str:
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
async def test_filters_keep_the_rows_that_pyarrow_keeps(
    filters: Any, groups: list[int], is_remote: bool, hundred: str
) -> None:
    for columns in (None, ["text"]):
        made = ParquetFormat(
            hundred, Local(is_remote=is_remote), columns=columns, filters=filters
        )
        assert [n for _, n in await shards(made)] == (groups or [0])
        table = pq.read_table(hundred, columns=columns, filters=filters)
        rows = await read_all(made)
        assert plain(rows) == expected(table)


async def test_skipped_row_groups_are_no_shards(hundred: str) -> None:
    local = Local(is_remote=True)
    made = ParquetFormat(hundred, local, filters=N >= 80)
    assert await shards(made) == [[hundred, 4]]


@pytest.mark.slow
async def test_a_filtered_stream_resumes_after_any_row(hundred: str) -> None:
    made = ParquetDataset(
        hundred, filters=[("text", "!=", "5")], shuffle=True, interleave=3
    )
    whole, _ = await read(made)
    assert {row["n"] for row in whole} == {
        n for n in range(100) if n % 7 != 5 and n % 10 != 3
    }
    await check_resumes(made, whole, range(0, len(whole), 7))


async def test_filters_may_leave_no_rows(hundred: str) -> None:
    made = ParquetDataset(hundred, filters=N < 0)
    assert (await read(made))[0] == []
    for rank in range(5):
        assert (await read(made.shard(rank, 5)))[0] == []


async def test_remaining_row_groups_are_cut_for_readers(hundred: str) -> None:
    """Each reader gets rows, although fewer row groups remain than readers."""
    made = ParquetDataset(hundred, filters=N >= 60)  # two row groups of five
    parts = [(await read(made.shard(rank, 4)))[0] for rank in range(4)]
    numbers = [[row["n"] for row in part] for part in parts]
    assert sum(numbers, []) == [*range(60, 100)]  # noqa: RUF017
    assert min(map(len, numbers)) > 0


async def test_filters_compare_unified_types(tmp_path: Path) -> None:
    """Statistics of another type skip nothing."""
    paths = [
        write(tmp_path / f"{i}.parquet", pa.table({"n": column, "id": [i, i]}))
        for i, column in enumerate(
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


async def test_filters_of_missing_columns_need_a_schema(tmp_path: Path) -> None:
    a = write(tmp_path / "a.parquet", pa.table({"n": [1, 2], "id": [0, 1]}))
    b = write(tmp_path / "b.parquet", pa.table({"id": [2, 3]}))
    with pytest.raises(DatasetError, match=r"'b\.parquet' has no column 'n'"):
        await shards(ParquetFormat([a, b], Local(), columns=["id"], filters=N > 1))
    schema = pa.schema([("id", pa.int64()), ("n", pa.int64())])
    made = ParquetFormat([a, b], Local(), schema=schema, filters=N.is_null() | (N > 1))
    assert [row["id"] for row in await read_all(made)] == [1, 2, 3]


async def test_nulls_are_replaced_after_the_filter(hundred: str) -> None:
    filters = pc.field("text").is_null()
    made = ParquetFormat(
        hundred, Local(), columns=["text"], nulls={"text": ""}, filters=filters
    )
    assert await read_all(made) == [{"text": ""}] * 10


async def test_damaged_text_fails_alone_when_filtering(tmp_path: Path) -> None:
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


def test_descriptions_hold_whole_lists_of_filters() -> None:
    """pyarrow shortens them in its repr; sets are sorted."""
    values = [*range(100)]
    changed = [*range(50), 777, *range(51, 100)]
    first, second, third = (
        ParquetDataset("x", filters=filters).describe()["filters"]
        for filters in (
            pc.field("n").isin(values),
            pc.field("n").isin(changed),
            pc.field("n").isin(list(values)),
        )
    )
    assert first != second
    assert first == third
    words: list[Any] = [{"b", "a", "c"}, frozenset(("c", "b", "a")), ["a", "b", "c"]]
    shown = [ParquetDataset("x", filters=[("s", "in", w)]).describe() for w in words]
    assert shown[0]["filters"] == shown[1]["filters"] == shown[2]["filters"]


async def test_filters_that_do_not_fit_the_columns_fail(hundred: str) -> None:
    for filters in ([("z", ">", 1)], [("text", ">", 1)]):
        with pytest.raises(ValueError, match=r"filters=.* do not fit the columns n, t"):
            await shards(ParquetFormat(hundred, Local(), filters=filters))


class Keys(encryption.KmsClient):  # type: ignore[misc]
    def wrap_key(self, key: bytes, _name: str) -> bytes:
        return base64.b64encode(key)


async def test_encrypted_columns_are_reported_as_such(tmp_path: Path) -> None:
    """Other columns can be read; a filter on them does not crash the process."""
    factory = encryption.CryptoFactory(lambda _: Keys())
    how = encryption.EncryptionConfiguration("f", column_keys={"k": ["b"]})
    how.plaintext_footer, how.double_wrapping = True, False
    keys = factory.file_encryption_properties(encryption.KmsConnectionConfig(), how)
    table = pa.table({"a": [1], "b": [2]})
    pq.write_table(table, tmp_path / "a.parquet", encryption_properties=keys)
    stream: Any = ParquetDataset("a.parquet", ["a"], store=tmp_path)
    assert (await read(stream))[0] == [{"a": 1}]
    with pytest.raises(DatasetError, match=r"has encrypted columns: .*decrypt it f"):
        await read(ParquetDataset(f"{tmp_path}/*", filters=[("b", "==", 2)]))
