"""Readers get equal shares of the shards: by length where it is known, or by number."""

import asyncio
import json
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from obstore.store import LocalStore

from aioloader.datasets import ParquetDataset, TextDataset
from aioloader.datasets.sharded import ShardedStream
from datasets.shards import read, write_lines
from datasets.test_interleave import Memory

# The longest first, last and in between; two are alike, and one is empty.
UNEVEN = (40, 3, 11, 1, 25, 9, 2, 38, 1, 12, 0, 9, 17, 30)


async def parts(stream: Any, ranks: int) -> list[list[Any]]:
    found = []
    for rank in range(ranks):
        part = stream.shard(rank, ranks)
        part.set_epoch(1)
        found.append((await read(part))[0])
    return found


class Equal(Memory):
    def __init__(self, shards: int) -> None:
        super().__init__(list)
        self.made = [[2 * shard, 2 * shard + 1] for shard in range(shards)]


@pytest.mark.law
@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 9))
async def test_equal_shards(shards: int, ranks: int, interleave: int) -> None:
    ranks = min(ranks, shards)
    stream: Any = ShardedStream(Equal(shards), interleave=interleave, shuffle=True)
    found = await parts(stream, ranks)
    assert sorted(chain.from_iterable(found)) == [*range(2 * shards)]
    lengths = [*map(len, found)]
    assert max(lengths) - min(lengths) <= 2


def of_text(folder: Path, **options: Any) -> Any:
    return TextDataset(write_lines(folder, UNEVEN), **options)


def of_store(folder: Path, **options: Any) -> Any:
    write_lines(folder, UNEVEN)
    return TextDataset("*.txt", store=LocalStore(folder), **options)


def of_tables(folder: Path, **options: Any) -> Any:
    for shard, length in enumerate(UNEVEN):
        rows = pa.table({"n": [f"{shard}-{row}" for row in range(length)]})
        pq.write_table(rows, folder / f"{shard:02}.parquet")
    return ParquetDataset(str(folder / "*.parquet"), **options)


@pytest.mark.slow
@pytest.mark.parametrize("make", [of_text, of_store, of_tables])
@pytest.mark.parametrize("options", [{}, {"shuffle": True, "interleave": 5}])
async def test_uneven_shards(make: Any, options: Any, tmp_path: Path) -> None:
    stream = await asyncio.to_thread(make, tmp_path, **options)
    for ranks in (2, 3, 5, 8):
        lengths = [len(part) for part in await parts(stream, ranks)]
        assert sum(lengths) == sum(UNEVEN)
        assert max(lengths) - min(lengths) <= max(UNEVEN)


async def test_shares_change_with_the_epoch(tmp_path: Path) -> None:
    """A rank gets other shards each time, if they are shuffled."""
    stream = of_text(tmp_path, shuffle=True).shard(0, 3)
    found = [
        {line.partition("-")[0] for line in (await read(stream))[0]} for _ in range(4)
    ]
    assert len({*map(frozenset, found)}) == 4


async def test_lengths_that_are_not_listed_are_unknown(tmp_path: Path) -> None:
    """Shards then count alike; a state from where they are known makes them known."""
    local, names = of_text(tmp_path), [f"{shard:02}.txt" for shard in range(14)]
    remote: Any = TextDataset(names, store=LocalStore(tmp_path))
    found, whole = await parts(remote, 2), await parts(local, 2)
    assert [len(part) for part in found] == [sum(UNEVEN[::2]), sum(UNEVEN[1::2])]
    assert found != whole
    for first, other, expected in ((local, remote, whole), (remote, local, found)):
        for rank, part in enumerate(expected):
            begun, moved = first.shard(rank, 2), other.shard(rank, 2)
            before, state = await read(begun, 20)
            moved.load_state_dict(json.loads(json.dumps(state)))
            assert before + (await read(moved))[0] == part
