"""Streams that repeat, and epochs of a given length, which continue for each reader."""

import itertools
import json
from collections import Counter
from collections.abc import Callable
from itertools import compress
from pathlib import Path
from typing import Any

import pytest
import torch

from aioloader import DataLoader, merge_states
from aioloader.datasets import TextDataset, from_iterable
from aioloader.errors import StateMismatchError
from beside import beside
from datasets.ranks import lines, of_ranks
from datasets.shards import items, parquet, write_lines


def in_workers(count: int) -> dict[str, Any]:
    return {"num_workers": count, "fetch": "workers"} if count else {}


def ranked(stream: Any, ranks: int, **options: Any) -> list[Any]:
    return of_ranks(stream, ranks, **{"batch_size": 4, "collate_fn": list, **options})


def numbers(count: int = 10) -> Any:
    return from_iterable(range(count))


async def test_repeat_shuffles_each_pass() -> None:
    assert await items(numbers(3).repeat(2)) == [0, 1, 2] * 2
    assert await items(numbers(3).repeat().take(7)) == [0, 1, 2, 0, 1, 2, 0]
    once, first = numbers(20).shuffle(20), await items(numbers(20).shuffle(20))
    for stream in (once.repeat(4), once.repeat(2).repeat(2)):
        samples = await items(stream)
        passes = [samples[start : start + 20] for start in range(0, 80, 20)]
        assert passes[0] == first
        assert len({tuple(order) for order in passes}) == 4
        assert all(sorted(order) == [*range(20)] for order in passes)


async def test_shards_are_shuffled_in_each_pass(tmp_path: Path) -> None:
    samples = await items(lines(tmp_path, shuffle=True).repeat(2))
    half = len(samples) // 2
    assert sorted(samples[:half]) == sorted(samples[half:])
    assert samples[:half] != samples[half:]


async def test_an_empty_pass_is_not_the_end(tmp_path: Path) -> None:
    """In the next pass, this reader may have a shard with samples."""
    paths = write_lines(tmp_path, (0, 5))
    stream = TextDataset(paths, shuffle=True).repeat(9)
    passes = [await items(stream.shard(rank, 2)) for rank in range(2)]
    assert len(passes[0]) + len(passes[1]) == 5 * 9
    assert min(map(len, passes)) >= 5


async def test_repeating_no_samples_is_an_error() -> None:
    def refuse(number: int) -> int:
        raise OSError(f"cannot read {number}")

    loader: Any = DataLoader(numbers(3).map(refuse).repeat(), 2, on_error="skip")
    with pytest.raises(OSError, match="cannot read 2"):
        await beside(lambda: list(loader))
    for stream in (numbers(0).repeat(), numbers(0).epoch_length(5)):
        with pytest.raises(ValueError, match="0 of 1 had no samples in 8 passes"):
            await items(stream)


