"""Rows of a table: rows and columns collate alike, and only batches are copies."""

import datetime
import decimal
import gc
import pickle
import uuid
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aioloader._base.blocks import Columns, interleave, join, pick
from aioloader._collate.collate import collated, default_collate
from aioloader._transport.slots import SlotPool
from aioloader.datasets._arrow.rows import Rows
from datasets.tables import assert_same, every_type, expected, plain, rows_of

# Before 20, pyarrow makes them only of numpy's numbers.
HALVES = [pa.float16()] if int(pa.__version__.split(".")[0]) >= 20 else []
WIDTHS = [
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float32", "float64"),
]
DAY = datetime.date(2024, 2, 29)
MOMENT = datetime.datetime(2024, 2, 29, 12, 30, 0, 5)
UTC = MOMENT.replace(tzinfo=datetime.UTC)
KEY = uuid.UUID(int=7)


# -- the law: rows and columns collate alike ---------------------------------------


def numbers(kind: Any) -> st.SearchStrategy[Any]:
    if pa.types.is_boolean(kind):
        return st.booleans()
    if pa.types.is_floating(kind):
        return st.floats(width=kind.bit_width)
    low = -(2 ** (kind.bit_width - 1)) if str(kind).startswith("i") else 0
    high = 2 ** (kind.bit_width - (1 if low else 0)) - 1
    return st.integers(low, high)


NUMBERS = st.sampled_from([
    *map(pa.type_for_alias, [*WIDTHS, "bool"]), *HALVES
])  # fmt: skip


def structs(
    fields: list[tuple[Any, st.SearchStrategy[Any]]],
) -> tuple[Any, st.SearchStrategy[Any]]:
    names = [f"f{i}" for i in range(len(fields))]
    kinds, values = zip(*fields, strict=True)
    kind = pa.struct(list(zip(names, kinds, strict=True)))
    return kind, st.fixed_dictionaries(dict(zip(names, values, strict=True)))


@st.composite
def columns(draw: st.DrawFn, depth: int = 0) -> tuple[Any, st.SearchStrategy[Any]]:
    if depth < 2 and draw(st.booleans()):
        fields = st.lists(columns(depth + 1), min_size=1, max_size=3)
        return structs(draw(fields))
    number, length, height = draw(NUMBERS), *draw(st.tuples(*[st.integers(0, 3)] * 2))
    value = numbers(number)
    alike = st.lists(value, min_size=length, max_size=length)
    table = st.lists(alike, min_size=height, max_size=height)
    kinds = [
        (number, value),
        (pa.list_(number, length), alike),
        (pa.list_(number), alike),
        (pa.large_list(number), alike),
        (pa.list_(pa.list_(number)), table),
        (pa.list_(pa.list_(number, length)), table),
        *[(text(), st.text(max_size=5)) for text in (pa.string, pa.string_view)],
        *[(data(), st.binary(max_size=5)) for data in (pa.binary, pa.large_binary)],
    ]
    chosen: tuple[Any, st.SearchStrategy[Any]] = draw(st.sampled_from(kinds))
    return chosen


@st.composite
def batches(draw: st.DrawFn) -> pa.RecordBatch:
    length = draw(st.integers(1, 6))
    made = {}
    for name in draw(st.sets(st.sampled_from("abcd"), min_size=1)):
        kind, values = draw(columns())
        chosen = draw(st.lists(values, min_size=length, max_size=length))
        made[name] = pa.array(chosen, kind)
    return pa.record_batch(made)


@pytest.mark.slow
@given(batches(), st.data())
def test_rows_and_columns_collate_alike(batch: pa.RecordBatch, data: Any) -> None:
    rows = Rows(batch)
    start = data.draw(st.integers(0, len(rows) - 1))
    stop = data.draw(st.integers(start + 1, len(rows)))
    places = st.lists(st.integers(0, stop - start - 1), min_size=1, max_size=8)
    chosen = data.draw(places)
    expected = [list(rows)[start:stop][place] for place in chosen]

    cut = rows[start:stop]
    assert isinstance(cut, Rows)
    picked = cut.pick(chosen)
    joined = rows[start:start].joined([cut, cut])
    assert joined is not None
    several = joined.pick([place + len(cut) * (place % 2) for place in chosen])
    sent = pickle.loads(pickle.dumps(several, protocol=5))
    for block in (picked, several, sent, expected):
        assert_same(list(block), expected)
        assert_same(default_collate(block), default_collate(expected))
    assert_same([joined[place] for place in chosen], expected)


