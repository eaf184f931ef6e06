"""The order and the state of a stream are the same for any number of ranks."""

import asyncio
import json
import warnings
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from obstore.store import LocalStore

from aioloader import DataLoader
from aioloader._order.stream_states import opened, sealed
from aioloader.datasets import ParquetDataset, ShardedStream, TextDataset, from_iterable
from aioloader.datasets._arrow.rows import Rows
from aioloader.datasets.sharded import ShardedStream
from aioloader.errors import StateMismatchError
from beside import beside
from datasets.ranks import STREAMS, Ranks, lines, merge_states, numbers, trimmed
from datasets.shards import (
    Memory,
    check_resumes,
    items,
    parquet,
    read,
    sqlite,
    write_lines,
)

KINDS = pytest.mark.parametrize("kind", STREAMS)
SHARED = pytest.mark.filterwarnings("ignore:.*take turns at:UserWarning")


async def layout(stream: Any, ranks: int) -> list[list[str]]:
    async with Ranks(stream, ranks) as reading:
        found: list[list[str]] = []
        while not all(reading.are_over):
            found += await reading.batch(ranks)
        return trimmed(found)


@pytest.mark.slow
@KINDS
@SHARED
async def test_one_order(kind: str, tmp_path: Path) -> None:
    whole = await layout(STREAMS[kind](tmp_path), 12)
    names = list(chain.from_iterable(whole))
    assert len(names) >= 25
    assert len({*names}) == len(names)
    for ranks in (1, 2, 3, 4, 5, 8):
        stream = STREAMS[kind](tmp_path).readers(12)
        assert await layout(stream, ranks) == whole, ranks


@pytest.mark.slow
@SHARED
@pytest.mark.parametrize("kind", ["lines", "columns, shuffled", "numbers", "errors"])
@pytest.mark.parametrize(
    ("readers", "several", "size"),
    [
        (12, (4, 3, 1), 24),
        (12, (4, 8, 3), 24),
        # the readers are those of the ranks it began with
        (None, (4, 3, 8), 24),
        (None, (4, 3, 4), 24),
        (None, (1, 2, 3), 24),
        # amid a round: not all readers have had as many turns
        (12, (5, 3, 2), 30),
        (12, (3, 5, 1), 30),
    ],
)
async def test_goes_on_with_other_ranks(
    kind: str,
    readers: int | None,
    several: tuple[int, int, int],
    size: int,
    tmp_path: Path,
) -> None:
    stream = STREAMS[kind](tmp_path)
    stream = stream if readers is None else stream.readers(readers)
    first, second, third = several
    async with Ranks(stream, first) as reading:
        whole = await reading.batches(size)
    for count in range(len(whole) + 1):
        async with Ranks(stream, first) as reading:
            found = await reading.batches(size, count)
            state = reading.state()
        async with Ranks(stream, second, state) as reading:
            found += await reading.batches(size, 1)
            state = reading.state()
        async with Ranks(stream, third, state) as reading:
            found += await reading.batches(size)
        assert trimmed(found) == whole, count


async def test_samples_one_by_one(tmp_path: Path) -> None:
    stream = lines(tmp_path).shuffle(3).readers(13)
    whole, end = await read(stream)
    assert await read(stream, state=end) == ([], end)
    assert sorted(whole) == sorted(await items(lines(tmp_path)))
    assert end["ended"]
    assert all(one["ended"] for one in end["streams"].values())
    assert merge_states([end]) == end
    await check_resumes(stream, whole, range(0, len(whole) + 1, 9))


async def test_one_pull_is_one_batch(tmp_path: Path) -> None:
    """Short or empty where there are holes; what fills is as it was."""
    iterator: Any = aiter(lines(tmp_path).readers(13))
    assert not iterator.fills
    blocks: list[Any] = []
    with pytest.raises(StopAsyncIteration):
        while True:
            blocks.append(await iterator.pull(4))
    with pytest.raises(StopAsyncIteration):
        await iterator.pull(4)
    await iterator.aclose()
    assert {len(block) for block in blocks} == {0, 1, 2, 3, 4}
    assert iterator.state_dict()["position"] == 4 * len(blocks)
    for alone in (lines(tmp_path), lines(tmp_path).shard(2, 3).readers(3)):
        assert aiter(alone).fills


async def test_columns_stay_columns(tmp_path: Path) -> None:
    async with aiter(parquet(tmp_path).readers(5)) as iterator:
        blocks = [await iterator.pull(limit) for limit in (7, 1, 12, 9)]
    assert {type(block) for block in blocks} == {Rows}
    with pytest.warns(UserWarning, match="3 ranks"):
        shared = aiter(parquet(tmp_path).shard(1, 3).readers(5))
    async with shared as iterator:
        assert type(await iterator.pull(4)) is Rows


