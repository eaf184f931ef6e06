"""Epochs of a given length go on, for each reader, where the last one stopped."""

import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aioloader import DataLoader, merge_states
from aioloader.datasets import TextDataset
from aioloader.errors import StateMismatchError
from datasets.shards import read, write_lines

SHARDS, LINES = 16, 10
IN_WORKERS = {"num_workers": 2, "fetch": "workers"}


def lines(folder: Path, **options: Any) -> Any:
    write_lines(folder, [LINES] * SHARDS, "{:02}{}")
    return TextDataset(str(folder / "*.txt"), **options)


def shuffled(folder: Path) -> Any:
    return lines(folder, shuffle=True, interleave=4).shuffle(7)


Make = Callable[[Path, int], Any]
STREAMS: dict[str, Make] = {
    "plain": lambda folder, n: lines(folder).epoch_length(n),
    "shuffled": lambda folder, n: shuffled(folder).epoch_length(n),
    "steps": lambda folder, n: shuffled(folder).epoch_length(n).map(str).shuffle(5),
    "readers": lambda folder, n: shuffled(folder).readers(4).epoch_length(n),
    "shared": lambda folder, n: shuffled(folder).readers(2).epoch_length(n),
}


def flat(batches: Any) -> list[Any]:
    return [*itertools.chain.from_iterable(batches)]


def of_ranks(stream: Any, ranks: int, **options: Any) -> list[Any]:
    options = {"batch_size": 4, "collate_fn": list, "world_size": ranks, **options}
    return [DataLoader(stream, rank=rank, **options) for rank in range(ranks)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* take turns at")
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", STREAMS)
def test_epochs_are_one_reading(kind: str, ranks: int, tmp_path: Path) -> None:
    short, long = (STREAMS[kind](tmp_path, n) for n in (48, 240))
    for one, other in zip(of_ranks(short, ranks), of_ranks(long, ranks), strict=True):
        epochs = [flat(one) for _ in range(5)]
        assert [*map(len, epochs)] == [48 // ranks] * 5
        found, whole = flat(epochs), flat(other)
        assert sorted(found) == sorted(whole)
        assert found == whole or kind == "steps"


@pytest.mark.slow
@pytest.mark.parametrize("tail", ["wrap", "drop", "uneven", "pad"])
@pytest.mark.parametrize(("ranks", "options"), [(1, {}), (3, {}), (2, IN_WORKERS)])
def test_each_sample_as_often(
    ranks: int, options: Any, tail: str, tmp_path: Path
) -> None:
    """But for the last pass of its reader, however long an epoch is."""
    for length in (31,) if options else (7, 31, 50, 163):
        stream = lines(tmp_path).epoch_length(length)
        for loader in of_ranks(stream, ranks, tail=tail, **options):
            found: Counter[Any] = Counter()
            for batch in itertools.chain.from_iterable(loader for _ in range(5)):
                kept = batch[1] if tail == "pad" else [True] * len(batch)
                samples = batch[0] if tail == "pad" else batch
                found.update(itertools.compress(samples, kept))
            total = sum(found.values()) / (SHARDS * LINES / ranks)
            assert max(found.values()) - min(found.values()) <= 1
            assert min(found.values()) >= int(total) - 1


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 1, 5, 11, 12])
@pytest.mark.parametrize(
    ("kind", "options"),
    [("shuffled", {}), ("shuffled", IN_WORKERS), ("steps", {}), ("readers", {})],
)
def test_resumes_anywhere(kind: str, options: Any, at: int, tmp_path: Path) -> None:
    stream = STREAMS[kind](tmp_path, 48)
    (loader,) = of_ranks(stream, 1, **options)
    epochs = [[*loader] for _ in range(4)]
    (first,) = of_ranks(stream, 1, **options)
    found = [[*first], [*itertools.islice(first, at)] if at < 12 else [*first]]
    (again,) = of_ranks(stream, 1, **options)
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    if at < 12:
        found[1] += [*again]
    found += [[*again] for _ in range(2)]
    assert found == epochs