@pytest.mark.parametrize("width", [*WIDTHS, "bool", "halffloat"])
def test_numbers_keep_their_width(width: str) -> None:
    kind = pa.float16() if width == "halffloat" else pa.type_for_alias(width)
    rows = rows_of(kind, np.array([0, 1, 1], kind.to_pandas_dtype()))
    batch = rows.collate()["x"]
    assert batch.numpy().dtype == rows[1]["x"].dtype == kind.to_pandas_dtype()
    assert batch.tolist() == [0, 1, 1]


def test_fixed_lists_and_tensors_keep_their_shape() -> None:
    """Also a tensor with permuted dimensions."""
    values = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(values)
    kind = pa.fixed_shape_tensor(pa.int16(), [3, 4], permutation=[1, 0])
    turned = pa.ExtensionArray.from_storage(kind, tensors.storage)
    rows = Rows(pa.record_batch({"x": tensors, "y": turned}))[1:]
    assert rows.collate()["x"].tolist() == values[1:].tolist()
    assert rows.collate()["y"].tolist() == values[1:].transpose(0, 2, 1).tolist()
    assert rows[0]["y"].tolist() == values[1].T.tolist()
    assert turned.to_numpy_ndarray()[1].tolist() == values[1].T.tolist()


def test_encoded_columns_are_read_as_plain_ones() -> None:
    plain = pa.array(["a", "b", "b", "a"])
    columns = {
        "dictionary": plain.dictionary_encode(),
        "number": pa.array([1, 2, 2, 1], pa.int16()).dictionary_encode(),
        "runs": pa.RunEndEncodedArray.from_arrays([1, 3, 4], ["a", "b", "a"]),
        "view": plain.cast(pa.string_view()),
        "bytes": pa.array([b"a", b"b", b"b", b"a"], pa.binary_view()),
        "bool": pa.ExtensionArray.from_storage(
            pa.bool8(), pa.array([1, 0, 2, 1], pa.int8())
        ),
    }
    rows = Rows(pa.table(columns))
    texts = dict.fromkeys(["dictionary", "runs", "view"], "a")
    assert rows[-1] == {**texts, "number": 1, "bytes": b"a", "bool": True}
    batch = rows[1:].pick([2, 0]).collate()
    assert batch["dictionary"] == batch["runs"] == batch["view"] == ["a", "b"]
    assert batch["number"].dtype is torch.int16
    assert batch["bool"].tolist() == [True, False]


# -- what has no tensor form -------------------------------------------------------

KEPT: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "date": (pa.date32(), [DAY, None], [DAY, None]),
    "date64": (pa.date64(), [DAY, None], [DAY, None]),
    "time": (pa.time64("us"), [datetime.time(1, 2, 3, 4)], [datetime.time(1, 2, 3, 4)]),
    "moment": (pa.timestamp("us"), [MOMENT, None], [MOMENT, None]),
    "zone": (pa.timestamp("us", "UTC"), [UTC], [UTC]),
    "span": (pa.duration("ms"), [datetime.timedelta(1)], [datetime.timedelta(1)]),
    "midnight": (pa.time32("s"), [86_400, None], [np.timedelta64(86_400, "s"), None]),
    "nanos": (pa.timestamp("ns"), [5, None], [np.datetime64(5, "ns"), None]),
    "nanospan": (pa.duration("ns"), [5, None], [np.timedelta64(5, "ns"), None]),
    "nanotime": (pa.time64("ns"), [1001], [np.timedelta64(1001, "ns")]),
    "decimal": (
        pa.decimal128(9, 2),
        [decimal.Decimal("1.50")],
        [decimal.Decimal("1.5")],
    ),
    "uuid": (pa.uuid(), [KEY.bytes, None], [KEY, None]),
    "texts": (pa.list_(pa.string()), [["a", "b"], None, []], [["a", "b"], None, []]),
    "map": (pa.map_(pa.string(), pa.int8()), [[("a", 1)]], [[("a", 1)]]),
    "interval": (pa.month_day_nano_interval(), [(1, 2, 3)], [(1, 2, 3)]),
    "text": (pa.string(), ["a", None], ["a", None]),
    "nothing": (pa.null(), [None, None], [None, None]),
    "structs": (
        pa.list_(pa.struct([("day", pa.date32())])),
        [[{"day": DAY}, None]],
        [[{"day": DAY}, None]],
    ),
}


