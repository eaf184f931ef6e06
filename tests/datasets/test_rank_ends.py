"""Ranks of a stream of unknown length end together, unless ``tail`` says otherwise."""

import asyncio
import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from hypothesis import given, settings
from hypothesis import strategies as st

from aioloader import DataLoader, merge_states
from aioloader._pipeline.evened import EvenedQueue
from aioloader._pipeline.ready import ReadyQueue
from aioloader.datasets import from_iterable
from aioloader.errors import BatchTimeoutError, DatasetError
from datasets.rank_process import ranks
from datasets.ranks import lines, numbers
from datasets.shards import write_lines
from python_process import python

pytestmark = pytest.mark.slow

dist: Any = torch.distributed


def a_store() -> Any:
    """Return a store that workers can reach, too."""
    return dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False
    )


def loader_of(
    stream: Any, store: Any, rank: int, ranks: int, **options: Any
) -> "DataLoader[Any]":
    asked: Any = {"collate_fn": list, "rank": rank, "world_size": ranks, **options}
    return DataLoader(stream.agree(store, timeout=30), **asked)


def side_by_side(job: Any, ranks: int) -> list[Any]:
    """Call a function of the rank for all ranks at once; return the results."""
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(job, range(ranks)))


def read_all(stream: Any, ranks: int, **options: Any) -> list[list[Any]]:
    store = a_store() if options.get("num_workers") else dist.HashStore()

    def read(rank: int) -> list[Any]:
        with loader_of(stream, store, rank, ranks, **options) as loader:
            return list(loader)

    return side_by_side(read, ranks)


def masked(batches: list[Any]) -> list[Any]:
    """Return the samples of padded batches without the padding."""
    return [
        sample
        for batch, mask in batches
        for sample, is_kept in zip(batch, mask.tolist(), strict=True)
        if is_kept
    ]


TAILS = pytest.mark.parametrize("tail", ["drop", "wrap", "pad"])


# -- what must be said ----------------------------------------------------------------


def test_a_finite_stream_needs_a_tail() -> None:
    said = r"rank 1 of 3, .* repeat\(\) .* epoch_length\(n\) as .* tail='uneven'"
    part: Any
    for stream, part in (
        (numbers(), {"rank": 1, "world_size": 3}),
        (numbers().shard(1, 3), {}),
        (numbers().repeat().take(4).shard(1, 3), {}),
        (numbers().epoch_length(9).filter(abs).shard(1, 3), {}),
        (numbers().mix(numbers().repeat(), until="first").shard(1, 3), {}),
    ):
        loader: Any = DataLoader(stream, **part)
        with pytest.raises(ValueError, match=said):
            iter(loader)
        with pytest.raises(ValueError, match=said):
            aiter(loader)


def test_endless_or_fixed_epochs_need_no_tail() -> None:
    for stream, options in (
        (numbers().repeat().shuffle(3).map(abs), {}),
        (numbers().mix(numbers().repeat()), {}),
        (numbers().epoch_length(8), {}),
        (numbers(), {"tail": "uneven"}),
        (numbers(), {"rank": 0, "world_size": 1}),
    ):
        asked: Any = {"rank": 0, "world_size": 2, **options}
        with DataLoader(stream, **asked) as loader:
            assert next(iter(loader)) >= 0


@TAILS
def test_a_tail_needs_a_store(tail: Any) -> None:
    loader: Any = DataLoader(numbers(), rank=0, world_size=2, tail=tail)
    with pytest.raises(ValueError, match=r"initialize torch.*agree\(store\)"):
        iter(loader)


# -- the law --------------------------------------------------------------------------


