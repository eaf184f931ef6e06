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
from aioloader.datasets import ParquetDataset, ShardedStream, TextDataset, from_iterable
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
        batches: list[list[str]] = []
        while not all(reading.are_over):
            batches += await reading.batch(ranks)
        return trimmed(batches)


@pytest.mark.slow
@KINDS
@SHARED
async def test_any_number_of_ranks_has_one_order(kind: str, tmp_path: Path) -> None:
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
        # there are as many readers as first ranks
        (None, (4, 3, 8), 24),
        (None, (4, 3, 4), 24),
        (None, (1, 2, 3), 24),
        # within a round: not all readers have had as many turns
        (12, (5, 3, 2), 30),
        (12, (3, 5, 1), 30),
    ],
)
async def test_states_resume_on_other_ranks(
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
            batches = await reading.batches(size, count)
            state = reading.state()
        async with Ranks(stream, second, state) as reading:
            batches += await reading.batches(size, 1)
            state = reading.state()
        async with Ranks(stream, third, state) as reading:
            batches += await reading.batches(size)
        assert trimmed(batches) == whole, count


async def test_a_stream_of_readers_resumes_and_ends(tmp_path: Path) -> None:
    stream = lines(tmp_path).shuffle(3).readers(13)
    whole, end = await read(stream)
    assert await read(stream, state=end) == ([], end)
    assert sorted(whole) == sorted(await items(lines(tmp_path)))
    assert end["ended"]
    assert all(reader["ended"] for reader in end["streams"].values())
    assert merge_states([end]) == end
    await check_resumes(stream, whole, range(0, len(whole) + 1, 9))


async def test_one_pull_is_one_batch(tmp_path: Path) -> None:
    """Blocks may be short or empty; streams of one reader still fill them."""
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


async def test_readers_keep_columns(tmp_path: Path) -> None:
    async with aiter(parquet(tmp_path).readers(5)) as iterator:
        blocks = [await iterator.pull(limit) for limit in (7, 1, 12, 9)]
    assert all(hasattr(block, "collate") for block in blocks)
    with pytest.warns(UserWarning, match="3 ranks"):
        shared = aiter(parquet(tmp_path).shard(1, 3).readers(5))
    async with shared as iterator:
        assert hasattr(await iterator.pull(4), "collate")


@pytest.mark.filterwarnings("error")
async def test_sharing_readers_warns_of_its_cost() -> None:
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


async def test_too_few_shards_for_readers_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"13 shards .* but there are 200 readers"):
        await read(lines(tmp_path).readers(200))


async def test_unordered_streams_cannot_share_readers(tmp_path: Path) -> None:
    """With one rank for each reader, they can still resume."""
    stream = lines(tmp_path, deterministic=False)
    with pytest.raises(ValueError, match="deterministic=False, and no order"):
        await read(stream.readers(4))
    async with Ranks(stream, 3) as reading:
        batches = await reading.batches(12, 2)
        state = reading.state()
    async with Ranks(stream, 3, state) as reading:
        batches += await reading.batches(12)
    assert sorted(chain(*batches)) == sorted(await items(lines(tmp_path)))


async def test_readers_of_a_rank_have_one_snapshot(tmp_path: Path) -> None:
    """A table is cut once, and its ranges are dealt to the readers."""
    stream = sqlite(tmp_path)
    rows, state = await read(stream.readers(4))
    assert sorted(row["number"] for row in rows) == [*range(52)]
    cuts = [reader["state"]["shards"]["cuts"] for reader in state["streams"].values()]
    assert cuts == [cuts[0]] * 4


async def test_readers_run_concurrently() -> None:
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
    """One reader reports each failure, also after a resume."""

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