@pytest.mark.slow
@pytest.mark.parametrize("at", [2, 6])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_on_other_ranks(at: int, world_size: int, tmp_path: Path) -> None:
    stream = shuffled(tmp_path).readers(4).epoch_length(48)
    (loader,) = of_ranks(stream, 1, batch_size=8)
    epochs = [[{*batch} for batch in loader] for _ in range(4)]
    states = []
    for first in of_ranks(stream, 2):
        list(first)
        list(itertools.islice(first, at) if at < 6 else first)
        states.append(json.loads(json.dumps(first.state_dict())))
    again = of_ranks(stream, world_size, batch_size=8 // world_size)
    for one in again:
        one.load_state_dict(merge_states(states))
    for rest in ([epochs[1][at:]] if at < 6 else []) + epochs[2:]:
        parts = zip(*again, strict=True)
        assert [{*flat(batches)} for batches in parts] == rest


@pytest.mark.parametrize("options", [{}, {**IN_WORKERS, "persistent_workers": True}])
def test_a_break_loses_nothing(options: Any, tmp_path: Path) -> None:
    """What was not delivered is the next epoch's; also before each worker has begun."""
    stream = lines(tmp_path, shuffle=True).epoch_length(40)
    (loader,) = of_ranks(stream, 1, **options)
    with loader:
        found = next(iter(loader))
        assert all(iter(loader) for _ in range(2))  # nothing is taken from them
        for count in (1, 3, 10, 10, 10):
            found += flat(itertools.islice(loader, count))
    counts = Counter(found)
    assert max(counts.values()) - min(counts.values()) <= 1 + bool(options)
    assert len(found) - len(counts) <= 8 * bool(options)


async def test_without_a_loader(tmp_path: Path) -> None:
    stream = lines(tmp_path).epoch_length(48)
    assert (await read(stream))[0] == (await read(stream))[0]


def test_the_position_is_the_loaders(tmp_path: Path) -> None:
    stream = lines(tmp_path).epoch_length(48)
    one, other = (of_ranks(stream, 1)[0] for _ in range(2))
    first = flat(one)
    assert flat(other) == first
    assert flat(one) == flat(other) != first


def test_set_epoch_numbers(tmp_path: Path) -> None:
    """The first one is also the key of the shuffles."""
    stream = STREAMS["shuffled"](tmp_path, 48)

    def epochs(*numbers: int) -> list[list[Any]]:
        (loader,) = of_ranks(stream, 1)
        found = []
        for number in numbers:
            loader.set_epoch(number)
            found.append(flat(loader))
            assert loader.state_dict()["epoch"] == number + 1
        return found

    (loader,) = of_ranks(stream, 1)
    plain = [flat(loader) for _ in range(4)]
    assert epochs(0, 1, 2, 3) == epochs(0, 5, 6, 0) == plain
    assert not {*map(tuple, epochs(5, 6))} & {*map(tuple, plain)}


@pytest.mark.slow
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("tail", ["wrap", "drop", "uneven", "pad"])
@pytest.mark.parametrize(("ranks", "options"), [(1, {}), (3, {}), (2, IN_WORKERS)])
def test_len(
    ranks: int, options: Any, tail: str, drop_last: bool, tmp_path: Path
) -> None:
    options = {**options, "tail": tail, "drop_last": drop_last}
    for length in (7,) if options else (1, 7, 31, 48):
        stream = lines(tmp_path).epoch_length(length).map(str)
        for loader in of_ranks(stream, ranks, **options):
            assert [len(loader)] * 2 == [len([*loader]) for _ in range(2)]
    with pytest.raises(TypeError, match="has no len"):
        len(DataLoader(lines(tmp_path)))


def test_shards_that_are_added_between_epochs(tmp_path: Path) -> None:
    """They are not in the pass that goes on."""
    (loader,) = of_ranks(lines(tmp_path).epoch_length(48), 1)
    list(loader)
    (tmp_path / "99.txt").write_text("more\n")
    with pytest.raises(StateMismatchError, match=r"16 shards, but .* has 17"):
        list(loader)