@pytest.mark.filterwarnings("error")
async def test_the_cost_of_sharing_is_told() -> None:
    words = r"5 ranks .* at 12 readers, .* made 5 times; with readers\(60\)"
    with pytest.warns(UserWarning, match=words) as caught:
        aiter(numbers().readers(12).shard(0, 5))
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for ranks in (1, 3, 5, 12):
            aiter(numbers().readers(60).shard(0, ranks))
            aiter(numbers().shard(0, ranks))


async def test_steps_keep_the_readers() -> None:
    first = [[f"{n}"] for n in range(10)]
    for made in (
        numbers(10).readers(5).map(abs),
        numbers(10).map(abs).readers(5),
        numbers(10).readers(3).readers(5).shard(0, 1).skip(0),
    ):
        assert await layout(made, 1) == first
        assert json.loads(json.dumps((await read(made, 1))[1]))["readers"] == 5
    mixed = numbers(9).readers(3).mix(numbers(4))
    assert (await read(mixed, 1))[1]["readers"] == 3
    with pytest.raises(ValueError, match=r"readers\(\) applies to the mixture"):
        numbers(9).mix(numbers(4).readers(3))
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        numbers().readers(0)


async def test_too_few_shards_for_readers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"13 shards .* but there are 200 readers"):
        await read(lines(tmp_path).readers(200))


async def test_no_order_no_turns(tmp_path: Path) -> None:
    """What comes as it comes cannot be shared; one rank for each reader can go on."""
    stream = lines(tmp_path, deterministic=False)
    with pytest.raises(ValueError, match="deterministic=False, and no order"):
        await read(stream.readers(4))
    async with Ranks(stream, 3) as reading:
        found = await reading.batches(12, 2)
        state = reading.state()
    async with Ranks(stream, 3, state) as reading:
        found += await reading.batches(12)
    assert sorted(chain(*found)) == sorted(await items(lines(tmp_path)))


async def test_readers_of_a_rank_have_one_snapshot(tmp_path: Path) -> None:
    """A table is cut once, and the ranges are dealt to them."""
    stream = sqlite(tmp_path)
    found, state = await read(stream.readers(4))
    assert sorted(row["number"] for row in found) == [*range(52)]
    cuts = [one["state"]["shards"]["cuts"] for one in state["streams"].values()]
    assert cuts == [cuts[0]] * 4


async def test_readers_begin_at_once() -> None:
    waiting: set[int] = set()
    release = asyncio.Event()

    async def wait(number: int) -> int:
        waiting.add(number)
        if len(waiting) == 6:
            release.set()
        await release.wait()
        return number

    stream = numbers(6).map(wait, concurrency=1).readers(6)
    assert (await read(stream))[0] == [*range(6)]


async def test_failures_of_an_iterable_are_samples() -> None:
    """One reader tells each, as it does when it goes on from behind it."""

    class Shaky:
        def __init__(self) -> None:
            self.at = -1

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> int:
            self.at += 1
            if self.at >= 20:
                raise StopIteration
            if self.at % 7 == 3:
                raise OSError(f"no {self.at}")
            return self.at

    stream = from_iterable(Shaky)
    expected = [[f"no {n}" if n % 7 == 3 else f"{n}"] for n in range(20)]
    for readers, ranks in ((1, 1), (6, 1), (6, 3), (4, 4)):
        assert await layout(stream.readers(readers), ranks) == expected
    async with Ranks(stream, 2) as reading:
        await reading.batches(2, 5)
        state = reading.state()
    async with Ranks(stream, 2, state) as reading:
        assert sorted(chain(*await reading.batches(2))) == sorted(chain(*expected[10:]))


async def test_a_generator_that_fails_ends_all_readers() -> None:
    def broken() -> Any:
        yield from range(5)
        raise OSError("broken")

    for rank in range(3):
        iterator = aiter(from_iterable(broken).shard(rank, 3))
        assert await iterator.pull(30) == [*range(rank, 5, 3)]
        with pytest.raises(OSError, match="broken"):
            await iterator.pull(30)
        await iterator.aclose()


# -- states of streams ----------------------------------------------------------------


async def states_of(ranks: int, count: int = 2) -> list[Any]:
    async with Ranks(numbers(), ranks) as reading:
        await reading.batches(ranks, count)
        return reading.states()


