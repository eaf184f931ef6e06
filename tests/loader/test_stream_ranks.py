"""Streams dealt to ranks by the loader: one order, and one state of all ranks."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from aioloader import DataLoader, merge_states
from aioloader.datasets import TextDataset, from_iterable
from aioloader.errors import StateMismatchError

GLOBAL = 24
RANKS = (1, 2, 3, 4, 8)


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    """Return the paths of 24 shards of uneven lengths."""
    paths = []
    for shard in range(24):
        path = tmp_path / f"{shard:02}.txt"
        lines = (f"{shard}-{row}" for row in range(9 + shard % 5))
        path.write_text("\n".join(lines))
        paths.append(str(path))
    return paths


def loaders(dataset: Any, ranks: int, **options: Any) -> list[Any]:
    """Return the loaders of all ranks."""
    return [
        DataLoader(
            dataset,
            GLOBAL // ranks,
            rank=rank,
            world_size=ranks,
            collate_fn=list,
            **options,
        )
        for rank in range(ranks)
    ]


def in_step(loaders: list[Any], count: int | None = None) -> list[set[Any]]:
    """Return the global batches of ``count`` steps that all ranks take, or of all."""
    parts = [list(itertools.islice(loader, count)) for loader in loaders]
    return [
        set(itertools.chain.from_iterable(filter(None, batches)))
        for batches in itertools.zip_longest(*parts)
    ]


def saved(loaders: list[Any], count: int) -> tuple[list[set[Any]], Any]:
    """Return the first global batches, and the state of all ranks behind them."""
    iterators = [iter(loader) for loader in loaders]
    batches = [
        set(itertools.chain.from_iterable(next(one, ()) for one in iterators))
        for _ in range(count)
    ]
    states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
    for iterator in iterators:
        iterator.close()
    return batches, merge_states(states)


@pytest.mark.parametrize("ranks", RANKS)
def test_global_batches_are_the_same_on_any_number_of_ranks(
    ranks: int, shards: list[str]
) -> None:
    """With a shuffle, and to the last batch."""
    stream = TextDataset(shards, shuffle=True).shuffle(5).readers(24)
    whole = in_step(loaders(stream, 1))
    assert in_step(loaders(stream, ranks)) == whole
    assert len(set().union(*whole)) == sum(map(len, whole)) == 24 * 11 - 2


@pytest.mark.parametrize("count", [1, 4, 9, 11])
@pytest.mark.parametrize(("before", "after"), [(4, 3), (4, 1), (2, 8), (1, 4)])
def test_goes_on_with_other_ranks(
    before: int, after: int, count: int, shards: list[str]
) -> None:
    """Behind any batch, also where some ranks have ended."""
    stream = TextDataset(shards, shuffle=True).shuffle(5).readers(24)
    whole = in_step(loaders(stream, 1))
    batches, state = saved(loaders(stream, before), count)
    resumed = loaders(stream, after)
    for loader in resumed:
        loader.load_state_dict(state)
    assert batches + in_step(resumed) == whole


def test_goes_on_without_having_asked_for_readers(shards: list[str]) -> None:
    """The rest of the epoch keeps the order of the ranks that began it."""
    stream = TextDataset(shards[:12], interleave=2).shuffle(4)
    batches, state = saved(loaders(stream, 4), 3)
    resumed = loaders(stream, 3)
    for loader in resumed:
        loader.load_state_dict(state)
    with pytest.warns(UserWarning, match="readers"):
        batches += in_step(resumed)
    found = [sample for batch in batches for sample in batch]
    assert (
        len(found) == len(set(found)) == len(set().union(*in_step(loaders(stream, 1))))
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_iterables_are_dealt_too(ranks: int) -> None:
    """Each rank reads all of it, and keeps its part."""
    whole = in_step(loaders(from_iterable(range(100)), 1))
    assert in_step(loaders(from_iterable(range(100)), ranks)) == whole


def test_states_of_other_moments_are_refused(shards: list[str]) -> None:
    """And those of a part of the ranks."""
    stream = TextDataset(shards).readers(24)
    states = []
    for count, loader in enumerate(loaders(stream, 2), 1):
        iterator = iter(loader)
        for _ in range(count):
            next(iterator)
        states.append(loader.state_dict())
        iterator.close()
    with pytest.raises(StateMismatchError, match="not of one run and one moment"):
        merge_states(states)
    with pytest.raises(StateMismatchError, match="missing"):
        merge_states(states[:1])
    with pytest.raises(ValueError, match="no states"):
        merge_states([])