async def test_an_empty_pass_after_a_lost_sample_is_no_error() -> None:
    """The epoch numbers of the passes may seed NumPy."""
    passes, epochs = iter([[0, 1], [], [2]]), list[int]()

    class Source:
        set_epoch = staticmethod(epochs.append)
        __iter__ = staticmethod(lambda: iter(next(passes)))

    stream = from_iterable(Source()).map(lambda n: n // n + n).repeat(3)
    loader: Any = DataLoader(stream, 2, on_error="skip")
    assert await beside(lambda: torch.cat([*loader]).tolist()) == [2, 3]
    assert epochs[0] == 0
    assert all(0 < epoch < 1 << 31 for epoch in epochs[1:])


async def test_a_rank_without_samples_is_an_error() -> None:
    """In endless streams, too: other ranks would wait for it forever."""
    part = numbers().filter(lambda number: number % 2).repeat().shard(0, 2)
    with pytest.raises(ValueError, match="reader 0 of 2 had no samples in 8 passes"):
        await items(part)


def loaders(stream: Any, world_size: int, **options: Any) -> list[list[Any]]:
    batches = []
    for loader in ranked(stream, world_size, collate_fn=None, **options):
        with loader:
            batches.append([_listed(batch) for batch in loader])
    return batches


def _listed(batch: Any) -> Any:
    if isinstance(batch, (tuple, list)):
        return [part.tolist() for part in batch]
    return batch.tolist()


def padded(stream: Any, size: int, rank: int, ranks: int, **options: Any) -> Any:
    """Return the loader of one rank, of global batches of a size."""
    asked: Any = {"rank": rank, "world_size": ranks, "tail": "pad", **options}
    return DataLoader(stream, size // ranks, **asked)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"on_error": "skip"}])
@pytest.mark.parametrize(("first", "second"), [(3, 1), (3, 2), (3, 6), (1, 2)])
def test_masks_mark_only_padding_on_other_ranks(
    first: int, second: int, options: Any
) -> None:
    """At the end, however many ranks began the epoch."""
    stream = numbers(40).readers(6).epoch_length(13)
    states, delivered = [], []
    for rank in range(first):
        with padded(stream, 6, rank, first, **options) as loader:
            delivered += _listed(next(iter(loader)))[0]
            states.append(json.loads(json.dumps(loader.state_dict())))
    for rank in range(second):
        with padded(stream, 6, rank, second, **options) as loader:
            loader.load_state_dict(merge_states(states))
            for samples, mask in map(_listed, loader):
                delivered += [*compress(samples, mask)]
    assert sorted(delivered) == [*range(13)]


def of_layout(stream: Any, ranks: int, workers: int) -> list[Any]:
    """Return the loaders of all ranks, of global batches of twelve samples."""
    options = {"batch_size": 12 // ranks, "on_error": "skip"}
    return ranked(stream, ranks, **options, **in_workers(workers))


def refuse(number: int) -> int:
    if number % 7 in {2, 3}:
        raise ValueError(f"no {number}")
    return number


GOOD = [number for number in range(128) if number % 7 not in {2, 3}]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*take turns at:UserWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((2, 0), (2, 2)),  # (ranks, workers)
        ((2, 0), (1, 0)),
        ((1, 0), (3, 0)),
        ((2, 2), (3, 0)),
        pytest.param((1, 2), (4, 1), marks=pytest.mark.fuzz),
    ],
)
def test_failed_samples_do_not_count_in_another_layout(
    first: tuple[int, int], second: tuple[int, int], rounds: int
) -> None:
    """Nor where ranks share readers, nor on one rank."""
    stream = numbers(128).shuffle(18).map(refuse).epoch_length(84)
    delivered, states = list[int](), []
    made = of_layout(stream, *first)
    iterators = [iter(loader) for loader in made]
    for _ in range(rounds * max(1, first[1])):  # all workers in step
        for iterator in iterators:
            delivered += next(iterator)
    for loader in made:
        states.append(json.loads(json.dumps(loader.state_dict())))
        loader.close()
    made = of_layout(stream, *second)
    for loader in made:
        loader.load_state_dict(merge_states(states))
    rest = [[*loader] for loader in made]
    assert len({len(batches) for batches in rest}) == 1
    delivered += [number for batches in rest for batch in batches for number in batch]
    assert len(delivered) == len({*delivered}) == 84
    assert {*delivered} <= {*GOOD}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_next_epoch_starts_with_unused_samples(ranks: int) -> None:
    """No good sample repeats before all have come, also if ranks share readers."""
    stream = numbers(128).map(refuse).readers(6).epoch_length(30)
    delivered = list[int]()
    made = of_layout(stream, ranks, 0)
    for _ in range(3):
        parts = [[*loader] for loader in made]
        assert len({len(part) for part in parts}) == 1
        delivered += [number for part in parts for batch in part for number in batch]
    assert len(delivered) == len({*delivered}) == 90
    assert {*delivered} <= {*GOOD}
    for loader in made:
        loader.close()


def test_a_state_is_bound_to_its_tail() -> None:
    def make(tail: Any) -> Any:
        stream = numbers(40).readers(2).epoch_length(21)
        return DataLoader(stream, 2, rank=0, world_size=2, tail=tail)

    saved = []
    for tail in (None, "drop"):
        with make(tail) as loader:
            next(iter(loader))
            saved.append(json.loads(json.dumps(loader.state_dict())))
    wrapped, dropped = saved
    said = "saved with tail='drop', but the loader has tail='wrap'"
    with make("wrap") as loader, pytest.raises(StateMismatchError, match=said):
        loader.load_state_dict(dropped)
    with make("wrap") as loader:
        loader.load_state_dict(wrapped)


async def test_steps_except_filters_keep_a_known_length() -> None:
    assert numbers().epoch_length(4).shuffle(2).map(str).total() == 4
    assert numbers().epoch_length(4).decode().total() == 4
    assert numbers().epoch_length(4).filter(bool).total() is None


def test_padded_batches_of_columns_have_masks(tmp_path: Path) -> None:
    stream, batches = parquet(tmp_path).epoch_length(9), []
    for rank in range(2):
        with padded(stream, 8, rank, 2, collate_fn=len) as loader:
            batches.append([(size, mask.tolist()) for size, mask in loader])
    assert batches == [[(4, [True] * 4), (1, [True])], [(4, [True] * 4), (1, [False])]]


SHARDS, LINES = 16, 10
IN_WORKERS = in_workers(2)


def equal_lines(folder: Path, **options: Any) -> Any:
    write_lines(folder, [LINES] * SHARDS, "{:02}{}")
    return TextDataset(str(folder / "*.txt"), **options)


def shuffled(folder: Path) -> Any:
    return equal_lines(folder, shuffle=True, interleave=4).shuffle(7)


Make = Callable[[Path, int], Any]
STREAMS: dict[str, Make] = {
    "plain": lambda folder, n: equal_lines(folder).epoch_length(n),
    "shuffled": lambda folder, n: shuffled(folder).epoch_length(n),
    "steps": lambda folder, n: shuffled(folder).epoch_length(n).map(str).shuffle(5),
    "readers": lambda folder, n: shuffled(folder).readers(4).epoch_length(n),
    "shared": lambda folder, n: shuffled(folder).readers(2).epoch_length(n),
}


def flat(batches: Any) -> list[Any]:
    return [*itertools.chain.from_iterable(batches)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* take turns at")
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", STREAMS)
def test_short_epochs_continue_each_other(
    kind: str, ranks: int, tmp_path: Path
) -> None:
    short, long = (STREAMS[kind](tmp_path, n) for n in (48, 240))
    for part, single in zip(ranked(short, ranks), ranked(long, ranks), strict=True):
        epochs = [flat(part) for _ in range(5)]
        assert [*map(len, epochs)] == [48 // ranks] * 5
        parts, whole = flat(epochs), flat(single)
        assert sorted(parts) == sorted(whole)
        assert parts == whole or kind == "steps"


@pytest.mark.slow
@pytest.mark.parametrize("tail", ["wrap", "drop", "uneven", "pad"])
@pytest.mark.parametrize(("ranks", "options"), [(1, {}), (3, {}), (2, IN_WORKERS)])
def test_epochs_deliver_all_samples_equally_often(
    ranks: int, options: Any, tail: str, tmp_path: Path
) -> None:
    """Except in the last pass of a reader, however long an epoch is."""
    for length in (31,) if options else (7, 31, 50, 163):
        stream = equal_lines(tmp_path).epoch_length(length)
        for loader in ranked(stream, ranks, tail=tail, **options):
            counts: Counter[Any] = Counter()
            for batch in itertools.chain.from_iterable(loader for _ in range(5)):
                kept = batch[1] if tail == "pad" else [True] * len(batch)
                samples = batch[0] if tail == "pad" else batch
                counts.update(itertools.compress(samples, kept))
            total = sum(counts.values()) / (SHARDS * LINES / ranks)
            assert max(counts.values()) - min(counts.values()) <= 1
            assert min(counts.values()) >= int(total) - 1


@pytest.mark.filterwarnings("ignore:.* take turns at")
def test_uneven_ranks_share_readers_evenly() -> None:
    made = ranked(numbers(40).readers(4).epoch_length(41), 6, tail="uneven")
    counts = Counter(flat(flat(loader) for _ in range(4) for loader in made))
    assert {*counts.values()} == {4, 5}


@pytest.mark.slow
@pytest.mark.parametrize("stop", [2, 6])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_epochs_resume_on_any_ranks(stop: int, world_size: int, tmp_path: Path) -> None:
    stream = shuffled(tmp_path).readers(4).epoch_length(48)
    (loader,) = ranked(stream, 1, batch_size=8)
    epochs = [[{*batch} for batch in loader] for _ in range(4)]
    states = []
    for first in ranked(stream, 2):
        list(first)
        list(itertools.islice(first, stop) if stop < 6 else first)
        states.append(json.loads(json.dumps(first.state_dict())))
    again = ranked(stream, world_size, batch_size=8 // world_size)
    for loader in again:
        loader.load_state_dict(merge_states(states))
    for rest in ([epochs[1][stop:]] if stop < 6 else []) + epochs[2:]:
        parts = zip(*again, strict=True)
        assert [{*flat(batches)} for batches in parts] == rest


@pytest.mark.parametrize("options", [{}, {**IN_WORKERS, "persistent_workers": True}])
def test_a_break_loses_nothing(options: Any, tmp_path: Path) -> None:
    """Undelivered samples come next, even if not all workers had begun."""
    stream = equal_lines(tmp_path, shuffle=True).epoch_length(40)
    (loader,) = ranked(stream, 1, **options)
    with loader:
        samples = next(iter(loader))
        assert all(iter(loader) for _ in range(2))  # nothing is taken from them
        for count in (1, 3, 10, 11, 11):
            samples += flat(itertools.islice(loader, count))
    counts = Counter(samples)
    assert max(counts.values()) - min(counts.values()) <= 1 + bool(options)
    assert len(samples) - len(counts) <= 8 * bool(options)


async def test_each_loader_has_its_own_position(tmp_path: Path) -> None:
    stream = equal_lines(tmp_path).epoch_length(48)
    assert await items(stream) == await items(stream)
    loader, second = (ranked(stream, 1)[0] for _ in range(2))
    first = await beside(lambda: flat(loader))
    assert await beside(lambda: flat(second)) == first
    again = await beside(lambda: flat(loader))
    assert again == await beside(lambda: flat(second)) != first


def test_the_first_set_epoch_seeds_the_shuffles(tmp_path: Path) -> None:
    """Later numbers only name the epochs."""
    stream = STREAMS["shuffled"](tmp_path, 48)

    def epochs(*numbers: int) -> list[list[Any]]:
        (loader,) = ranked(stream, 1)
        orders = []
        for number in numbers:
            loader.set_epoch(number)
            orders.append(flat(loader))
            assert loader.state_dict()["epoch"] == number + 1
        return orders

    (loader,) = ranked(stream, 1)
    plain = [flat(loader) for _ in range(4)]
    assert epochs(0, 1, 2, 3) == epochs(0, 5, 6, 0) == plain
    assert not {*map(tuple, epochs(5, 6))} & {*map(tuple, plain)}


@pytest.mark.slow
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("tail", ["wrap", "drop", "uneven", "pad"])
@pytest.mark.parametrize(("ranks", "options"), [(1, {}), (3, {}), (2, IN_WORKERS)])
def test_len_counts_the_batches_of_an_epoch(
    ranks: int, options: Any, tail: str, drop_last: bool, tmp_path: Path
) -> None:
    options = {**options, "tail": tail, "drop_last": drop_last}
    for length in (7,) if options else (1, 7, 31, 48):
        stream = equal_lines(tmp_path).epoch_length(length).map(str)
        for loader in ranked(stream, ranks, **options):
            assert [len(loader)] * 2 == [len([*loader]) for _ in range(2)]
    with pytest.raises(TypeError, match="has no len"):
        len(DataLoader(equal_lines(tmp_path)))


def test_shards_added_between_epochs_are_refused(tmp_path: Path) -> None:
    """They are not in the pass under way."""
    (loader,) = ranked(equal_lines(tmp_path).epoch_length(48), 1)
    list(loader)
    (tmp_path / "99.txt").write_text("more\n")
    with pytest.raises(StateMismatchError, match=r"16 shards, but .* has 17"):
        list(loader)