async def test_a_state_that_lacks_a_reader() -> None:
    states = await states_of(3)
    for state, rank, ranks, words in (
        (states[1], 0, 3, r"readers 1 of 3, but rank 0 of 3 .* reads 0: .*merge_s"),
        (states[0], 1, 2, r"readers 0 of 3, but rank 1 of 2 .* reads 1, 2"),
    ):
        stream = numbers().shard(rank, ranks)
        stream.load_state_dict(state)
        for _ in range(2):  # it is not forgotten, and the beginning taken instead
            with (
                pytest.raises(StateMismatchError, match=words) as caught,
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore")
                aiter(stream)
        assert caught.value.expected == [int(one) for one in state["streams"]]


def changed(state: Any, **values: Any) -> Any:
    return sealed({**opened(state), **values})


async def test_states_that_do_not_belong_together() -> None:
    three, later, four = await states_of(3), await states_of(3, 5), await states_of(4)
    for states, words in (
        (three[:2], r"readers 0, 1 of 3; 2 are missing"),
        ([*three[:2], later[2]], r"after 15 samples of all ranks, others after 6"),
        ([*three, four[0]], r"one has readers 3, another one has readers 4"),
        ([three[0], changed(three[1], epoch=9)], r"has epoch 2, another one has epoch"),
        ([three[0], {**three[1], "version": 1}], r"of version 1, and this .* version "),
    ):
        with pytest.raises(StateMismatchError, match=words):
            merge_states(states)
    async with Ranks(numbers(4), 2) as reading:
        first = (await reading.batches(2, 1), reading.states())[1]
        await reading.batches(2)
        ended = reading.states()
    assert merge_states(ended)["position"] == 4
    with pytest.raises(StateMismatchError, match="after 2 samples of all ranks"):
        merge_states([first[0], ended[1]])
    with pytest.raises(ValueError, match="no states"):
        merge_states([])
    with pytest.raises(
        StateMismatchError, match=r"of version 0, and .* version 5"
    ) as caught:
        numbers().load_state_dict({"version": 0})
    assert (caught.value.expected, caught.value.found) == (0, 5)


async def test_integers_of_numpy(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"{n}\n" for n in range(40)))
    two: Any = np.int64(2)
    order: Any = {"shuffle": True, "seed": two, "interleave": two}
    stream: Any = TextDataset([str(tmp_path / "a.txt")] * 4, **order)
    stream = (
        stream.skip(two).take(two * 9).shuffle(two, seed=two).batch(two).repeat(two)
    )
    stream = stream.mix(stream, weights=[two, 1]).readers(two).epoch_length(two * 8)
    stream.set_epoch(two)
    _, state = await read(stream.shard(two - 1, two), 1)
    assert json.loads(json.dumps(state)) == state
    loader: Any = DataLoader(stream, 2, rank=two - 1, world_size=two)
    async with loader:
        await anext(aiter(loader))
        json.dumps(loader.state_dict())


async def test_a_state_is_small_and_of_the_samples_given() -> None:
    stream = numbers(1000)
    assert aiter(stream).state_dict()["position"] == 0
    _, state = await read(stream, 300)
    # What was read ahead of the position is read again.
    at = state["streams"]["0"]["state"]
    assert at["read"] + at["taken"] == 300
    assert opened(state) == {
        "version": 5,
        "stream": {"kind": "iterable", "function": "builtins.range"},
        "epoch": 1,
        "begun": 1,
        "position": 300,
        "readers": 1,
        "streams": {"0": {"taken": 300, "state": {**at, "failed": []}}},
    }
    stream.load_state_dict(state)
    assert (await read(stream))[0] == [*range(300, 1000)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rank": 0, "world_size": 1},
        {"num_workers": 1, "fetch": "workers"},
        {"num_workers": 1, "fetch": "workers", "persistent_workers": True},
    ],
    ids=["alone", "a rank", "a worker", "a worker that stays"],
)
async def test_a_loaded_state_is_for_one_epoch_of_a_loader(options: Any) -> None:
    stream = numbers(20)
    _, state = await read(stream.shard(0, 1), 8)
    stream.load_state_dict(state)
    loader: Any = DataLoader(stream, 4, collate_fn=list, **options)
    for begin in (8, 0, 0):
        batches: Any = await beside(partial(list, loader))
        assert [*chain(*batches)] == [*range(begin, 20)]
    await loader.aclose()


def test_without_a_process_group() -> None:
    loader = DataLoader([1, 2])
    assert len(list(loader)) == 2
    (said,) = loader.report(ranks="train").remarks
    assert said == "Ranks are not compared: there is no process group."


# -- readers get equal shares of the shards --------------------------------------------

# The longest first, last and in between; two are alike, and one is empty.
UNEVEN = (40, 3, 11, 1, 25, 9, 2, 38, 1, 12, 0, 9, 17, 30)


async def parts(stream: Any, ranks: int) -> list[list[Any]]:
    found = []
    for rank in range(ranks):
        part = stream.shard(rank, ranks)
        part.set_epoch(1)
        found.append((await read(part))[0])
    return found


@pytest.mark.law
@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 9))
async def test_equal_shards(shards: int, ranks: int, interleave: int) -> None:
    ranks = min(ranks, shards)
    made = Memory(list, made=[[2 * at, 2 * at + 1] for at in range(shards)])
    stream: Any = ShardedStream(made, interleave=interleave, shuffle=True)
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
    found = [{name.split("-")[0] for name in (await read(stream))[0]} for _ in range(4)]
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
