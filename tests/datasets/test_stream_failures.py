"""Streams that cannot be read end with an error; what streams do in advance."""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from aioloader import DataLoader, Skip
from aioloader._order.permutation import ShuffledIndices
from aioloader.datasets import TextDataset, from_async_iterable, from_iterable
from aioloader.datasets.sharded import ShardedStream
from aioloader.errors import DatasetError, FailureBudgetError, ShardChangedError
from beside import beside
from datasets import shards
from datasets.shards import Memory, read

SKIP: Any = {"on_error": "skip", "collate_fn": list}


def refused() -> Any:
    raise OSError("cannot connect")


def broken() -> Iterator[int]:
    yield from range(0)
    raise OSError("cannot connect")


async def broken_async() -> AsyncIterator[int]:
    for number in range(0):
        yield number
    raise OSError("cannot connect")


class Stuck:
    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        raise OSError("cannot connect")


class StuckAsync:
    def __aiter__(self) -> Any:
        return self

    async def __anext__(self) -> int:
        raise OSError("cannot connect")


def unlucky(number: int) -> int:
    if number % 4 == 0:
        raise ValueError(f"no {number}")
    return number


def refuse(number: int) -> int:
    raise OSError(f"cannot connect for {number}")


DEAD: dict[str, Callable[[], Any]] = {
    "refused": lambda: from_iterable(refused),
    "generator": lambda: from_iterable(broken),
    "async generator": lambda: from_async_iterable(broken_async),
    "stuck": lambda: from_iterable(Stuck),
    "stuck async": lambda: from_async_iterable(StuckAsync),
    "stuck iterator": Stuck,
    "stuck async iterator": StuckAsync,
    "map": lambda: from_iterable(range(9)).map(refuse),
    "mix": lambda: from_iterable(range(9)).mix(from_iterable(refused)),
    "shuffle": lambda: from_iterable(broken).shuffle(4).batch(2),
}


@pytest.mark.parametrize("name", DEAD)
async def test_a_dead_stream_ends_with_its_error(name: str) -> None:
    loader: Any = DataLoader(DEAD[name](), 4, **SKIP)
    with pytest.raises(OSError, match="cannot connect"):
        await beside(lambda: list(loader))


@pytest.mark.parametrize("fetch", ["workers", "loader"])
async def test_workers_report_the_error_of_a_dead_stream(fetch: Any) -> None:
    loader: Any = DataLoader(
        from_iterable(Stuck), 4, on_error="skip", num_workers=1, fetch=fetch
    )
    with pytest.raises(OSError, match="cannot connect"):
        await beside(lambda: list(loader))


async def test_samples_before_the_error_are_delivered() -> None:
    def lost() -> Iterator[int]:
        yield from range(5)
        raise OSError("lost")

    async def same(number: int) -> int:
        await asyncio.sleep(0)
        return number

    for stream in (from_iterable(lost), from_iterable(lost).map(same, concurrency=2)):
        iterator = aiter(stream)
        assert [await anext(iterator) for _ in range(5)] == [*range(5)]
        with pytest.raises(OSError, match="lost"):
            await anext(iterator)
        assert [sample async for sample in iterator] == []


def missing(folder: Path, *names: str) -> Any:
    for name in ("0.txt", "1.txt"):
        (folder / name).write_text("a\nb\n")
    return TextDataset([str(folder / name) for name in names])


async def test_skipping_all_shards_is_an_error(tmp_path: Path) -> None:
    loader: Any = DataLoader(missing(tmp_path, "0.txt", "7.txt"), 4, **SKIP)
    assert await beside(lambda: list(loader)) == [["a", "b"]]
    assert len(loader.skipped) == 1
    loader = DataLoader(missing(tmp_path, "7.txt", "8.txt"), 4, **SKIP)
    with pytest.raises(FileNotFoundError, match=r"8\.txt") as caught:
        await beside(lambda: list(loader))
    assert any("all samples of this stream failed" in n for n in caught.value.__notes__)