def check_law(stream: Any, ranks: int, **options: Any) -> None:
    """Check that all ranks end with the first or the last one, and their samples."""
    uneven = read_all(stream, ranks, tail="uneven", **options)
    lengths = [len(batches) for batches in uneven]
    dropped = read_all(stream, ranks, tail="drop", **options)
    assert dropped == [batches[: min(lengths)] for batches in uneven]
    if not min(lengths):
        return
    wrapped, padded = (
        read_all(stream, ranks, tail=tail, **options) for tail in ("wrap", "pad")
    )
    size = options["batch_size"]
    for mine, full, real in zip(uneven, wrapped, padded, strict=True):
        own = sorted(itertools.chain(*mine))
        assert {len(batch) for batch in full} == {size}
        assert [batch for batch, _ in real] == full
        assert sorted(masked(real)) == own
        assert {*itertools.chain(*full)} == {*own}
    assert [len(batches) for batches in wrapped + padded] == [max(lengths)] * 2 * ranks


def parts(counts: list[int]) -> Any:
    """Return a stream of which reader r of R has ``counts[r]`` samples."""
    positions = [
        reader + number * len(counts)
        for reader, count in enumerate(counts)
        for number in range(count)
    ]
    last = max(positions, default=-1) + 1
    return from_iterable(range(last)).filter({*positions}.__contains__)


COUNTS = st.lists(st.integers(0, 25), min_size=2, max_size=4)


