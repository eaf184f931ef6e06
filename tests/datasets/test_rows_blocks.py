"""Rows as a block: cut, joined, picked, pickled, and what memory that keeps."""

import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from aioloader._collate.collate import lending
from aioloader._order.blocks import Columns, join, pick, weave
from aioloader._transport.slots import SlotPool
from aioloader.datasets._arrow.rows import Rows
from datasets.tables import assert_same, every_type, expected, plain, rows_of

# -- a block -----------------------------------------------------------------------


def test_is_a_block() -> None:
    """``len``, rows, slices, and the words of blocks."""
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


def test_other_columns_do_not_join() -> None:
    """Then blocks become lists of rows."""
    one = rows_of(pa.int32(), [1])
    others: list[Any] = [
        rows_of(pa.int64(), [1]),
        Rows(pa.table({"y": pa.array([1], pa.int32())})),
        rows_of(pa.list_(pa.int32(), 1), [[1]]),
        rows_of(pa.string(), ["1"]),
        [{"x": 1}],
    ]
    for other in others:
        assert one.joined([other]) is None
        assert join([one, other]) == weave([one, other]) == [{"x": 1}, *other]


@pytest.mark.parametrize("is_in_parts", [False, True])
def test_woven_blocks_take_turns(*, is_in_parts: bool) -> None:
    """Columns of every type, with NULLs, which a pair and what is in it may be."""
    table = every_type(60)
    pairs = [None if n % 5 == 0 else [n, None if n % 7 == 0 else 1] for n in range(60)]
    table = table.append_column("holes", pa.array(pairs, pa.list_(pa.int16(), 2)))
    batch = table.combine_chunks().to_batches()[0]
    lanes: list[Any] = [Rows(batch.slice(start, 18)) for start in (1, 20, 39)]
    if is_in_parts:
        lanes[1] = join([lanes[1][:7], lanes[1][7:]])
    found = weave([lane[2:17] for lane in lanes])
    assert isinstance(found, Rows)
    places = [start + 2 + n for n in range(15) for start in (1, 20, 39)]
    assert plain(list(found)) == expected(table.take(places))


def test_no_or_equal_names_are_an_error() -> None:
    """A dict could not hold such rows."""
    for table in (pa.table({}), pa.table([[1], [2]], names=["a", "a"])):
        with pytest.raises(ValueError, match="distinct names"):
            Rows(table)


def test_a_table_without_rows() -> None:
    """It joins, and gives nothing."""
    rows = Rows(pa.schema([("a", pa.int8())]).empty_table())
    assert (len(rows), list(rows), len(rows.pick([]))) == (0, [], 0)
    joined = rows.joined([Rows(pa.table({"a": pa.array([1], pa.int8())}))])
    assert joined is not None
    assert list(joined) == [{"a": 1}]
    assert rows.collate()["a"].shape == (0,)


def test_what_arrow_cannot_take_is_picked_row_by_row() -> None:
    """A struct of views, say."""
    kind = pa.struct([("a", pa.string_view())])
    rows = rows_of(kind, [{"a": "1"}, {"a": "2"}, {"a": "3"}])
    picked = rows[1:].pick([1, 0, 1])
    assert [row["x"]["a"] for row in picked] == ["3", "2", "3"]
    assert len(picked.parts) == 3
    assert [row["x"]["a"] for row in weave([rows[:2], rows[1:]])] == [
        "1",
        "2",
        "2",
        "3",
    ]


# -- memory ------------------------------------------------------------------------


def test_cuts_are_views_and_batches_are_not() -> None:
    """A batch is writable, and writing it does not change the table."""
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


def test_batches_keep_nothing_alive() -> None:
    """When all rows are dropped, so is the table's memory."""

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


def test_large_batches_are_written_into_lent_memory() -> None:
    """One column, in parts or whole; small ones are not."""
    leased: list[int] = []

    class Pool(SlotPool):
        """A pool that is watched."""

        def lease(self, nbytes: int) -> Any:
            leased.append(nbytes)
            return super().lease(nbytes)

    rows = Rows(pa.table({"x": np.arange(1 << 16), "small": np.zeros(1 << 16, "i1")}))
    twice = rows.joined([rows])
    assert twice is not None
    with lending(Pool()):
        batch, both = rows.collate(), twice.collate()
    assert leased == [1 << 19, 1 << 20]
    assert torch.equal(batch["x"], torch.arange(1 << 16))
    assert torch.equal(both["x"], torch.arange(1 << 16).repeat(2))


LONG: dict[str, Callable[[int], Any]] = {
    "numbers": np.arange,
    "texts": lambda n: [f"text {at}" for at in range(n)],
    "lists": lambda n: [[at, at] for at in range(n)],
    "structs": lambda n: [{"a": "t"}] * n,
    "bytes": lambda n: [b"b" * 90] * n,
}


@pytest.mark.parametrize("name", LONG)
def test_pickles_carry_the_cut_only(name: str) -> None:
    """In band and out of band; what is unpickled is made of the buffers."""
    rows = Rows(pa.record_batch({"x": pa.array(LONG[name](10_000))}))[50:70]
    buffers: list[pickle.PickleBuffer] = []
    header = pickle.dumps(rows, 5, buffer_callback=buffers.append)
    assert len(header) + sum(len(buffer.raw()) for buffer in buffers) < 5000
    assert len(pickle.dumps(rows)) < 5000
    assert buffers
    copies = [memoryview(bytearray(buffer.raw())) for buffer in buffers]
    for found in (
        pickle.loads(header, buffers=copies),
        pickle.loads(pickle.dumps(rows, 4)),
    ):
        assert_same(list(found), list(rows))
        assert_same(found.collate(), rows.collate())
        assert found.joined([rows]) is not None