if hasattr(pa, "json_"):  # from 19 on
    KEPT["json"] = pa.json_(), ['{"a":1}', None], ['{"a":1}', None]


@pytest.mark.parametrize("name", KEPT)
def test_values_without_a_tensor_form_are_kept(name: str) -> None:
    kind, values, expected = KEPT[name]
    rows = rows_of(kind, values)
    assert [row["x"] for row in rows] == expected
    sent = pickle.loads(pickle.dumps(rows[::-1]))
    assert sent.collate() == {"x": expected[::-1]}


def test_ragged_lists_become_one_tensor_per_row() -> None:
    """Iterating gives the same, when the lengths happen to agree."""
    rows = rows_of(pa.list_(pa.int32()), [[1, 2], [], [3]])
    batch = rows.collate()["x"]
    assert [row.tolist() for row in batch] == [[1, 2], [], [3]]
    assert {row.dtype for row in batch} == {torch.int32}
    nested = rows_of(pa.list_(pa.list_(pa.int32())), [[[1], [2]], [[1], [2, 3]], []])
    batch = nested.collate()["x"]
    assert batch[0].tolist() == [[1], [2]]
    assert [row.tolist() for row in batch[1]] == [[1], [2, 3]]
    assert batch[2].shape == (0, 0)


def test_times_outside_of_pythons_range_are_numpys() -> None:
    """They fail neither the row nor the batch, and are exact."""
    far = 10**13
    for kind, exact in (
        (pa.timestamp("s"), np.datetime64(far, "s")),
        (pa.timestamp("s", "UTC"), np.datetime64(far, "s")),
        (pa.timestamp("s", "no such zone"), np.datetime64(far, "s")),
        (pa.duration("ms"), np.timedelta64(10**18, "ms")),
        (pa.date64(), np.datetime64(86_400_000 * 10**9, "ms")),
    ):
        value = int(exact.astype(np.int64))
        rows = rows_of(None, pa.array([0, value, None]).view(kind))
        near, exotic, null = rows.collate()["x"]
        assert isinstance(near, (datetime.date, datetime.timedelta, np.datetime64))
        assert exotic == exact
        assert type(exotic) is type(exact)
        assert null is None


# -- NULL --------------------------------------------------------------------------

HOLES: dict[str, tuple[Any, list[Any], int]] = {
    "int": (pa.int64(), [1, 2, None], 2),
    "bool": (pa.bool_(), [True, None], 1),
    "fixed": (pa.list_(pa.int8(), 2), [[1, 2], None], 1),
    "inside fixed": (pa.list_(pa.int8(), 2), [[1, 2], [1, None]], 1),
    "list": (pa.list_(pa.int8()), [[1, 2], None], 1),
    "inside": (pa.list_(pa.int8()), [[1, 2], [1, 2], [1, None]], 2),
    "inside ragged": (pa.list_(pa.int8()), [[1, 2], [None]], 1),
    "inside both": (pa.list_(pa.list_(pa.int8())), [[[1]], [[None]]], 1),
    "struct": (pa.struct([("a", pa.int8())]), [{"a": 1}, None], 1),
    "dictionary": (pa.dictionary(pa.int8(), pa.int64()), [1, None], 1),
}