@settings(max_examples=max(12, settings().max_examples // 8))
@given(
    COUNTS, st.integers(1, 5), st.sampled_from([1, 3, 64]), st.sampled_from([None, 2])
)
def test_tails_end_ranks_together_in_any_layout(
    counts: list[int], size: int, window: int, ahead: int | None
) -> None:
    stream = parts(counts).shuffle(window)
    check_law(stream, len(counts), batch_size=size, prefetch_factor=ahead)


@pytest.mark.parametrize("readers", [None, 6])
def test_tails_hold_for_shuffled_shards(readers: int | None, tmp_path: Path) -> None:
    stream = lines(tmp_path, shuffle=True, interleave=3)
    stream = stream if readers is None else stream.readers(readers)
    check_law(stream, 3, batch_size=4)


def test_tails_hold_for_steps_after_epoch_length() -> None:
    """They make the length of an epoch unknown again."""
    stream = numbers(100).epoch_length(61).filter(lambda number: number % 5)
    check_law(stream, 2, batch_size=4)


@pytest.mark.parametrize("fetch", ["loader", "workers"])
@pytest.mark.parametrize("in_order", [True, False])
def test_tails_hold_with_workers(fetch: str, in_order: bool, tmp_path: Path) -> None:
    stream = lines(tmp_path, interleave=4)
    options: Any = {"num_workers": 2, "fetch": fetch, "in_order": in_order}

    def delivered(tail: str) -> list[list[Any]]:
        return read_all(stream, 2, batch_size=3, tail=tail, **options)

    uneven, padded = delivered("uneven"), delivered("pad")
    assert [len(batch) for batch in padded] == [max(map(len, uneven))] * 2
    every = [sample for batches in uneven for batch in batches for sample in batch]
    assert sorted([*masked(padded[0]), *masked(padded[1])]) == sorted(every)


@TAILS
def test_epochs_leave_no_keys_in_the_store(tail: Any) -> None:
    store = dist.HashStore()

    def read(rank: int) -> list[int]:
        with loader_of(
            parts([3, 9]), store, rank, 2, tail=tail, batch_size=2
        ) as loader:
            return [len(list(loader)) for _ in range(3)]

    for _ in range(2):
        assert side_by_side(read, 2) == [[2 if tail == "drop" else 5] * 3] * 2
        assert store.num_keys() == 0


def test_ranks_may_iterate_asynchronously(tmp_path: Path) -> None:
    stream, store = lines(tmp_path), dist.HashStore()

    def read(rank: int) -> list[Any]:
        async def all_of() -> list[Any]:
            async with loader_of(
                stream, store, rank, 3, tail="pad", batch_size=4
            ) as loader:
                return [batch async for batch in loader]

        return asyncio.run(all_of())

    whole = read_all(stream, 3, tail="pad", batch_size=4)  # imports what is needed
    delivered = side_by_side(read, 3)
    assert [plain(rank) for rank in delivered] == [plain(rank) for rank in whole]


def test_a_quickly_taken_last_batch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if its rank ends before the thread that made it continues."""
    hand_over, end_here = ReadyQueue.put, EvenedQueue.end_here
    ended = {f"rank {rank} of 2": threading.Event() for rank in range(2)}

    def waits(queue: Any, number: int, result: Any, **options: Any) -> None:
        hand_over(queue, number, result, **options)
        if number == 1:
            assert ended[queue.rounds.who].wait(20)

    def notes(queue: Any) -> None:
        end_here(queue)
        ended[queue.rounds.who].set()

    monkeypatch.setattr(ReadyQueue, "put", waits)
    monkeypatch.setattr(EvenedQueue, "end_here", notes)
    delivered = read_all(numbers(8).map(abs), 2, tail="pad", batch_size=2)
    assert [masked(batches) for batches in delivered] == [[0, 2, 4, 6], [1, 3, 5, 7]]


# -- resume ---------------------------------------------------------------------------


def left(
    stream: Any, ranks: int, stop: int, states: list[Any] | None = None, **options: Any
) -> tuple[list[Any], list[Any]]:
    """Return each rank's batches before ``stop``, and its state there."""
    store = dist.HashStore()

    def read(rank: int) -> tuple[list[Any], Any]:
        with loader_of(stream, store, rank, ranks, **options) as loader:
            if states is not None:
                loader.load_state_dict(states[rank])
            batches = list(itertools.islice(loader, stop))
            barrier.wait()  # all ranks read before any leaves
            return batches, json.loads(json.dumps(loader.state_dict()))

    barrier = threading.Barrier(ranks)
    both = side_by_side(read, ranks)
    return [batches for batches, _ in both], [state for _, state in both]


def plain(batches: list[Any]) -> Any:
    return [(x[0], x[1].tolist()) if isinstance(x, tuple) else x for x in batches]


@TAILS
@pytest.mark.parametrize("stop", [0, 1, 3, 4, 6])
def test_tails_resume_after_any_batch(tail: Any, stop: int) -> None:
    options: Any = {"tail": tail, "batch_size": 2}
    stream = parts([5, 12, 7]).shuffle(2)

    whole = read_all(stream, 3, **options)
    stop = min(stop, len(whole[0]))  # after it, the next epoch begins
    before, states = left(stream, 3, stop, **options)
    after, _ = left(stream, 3, 100, states, **options)
    for rank in range(3):
        assert plain(before[rank] + after[rank]) == plain(whole[rank])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_padded_epoch_resumes_on_other_ranks(ranks: int) -> None:
    stream = numbers(61).readers(4)

    before, states = left(stream, 2, 5, tail="pad", batch_size=4)
    state = merge_states(states)
    options: Any = {"tail": "pad", "batch_size": 8 // ranks}
    after, _ = left(stream, ranks, 100, [state] * ranks, **options)
    samples = [sample for rank in before + after for sample in masked(rank)]
    assert sorted(samples) == [*range(61)]
    assert len({len(rank) for rank in after}) == 1


# -- what goes wrong ------------------------------------------------------------------


@pytest.mark.parametrize("tail", ["wrap", "pad"])
def test_a_rank_without_samples_is_an_error(tail: Any) -> None:
    """It has nothing to repeat; with ``"drop"`` no rank has a batch."""

    with pytest.raises(ValueError, match="rank 0 of 2 has no samples"):
        read_all(parts([0, 4]), 2, tail=tail)
    assert read_all(parts([4, 0]), 2, tail="drop") == [[], []]
    assert read_all(parts([0, 0]), 2, tail=tail) == [[], []]


def test_a_rank_that_leaves_is_an_error() -> None:
    store = dist.HashStore()

    def read(rank: int) -> Any:
        with loader_of(numbers(), store, rank, 2, tail="drop") as loader:
            return len(list(itertools.islice(loader, 2 if rank else None)))

    with pytest.raises(DatasetError, match="rank 1 has left its iteration"):
        side_by_side(read, 2)


@pytest.mark.parametrize("own", [True, False])
def test_a_rank_that_does_not_come_is_a_timeout(own: bool) -> None:
    stream = numbers().agree(a_store(), timeout=0.3 if own else 30)
    options: Any = {"timeout": 0 if own else 0.3, "rank": 0, "world_size": 3}

    with DataLoader(stream, tail="drop", **options) as loader:
        said = "rank 0 of 3 has delivered 0 batches, and waits for ranks 1, 2"
        with pytest.raises(BatchTimeoutError, match=said):
            next(iter(loader))


@pytest.mark.parametrize("samples", [2, 4, 61])
@pytest.mark.parametrize("tail", ["drop", "wrap", "pad"])
def test_ranks_at_different_epochs_are_an_error(tail: Any, samples: int) -> None:
    """Whenever the ranks compare their places."""
    store = dist.HashStore()

    def read(rank: int) -> Any:
        options: Any = {"tail": tail, "batch_size": 2}
        with loader_of(numbers(samples), store, rank, 2, **options) as loader:
            loader.set_epoch(rank)
            for _ in loader:  # by the second batch, the ranks have compared
                for thread in threading.enumerate():
                    if thread.name == "aioloader-end":
                        thread.join(20)

    said = "rank 0 is at batch 0 of epoch 0; rank 1 is at batch 0 of epoch 1"
    with pytest.raises(DatasetError, match=said):
        side_by_side(read, 2)


def test_skipped_samples_of_one_rank_are_padded() -> None:
    def odd(number: int) -> int:
        if number % 2 and number > 20:
            raise ValueError(f"no {number}")
        return number

    options: Any = {"tail": "pad", "batch_size": 3, "on_error": "skip"}
    batches = read_all(numbers().map(odd), 2, **options)
    assert len({len(rank) for rank in batches}) == 1
    kept = [sample for rank in batches for sample in masked(rank)]
    assert sorted(kept) == [n for n in range(61) if n <= 20 or n % 2 == 0]


def test_ranks_end_together_after_a_failed_batch() -> None:
    def broken(number: int) -> int:
        if number == 12:
            raise ValueError("no 12")
        return number

    store = dist.HashStore()
    options: Any = {"tail": "drop", "batch_size": 2, "transform": broken}

    def read(rank: int) -> int:
        with loader_of(numbers(40), store, rank, 2, **options) as loader:
            iterator = iter(loader)
            for count in itertools.count():
                try:
                    if next(iterator, None) is None:
                        return count
                except ValueError:
                    continue
        raise AssertionError

    assert side_by_side(read, 2) == [10, 10]


# -- in real processes ----------------------------------------------------------------


def shards(folder: Path, *lengths: int) -> dict[str, Any]:
    write_lines(folder, lengths, "{}{:03}")
    return {"kind": "TextDataset", "addresses": str(folder / "*.txt")}


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    stream = shards(tmp_path, 300, 300)
    with ranks() as two:
        for rank in two:
            rank.send(do="begin", count=2, **stream)
        assert [len(rank.answer()) for rank in two] == [2, 2]
        two[1].end()
        assert "waits for rank 1 to report" in two[0].do(do="finish")


_LEFT_OPEN = """
import atexit, sys, threading

@atexit.register  # the first one is called last
def look():
    names = [thread.name for thread in threading.enumerate()]
    print("aioloader-end" in names, flush=True)

import torch.distributed as dist
from aioloader import DataLoader
from aioloader.datasets import from_iterable

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
stream = from_iterable(range(9)).agree(store)
iterator = iter(DataLoader(stream, rank=0, world_size=2, tail="pad"))
next(iterator)
if "drop" in sys.argv:
    del iterator
if "raise" in sys.argv:
    raise ValueError
"""


@pytest.mark.parametrize("how", ["keep", "drop", "raise"])
def test_python_exits_within_an_epoch(how: str) -> None:
    """A thread in a call of the store would abort it."""
    made = python("-W", "ignore", "-c", _LEFT_OPEN, how)
    assert (made.returncode, made.stdout) == (int(how == "raise"), "False\n")
