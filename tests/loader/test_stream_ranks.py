"""Streams dealt to ranks by the loader: one order, and one state of all ranks."""

import math
from pathlib import Path
from typing import Any

import pytest

from aioloader import DataLoader, merge_states
from aioloader.datasets import TextDataset, from_iterable
from aioloader.errors import StateMismatchError
from loader.states import saved
from stateful import Plain

GLOBAL = 24


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
            tail="uneven",
            collate_fn=list,
            **options,
        )
        for rank in range(ranks)
    ]


def samples(loaders: list[Any]) -> list[str]:
    """Return what these loaders deliver."""
    return [sample for loader in loaders for batch in loader for sample in batch]


def test_goes_on_without_having_asked_for_readers(shards: list[str]) -> None:
    """The rest of the epoch keeps the order of the ranks that began it."""
    stream = TextDataset(shards[:12], interleave=2).shuffle(4)
    begun = loaders(stream, 4)
    iterators = [iter(loader) for loader in begun]
    found = [one for _ in range(3) for rank in iterators for one in next(rank)]
    state = merge_states([saved(loader) for loader in begun])
    for iterator in iterators:
        iterator.close()
    resumed = loaders(stream, 3)
    for loader in resumed:
        loader.load_state_dict(state)
    with pytest.warns(UserWarning, match="readers"):
        found += samples(resumed)
    assert sorted(found) == sorted(samples(loaders(stream, 1)))


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


# -- workers that read, and layouts -----------------------------------------------


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_workers_in_mid_round(shards: list[str]) -> None:
    """Two of three are a batch ahead: only three workers continue."""
    stream = TextDataset(shards)

    def made(workers: int) -> Any:
        return DataLoader(stream, 4, num_workers=workers, fetch="workers")

    (batches,), state = [next(iter(loader := made(3)))], loader.state_dict()
    loader.close()
    resumed = made(3)
    resumed.load_state_dict(state)
    assert sum(map(len, resumed)) + len(batches) == 24 * 11 - 2
    with pytest.raises(StateMismatchError, match=r"3 workers .* after 1 batches: some"):
        made(2).load_state_dict(state)


@pytest.mark.filterwarnings("ignore:.*no state_dict:UserWarning")
def test_workers_that_split_an_iterable_themselves() -> None:
    """Their number is part of the order."""
    loader = DataLoader(Plain(), 2, num_workers=2)
    next(iter(loader))
    state = loader.state_dict()
    loader.close()
    words = r"2 readers .* but the loader has 1; load it with the same num_workers"
    with pytest.raises(StateMismatchError, match=words):
        DataLoader(Plain(), 2, num_workers=1).load_state_dict(state)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*take turns at:UserWarning")
@pytest.mark.parametrize("readers", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_layouts_that_iterate_can_be_merged_anywhere(
    readers: int, ranks: int, size: int, tmp_path: Path
) -> None:
    """Shards as uneven as can be; the others are refused before the first batch."""
    for shard in range(6):
        text = "".join(f"{shard}-{row}\n" for row in range(2 + 7 * (shard % 3)))
        (tmp_path / f"{shard}.txt").write_text(text)
    stream = TextDataset("*.txt", store=tmp_path).readers(readers)
    made = [
        DataLoader(stream, size, rank=one, world_size=ranks, tail="uneven")
        for one in range(ranks)
    ]
    if size * math.gcd(readers, ranks) < readers:
        with pytest.raises(ValueError, match=r"cannot be merged; use a batch_size of"):
            iter(made[0])
        return
    iterators = [iter(loader) for loader in made]
    while [one for one in [next(one, None) for one in iterators] if one is not None]:
        merge_states([loader.state_dict() for loader in made])


@pytest.mark.filterwarnings("ignore:.*take turns at:UserWarning")
@pytest.mark.parametrize("size", [1, 2])
def test_layouts_whose_readers_end_together(size: int) -> None:
    """They iterate: no batch is empty before the end."""
    stream = from_iterable(range(9)).readers(3).epoch_length(24)
    made = [DataLoader(stream, size, rank=rank, world_size=2) for rank in range(2)]
    iterators = [iter(loader) for loader in made]
    while [one for one in [next(one, None) for one in iterators] if one is not None]:
        merge_states([loader.state_dict() for loader in made])