async def test_one_shard_of_a_rank_may_be_skipped(tmp_path: Path) -> None:
    for rank, expected in ((0, [["a", "b"]]), (1, [])):
        options = {"rank": rank, "world_size": 2, "tail": "uneven", **SKIP}
        loader: Any = DataLoader(missing(tmp_path, "0.txt", "7.txt"), 4, **options)
        assert await beside(partial(list, loader)) == expected
        assert len(loader.skipped) == rank


@pytest.mark.slow
@pytest.mark.parametrize("fetch", ["loader", "workers"])
@pytest.mark.parametrize("workers", [0, 2])
async def test_failures_of_all_readers_share_a_budget(workers: int, fetch: Any) -> None:
    def loader(limit: float) -> Any:
        options: Any = {"num_workers": workers} | ({"fetch": fetch} if workers else {})
        stream = from_iterable(range(100)).map(unlucky)
        return DataLoader(stream, 10, on_error=Skip(at_most=limit), **options)

    with pytest.raises(FailureBudgetError, match=r"than Skip\(at_most=20\) allows"):
        await beside(lambda: list(loader(20)))
    assert len(await beside(lambda: list(loader(25)))) >= 10


@pytest.mark.parametrize("workers", [0, 1])
async def test_a_skip_fraction_is_of_the_samples_read(workers: int) -> None:
    def loader(stream: Any, size: int, limit: float) -> Any:
        return DataLoader(stream, size, num_workers=workers, on_error=Skip(limit))

    stream = from_iterable(range(8)).map(unlucky)
    with pytest.raises(FailureBudgetError, match="2 of 8 samples failed"):
        await beside(lambda: list(loader(stream, 1000, 0.1)))
    refilled = loader(stream.epoch_length(6), 6, 0.3)
    assert [len(batch) for batch in await beside(lambda: list(refilled))] == [6]


# -- what streams do in advance, in threads, and without tasks -------------------------


def numbers(count: int = 40) -> Any:
    return from_iterable(range(count))


async def test_an_async_map_refills_as_calls_end() -> None:
    """Without a pull, but no further than twice its concurrency."""
    started: list[int] = []
    reached = {count: asyncio.Event() for count in (4, 8)}
    release = asyncio.Event()

    async def call(number: int) -> int:
        started.append(number)
        for count, event in reached.items():
            if len(started) == count:
                event.set()
        if number:
            await release.wait()
        return number

    iterator = aiter(numbers(100).map(call, concurrency=4))
    assert await iterator.pull(1) == [0]
    await asyncio.wait_for(reached[4].wait(), 10)
    release.set()
    await asyncio.wait_for(reached[8].wait(), 10)  # nobody pulls
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(started) <= 1 + 2 * 4
    await iterator.aclose()


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    counts: dict[int, int] = {}
    take = ShuffledIndices.take

    def counted(order: ShuffledIndices, start: int, stop: int) -> Any:
        thread = threading.get_ident()
        counts[thread] = counts.get(thread, 0) + stop - start
        return take(order, start, stop)

    monkeypatch.setattr(ShuffledIndices, "take", counted)
    return counts


async def test_long_orders_are_shuffled_in_a_thread(looked_up: dict[int, int]) -> None:
    here = threading.get_ident()
    made = Memory(list, made=[[shard] for shard in range(5000)])
    shards: ShardedStream[int] = ShardedStream(made, shuffle=True)
    assert len((await read(shards, 3))[0]) == 3
    assert sum(looked_up.values()) == 5000
    window = numbers(5000).shuffle(5000)
    assert sorted((await read(window))[0]) == [*range(5000)]
    assert sum(looked_up.values()) == 10000
    assert here not in looked_up
    await read(numbers(100).shuffle(50))  # a short one is not worth a thread
    assert looked_up[here] == 100