@pytest.mark.parametrize("name", HOLES)
def test_a_null_in_a_tensor_is_an_error_that_names_the_row(name: str) -> None:
    kind, values, place = HOLES[name]
    rows = rows_of(kind, values)
    value = [row["x"] for row in rows][place]
    assert value is None or None in np.ravel(value).tolist()
    text = rf"column 'x' has a NULL in row {place} of this batch of {len(rows)}.*filter"
    with pytest.raises(TypeError, match=text):
        default_collate(rows)
    for part in (rows[place:], rows.pick([place])):
        with pytest.raises(TypeError, match="NULL in row 0 of this batch of 1"):
            part.collate()
    for part in (rows[:place], rows.pick([0, 0])):
        assert_same(part.collate(), default_collate(list(part)))


def test_a_null_in_a_struct_names_the_field() -> None:
    kind = pa.struct([("a", pa.int8()), ("b", pa.string())])
    rows = rows_of(kind, [{"a": 1, "b": None}, {"a": None, "b": "t"}])
    assert rows[0] == {"x": {"a": 1, "b": None}}
    with pytest.raises(TypeError, match=r"column 'x\.a' has a NULL in row 1"):
        rows.collate()
    assert rows[:1].collate()["x"]["b"] == [None]


# -- a block -----------------------------------------------------------------------


def test_rows_are_a_block_of_samples() -> None:
    rows = Rows(pa.table({"a": range(10), "b": list("abcdefghij")}))
    assert isinstance(rows, Columns)
    assert (len(rows), len(rows[3:5]), len(rows[5:3]), len(rows[20:])) == (10, 2, 0, 0)
    assert rows[np.int64(3)] == rows[-7] == {"a": 3, "b": "d"}
    assert [row["a"] for row in rows[8:1:-3]] == [8, 5, 2]
    assert repr(rows) == "<10 rows of a, b>"
    blocks = join([rows[7:], [], rows[:1]])
    assert isinstance(blocks, Rows)
    assert [row["a"] for row in pick(blocks, [3, 0])] == [0, 7]
    for index in (10, -11):
        with pytest.raises(IndexError, match=f"index {index} is out of range for 10"):
            rows[index]
    for places in ([10], [-1]):
        with pytest.raises(IndexError, match=r"range\(10\)"):
            rows.pick(places)


def test_rows_of_other_columns_do_not_join() -> None:
    rows = rows_of(pa.int32(), [1])
    blocks: list[Any] = [
        rows_of(pa.int64(), [1]),
        Rows(pa.table({"y": pa.array([1], pa.int32())})),
        rows_of(pa.list_(pa.int32(), 1), [[1]]),
        rows_of(pa.string(), ["1"]),
        [{"x": 1}],
    ]
    for block in blocks:
        assert rows.joined([block]) is None
        assert join([rows, block]) == interleave([rows, block]) == [{"x": 1}, *block]


@pytest.mark.parametrize("is_in_parts", [False, True])
def test_interleaved_blocks_take_turns(*, is_in_parts: bool) -> None:
    table = every_type(60)
    pairs = [None if n % 5 == 0 else [n, None if n % 7 == 0 else 1] for n in range(60)]
    table = table.append_column("holes", pa.array(pairs, pa.list_(pa.int16(), 2)))
    batch = table.combine_chunks().to_batches()[0]
    lanes: list[Any] = [Rows(batch.slice(start, 18)) for start in (1, 20, 39)]
    if is_in_parts:
        lanes[1] = join([lanes[1][:7], lanes[1][7:]])
    interleaved = interleave([lane[2:17] for lane in lanes])
    assert isinstance(interleaved, Rows)
    places = [start + 2 + n for n in range(15) for start in (1, 20, 39)]
    assert plain(list(interleaved)) == expected(table.take(places))


def test_missing_or_repeated_names_are_an_error() -> None:
    for table in (pa.table({}), pa.table([[1], [2]], names=["a", "a"])):
        with pytest.raises(ValueError, match="distinct names"):
            Rows(table)


def test_an_empty_table_keeps_its_columns() -> None:
    rows = Rows(pa.schema([("a", pa.int8())]).empty_table())
    assert (len(rows), list(rows), len(rows.pick([]))) == (0, [], 0)
    joined = rows.joined([Rows(pa.table({"a": pa.array([1], pa.int8())}))])
    assert joined is not None
    assert list(joined) == [{"a": 1}]
    assert rows.collate()["a"].shape == (0,)