async def test_a_state_without_the_readers_is_refused() -> None:
    states = await states_of(3)
    for state, rank, ranks, words in (
        (states[1], 0, 3, r"readers 1 of 3, but rank 0 of 3 .* reads 0: .*merge_s"),
        (states[0], 1, 2, r"readers 0 of 3, but rank 1 of 2 .* reads 1, 2"),
    ):
        stream = numbers().shard(rank, ranks)
        stream.load_state_dict(state)
        for _ in range(2):  # the second iteration fails, too
            with (
                pytest.raises(StateMismatchError, match=words) as caught,
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore")
                aiter(stream)
        assert caught.value.expected == [int(reader) for reader in state["streams"]]


async def test_states_that_do_not_match_are_not_merged() -> None:
    three, later, four = await states_of(3), await states_of(3, 5), await states_of(4)
    part = numbers().shard(1, 3)
    part.set_epoch(9)
    _, other_epoch = await read(part, 2)
    for states, words in (
        (three[:2], r"readers 0, 1 of 3; 2 are missing"),
        ([*three[:2], later[2]], r"after 15 samples of all ranks, others after 6"),
        ([*three, four[0]], r"one has readers 3, another one has readers 4"),
        ([three[0], other_epoch], r"has epoch 2, another one has epoch"),
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


async def test_numpy_integers_are_accepted_as_options(tmp_path: Path) -> None:
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


async def test_a_state_counts_the_delivered_samples() -> None:
    stream = numbers(1000)
    assert aiter(stream).state_dict()["position"] == 0
    _, state = await read(stream, 300)
    # Samples that were read ahead are read again.
    place = state["streams"]["0"]["state"]
    assert place["read"] + place["taken"] == 300
    assert {key: value for key, value in state.items() if key != "checksum"} == {
        "version": 5,
        "stream": {"kind": "iterable", "function": "builtins.range"},
        "epoch": 1,
        "begun": 1,
        "position": 300,
        "readers": 1,
        "streams": {"0": {"taken": 300, "state": {**place, "failed": []}}},
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
async def test_a_loaded_state_applies_to_one_epoch(options: Any) -> None:
    stream = numbers(20)
    _, state = await read(stream.shard(0, 1), 8)
    stream.load_state_dict(state)
    loader: Any = DataLoader(stream, 4, collate_fn=list, **options)
    for begin in (8, 0, 0):
        batches: Any = await beside(partial(list, loader))
        assert [*chain(*batches)] == [*range(begin, 20)]
    await loader.aclose()


def test_no_ranks_are_compared_without_a_process_group() -> None:
    loader = DataLoader([1, 2])
    assert len(list(loader)) == 2
    (said,) = loader.report(ranks="train").remarks
    assert said == "Ranks are not compared: there is no process group."


# -- readers get equal shares of the shards --------------------------------------------

# The longest first, last and in between; two are alike, and one is empty.
UNEVEN = (40, 3, 11, 1, 25, 9, 2, 38, 1, 12, 0, 9, 17, 30)


async def parts(stream: Any, ranks: int) -> list[list[Any]]:
    samples = []
    for rank in range(ranks):
        part = stream.shard(rank, ranks)
        part.set_epoch(1)
        samples.append((await read(part))[0])
    return samples


@pytest.mark.law
@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 9))
async def test_ranks_get_equal_shares_of_equal_shards(
    shards: int, ranks: int, interleave: int
) -> None:
    ranks = min(ranks, shards)
    made = Memory(list, made=[[2 * n, 2 * n + 1] for n in range(shards)])
    stream: Any = ShardedStream(made, interleave=interleave, shuffle=True)
    shares = await parts(stream, ranks)
    assert sorted(chain.from_iterable(shares)) == [*range(2 * shards)]
    lengths = [*map(len, shares)]
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
async def test_uneven_shards_are_shared_about_equally(
    make: Any, options: Any, tmp_path: Path
) -> None:
    stream = await asyncio.to_thread(make, tmp_path, **options)
    for ranks in (2, 3, 5, 8):
        lengths = [len(part) for part in await parts(stream, ranks)]
        assert sum(lengths) == sum(UNEVEN)
        assert max(lengths) - min(lengths) <= max(UNEVEN)


async def test_shuffled_shares_change_with_the_epoch(tmp_path: Path) -> None:
    stream = of_text(tmp_path, shuffle=True).shard(0, 3)
    names = [{name.split("-")[0] for name in (await read(stream))[0]} for _ in range(4)]
    assert len({*map(frozenset, names)}) == 4


async def test_shards_of_unknown_length_count_alike(tmp_path: Path) -> None:
    """A state from where the lengths are known makes them known."""
    local, names = of_text(tmp_path), [f"{shard:02}.txt" for shard in range(14)]
    remote: Any = TextDataset(names, store=LocalStore(tmp_path))
    shares, whole = await parts(remote, 2), await parts(local, 2)
    assert [len(part) for part in shares] == [sum(UNEVEN[::2]), sum(UNEVEN[1::2])]
    assert shares != whole
    for first, second, expected in ((local, remote, whole), (remote, local, shares)):
        for rank, part in enumerate(expected):
            begun, moved = first.shard(rank, 2), second.shard(rank, 2)
            before, state = await read(begun, 20)
            moved.load_state_dict(json.loads(json.dumps(state)))
            assert before + (await read(moved))[0] == part