async def test_no_sample_waits_for_the_next_one() -> None:
    more = asyncio.Event()

    async def live() -> AsyncIterator[int]:
        for number in range(20):
            yield number
        await more.wait()
        yield 20

    iterator = aiter(from_async_iterable(live))
    for number in range(20):
        assert await asyncio.wait_for(anext(iterator), 10) == number
    more.set()
    assert await anext(iterator) == 20
    await iterator.aclose()


# -- shards that can be read when a state is saved, or loaded, and not both ------------

# A step that has read ahead counts samples from its start, and an unreadable shard is
# one failed sample there: skipping the same count would lose or repeat samples.

GOOD = {f"{shard}-{place}" for shard in (0, 1, 3, 4) for place in range(5)}
LOST = {f"2-{place}" for place in range(5)}


async def same(sample: Any) -> Any:
    return sample


def lines(folder: Path, **options: Any) -> Any:
    for shard in range(5):
        text = "".join(f"{shard}-{place}\n" for place in range(5))
        (folder / f"{shard}.txt").write_text(text)
    return TextDataset([str(folder / f"{shard}.txt") for shard in range(5)], **options)


def number_of(line: str) -> list[int]:
    return [int(line.replace("-", ""))]


def lines_of(sample: Any) -> list[str]:
    tokens = sample["input_ids"].tolist()
    return [f"{n // 10}-{n % 10}" for n in tokens if n >= 0]


CHAINS: dict[str, Callable[[Path], Any]] = {
    "one by one": lines,
    "lanes": lambda folder: lines(folder, interleave=2),
    "map": lambda folder: lines(folder).map(same),
    "mix": lambda folder: lines(folder).mix(from_iterable("abcdef")),
    "shuffle": lambda folder: lines(folder).shuffle(8),
    "batch": lambda folder: lines(folder).batch(7),
    "pack": lambda folder: (
        lines(folder).map(number_of).pack(3, last="pad", pad=-1).map(lines_of)
    ),
    "best fit": lambda folder: (
        lines(folder).map(number_of).pack(3, "best_fit", window=7, pad=-1).map(lines_of)
    ),
    "readers": lambda folder: lines(folder, interleave=2).readers(2),
    "all": lambda folder: lines(folder).shuffle(4).map(same).batch(2).readers(2),
}


async def read_all(stream: Any, count: int | None = None, state: Any = None) -> Any:
    """Return samples, texts of errors, and the state after ``count`` of both."""
    stream = stream.shard(0, 1)
    mixed, state = await shards.read(stream, count, state, errors=FileNotFoundError)
    errors = [str(x) for x in mixed if isinstance(x, FileNotFoundError)]
    samples = [x for x in mixed if not isinstance(x, FileNotFoundError)]
    flat = [x if isinstance(x, list) else [x] for x in samples]
    return [*itertools.chain.from_iterable(flat)], errors, state


def hide(folder: Path, *, is_hidden: bool) -> None:
    names = ["2.txt", "hidden"]
    before, after = names if is_hidden else names[::-1]
    (folder / before).rename(folder / after)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("gone", [False, True])
async def test_a_stream_with_vanished_shards_resumes_exactly_or_fails(
    name: str, gone: bool, tmp_path: Path
) -> None:
    refused = 0
    for count in range(1, 12):
        stream = CHAINS[name](tmp_path)
        if gone:
            hide(tmp_path, is_hidden=True)
        before, errors, state = await read_all(stream, count)
        hide(tmp_path, is_hidden=not gone)
        try:
            after, more, _ = await read_all(stream, None, state)
        except ShardChangedError as error:
            assert "2.txt" in str(error) or "now it can;" in str(error)  # noqa: PT017
            refused += 1
        else:
            good = sorted({*before, *after} - {*"abcdef"} - LOST)
            assert good == sorted(GOOD)
            assert len({*before, *after}) == len([*before, *after])
            assert errors or more or {*before, *after} >= LOST
        hide(tmp_path, is_hidden=False) if not gone else None
    assert refused < 11


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAINS)
async def test_shards_that_stay_missing_resume_exactly(
    name: str, tmp_path: Path
) -> None:
    stream = CHAINS[name](tmp_path)
    hide(tmp_path, is_hidden=True)
    whole, _, _ = await read_all(stream)
    for count in range(1, 12):
        before, errors, state = await read_all(stream, count)
        after, more, _ = await read_all(stream, None, state)
        assert [*before, *after] == whole
        assert len(errors) + len(more) >= 1