def test_unsupported_types_are_picked_row_by_row() -> None:
    """For example a struct of string views."""
    kind = pa.struct([("a", pa.string_view())])
    rows = rows_of(kind, [{"a": "1"}, {"a": "2"}, {"a": "3"}])
    picked = rows[1:].pick([1, 0, 1])
    assert [row["x"]["a"] for row in picked] == ["3", "2", "3"]
    assert len(picked.parts) == 3
    woven = [row["x"]["a"] for row in interleave([rows[:2], rows[1:]])]
    assert woven == ["1", "2", "2", "3"]


# -- memory ------------------------------------------------------------------------


def test_slices_are_views_and_batches_are_copies() -> None:
    array = np.arange(1000)
    rows = Rows(pa.record_batch({"x": array, "y": pa.array([[1]] * 1000)}))
    column = rows[3:9].parts[0].columns[0]
    assert isinstance(column, np.ndarray)
    assert np.shares_memory(column, array)
    rows[:5].collate()["x"][:] = 7
    rows[:5].pick([0, 1]).collate()["x"][:] = 7
    rows[0]["y"][:] = 7
    rows[:5].collate()["y"][:] = 7
    assert array[:5].tolist() == [0, 1, 2, 3, 4]
    assert rows[0]["y"].tolist() == [1]


def test_batches_do_not_keep_tables_alive() -> None:
    class Memory(np.ndarray[Any, Any]):
        """An array that can be watched."""

    array = np.arange(1000).view(Memory)
    watch = weakref.ref(array)
    rows = Rows(pa.record_batch({"x": pa.Array.from_buffers(
        pa.int64(), 1000, [None, pa.py_buffer(array)]
    )}))  # fmt: skip
    del array
    kept = [rows[5:7].collate(), rows.pick([1]), rows[3]]
    assert watch() is not None
    del rows
    gc.collect()
    assert watch() is None
    assert kept[2] == {"x": 3}


def test_large_batches_are_written_into_leased_memory() -> None:
    leased: list[int] = []

    class Pool(SlotPool):
        def allocate(self, nbytes: int) -> Any:
            leased.append(nbytes)
            return super().allocate(nbytes)

    rows = Rows(pa.table({"x": np.arange(1 << 16), "small": np.zeros(1 << 16, "i1")}))
    twice = rows.joined([rows])
    assert twice is not None
    batch, both = (collated(Pool().allocate, Rows.collate, x) for x in (rows, twice))
    assert leased == [1 << 19, 1 << 20]
    assert torch.equal(batch["x"], torch.arange(1 << 16))
    assert torch.equal(both["x"], torch.arange(1 << 16).repeat(2))


LONG: dict[str, Callable[[int], Any]] = {
    "numbers": np.arange,
    "texts": lambda n: [f"text {i}" for i in range(n)],
    "lists": lambda n: [[i, i] for i in range(n)],
    "structs": lambda n: [{"a": "t"}] * n,
    "bytes": lambda n: [b"b" * 90] * n,
}


@pytest.mark.parametrize("name", LONG)
def test_pickles_hold_only_the_slice(name: str) -> None:
    rows = Rows(pa.record_batch({"x": pa.array(LONG[name](10_000))}))[50:70]
    buffers: list[pickle.PickleBuffer] = []
    header = pickle.dumps(rows, 5, buffer_callback=buffers.append)
    assert len(header) + sum(len(buffer.raw()) for buffer in buffers) < 5000
    assert len(pickle.dumps(rows)) < 5000
    assert buffers
    copies = [memoryview(bytearray(buffer.raw())) for buffer in buffers]
    for copy in (
        pickle.loads(header, buffers=copies),
        pickle.loads(pickle.dumps(rows, 4)),
    ):
        assert_same(list(copy), list(rows))
        assert_same(copy.collate(), rows.collate())
        assert copy.joined([rows]) is not None