async def test_a_vanished_shard_cannot_be_skipped(tmp_path: Path) -> None:
    stream = lines(tmp_path).shuffle(20)
    _, _, state = await read_all(stream, 3)
    hide(tmp_path, is_hidden=True)
    stream.load_state_dict(state)
    iterator = aiter(stream)
    for _ in range(2):
        with pytest.raises(ShardChangedError, match=r"number 1 could be .*2\.txt"):
            await anext(iterator)
    assert iterator.state_dict()["streams"] == state["streams"]
    await iterator.aclose()
    stream.load_state_dict(state)
    loader: Any = DataLoader(stream, 4, **SKIP)
    with pytest.raises(ShardChangedError, match="restart the epoch"):
        await beside(lambda: list(loader))


async def test_a_pass_that_was_lost_is_not_repeated(tmp_path: Path) -> None:
    """The stream does not end silently, even if that was known when saving."""
    (tmp_path / "a").touch()
    stream = TextDataset(["a"], store=tmp_path).repeat()
    (tmp_path / "a").unlink()
    _, errors, state = await read_all(stream, 1)
    assert len(errors) == 1
    stream.load_state_dict(state)
    iterator = aiter(stream)
    with pytest.raises(DatasetError, match="no such file") as caught:
        await anext(iterator)
    assert any("not repeated" in note for note in caught.value.__notes__)
    await iterator.aclose()


@pytest.mark.parametrize("limit", [1, 2, 5])
async def test_skip_reports_each_lost_shard(limit: int, tmp_path: Path) -> None:
    stream = lines(tmp_path, interleave=5).skip(12)
    for name in ("0.txt", "1.txt", "3.txt"):
        (tmp_path / name).unlink()

    def show(sample: Any) -> Any:
        return sample if type(sample) is str else "lost"

    whole, _ = await shards.pulled(stream.shard(0, 1), [limit], show=show)
    assert whole == ["lost"] * 3 + [
        "4-4"
    ]  # nine samples of the remaining shards are skipped
    for count in range(len(whole) + 1):
        part = stream.shard(0, 1)
        head, state = await shards.pulled(part, [limit], count, show=show)
        rest, _ = await shards.pulled(part, [limit], state=state, show=show)
        assert head + rest == whole


@pytest.mark.parametrize("size", [4, 30])
async def test_lost_shards_of_dropped_batches_count(size: int, tmp_path: Path) -> None:
    stream = lines(tmp_path).batch(size, drop_last=True)
    (tmp_path / "4.txt").unlink()
    samples, errors, _ = await read_all(stream)
    assert (len(samples), len(errors)) == (20 // size * size, 1)
    for count in range(20 // size + 2):
        before, errors, state = await read_all(stream, count)
        after, more, _ = await read_all(stream, None, state)
        assert [*before, *after] == samples
        assert len(errors) + len(more) == 1


def unsteady(fails: list[bool]) -> Callable[[str], str]:
    def function(line: str) -> str:
        if fails[0] and line == "0-1":
            raise FileNotFoundError(line)
        return line

    return function


async def test_a_failed_call_may_succeed_after_resuming(tmp_path: Path) -> None:
    """Positions stay; a batch whose failed sample was delivered is not dropped."""
    fails = [True]
    for stream in (
        lines(tmp_path).map(unsteady(fails)).shuffle(8),
        lines(tmp_path).map(unsteady(fails)).batch(5),
    ):
        fails[0] = True
        before, errors, state = await read_all(stream, 1)
        fails[0] = False
        after, _, _ = await read_all(stream, None, state)
        assert len({*before, *after}) >= 24
    assert (before, len(errors), after[0]) == ([], 1, "0-0")
