"""Resuming users' datasets and samplers that keep something between epochs."""

import os
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, Sampler, WeightedRandomSampler

from aioloader import DataLoader, ShuffledIndices, TokenBudgetBatchSampler
from aioloader.datasets import TextDataset, from_async_iterable, from_iterable
from aioloader.errors import DatasetError, ShardChangedError
from loader.states import REPEATED, left_at, listed, loaded, rest_of, saved
from loader.test_resume_order import OnDataset
from stateful import (
    Counted,
    Cursors,
    Epochs,
    Kept,
    Numbers,
    Plain,
    Postponed,
    Started,
    Streamed,
)

Loader: Any = DataLoader
A: Any = range(10)


# -- datasets that keep a loaded state ---------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("make", [Streamed, Started, Kept])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("taken", [1, 3])
def test_a_loaded_state_applies_once(make: Any, workers: int, taken: int) -> None:
    """Even if a loader loads twice, and in persistent workers."""
    options = {"num_workers": workers, "persistent_workers": workers > 0}
    with Loader(make(12), 2, **options) as loader:
        whole = listed(loader)
    with Loader(make(12), 2, **options) as loader:
        state = left_at(loader, taken)
        for _ in range(2):
            loader.load_state_dict(state)
            assert [listed(loader) for _ in range(3)] == [whole[taken:], whole, whole]


@pytest.mark.parametrize("options", [{}, {"prefetch_factor": 2}], ids=str)
@pytest.mark.parametrize("make", [Epochs, Postponed])
def test_epoch_counting_datasets_resume(make: Callable[[], Any], options: Any) -> None:
    """A loaded state is applied once, and not in the next epoch."""
    loader = Loader(make(), 5, **options)
    first, second = listed(loader), listed(loader)
    assert first != second
    resumed = loaded(Loader(make(), 5, **options), loader.state_dict())
    assert [listed(resumed), listed(resumed)] == [listed(loader), listed(loader)]


# -- epochs of users' datasets and samplers ---------------------------------------


class ByEpoch(Numbers):
    """A map-style dataset that augments by its epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> int:
        return 100 * self.epoch + index


@pytest.mark.slow
@pytest.mark.parametrize("make", [Streamed, ByEpoch])
@pytest.mark.parametrize("workers", [0, 1])
def test_the_datasets_epoch_is_restored(make: Callable[[], Any], workers: int) -> None:
    """A resumed script need not set it again."""
    dataset = make()
    loader = Loader(dataset, 4, num_workers=workers)
    listed(loader)
    dataset.set_epoch(3)
    state = left_at(loader, 1)
    resumed = loaded(Loader(make(), 4, num_workers=workers), state)
    rest = listed(resumed)
    assert rest == [[304, 305, 306, 307], [308, 309]]
    assert listed(resumed) == [[300, 301, 302, 303], *rest]


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize(
    ("make", "sets"),
    [
        (lambda: Loader(ByEpoch(), 5), True),
        (lambda: Loader(Streamed(), 5), True),
        (lambda: Loader(A, 5, sampler=DistributedSampler(A, 1, 0)), True),
        (lambda: Loader(A, 5, sampler=ShuffledIndices(10)), False),
        (lambda: Loader(A, batch_sampler=TokenBudgetBatchSampler([4] * 10, 9)), False),
    ],
    ids=["map", "iterable", "distributed", "keyed", "keyed batches"],
)
def test_an_epoch_set_after_loading_is_kept(
    make: Callable[[], Any], sets: bool, begins: bool
) -> None:
    """The number wins over the loaded state, and is saved."""
    loader = make()
    listed(loader)
    resumed = loaded(make(), saved(loader))
    if sets:
        resumed.set_epoch(1)
        loader.set_epoch(1)
    iterator = iter(resumed) if begins else resumed
    again = loaded(make(), saved(resumed))
    assert listed(loader) == listed(iterator) == listed(again)


def test_no_epoch_is_set_without_a_state() -> None:
    """As in torch, the loader does not number the epochs of a dataset."""
    loader = Loader(Streamed(), 5)
    assert listed(loader) == listed(loader)
    assert loader.dataset.epoch == 0


# -- datasets and samplers without a state ----------------------------------------


class Counter:
    """Each epoch continues after the last one."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> Iterator[int]:
        for _ in range(6):
            self.number += 1
            yield self.number


class Drawing:
    """Each epoch draws from the global generator."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(6), 6))


class Counting(Sampler[int]):
    """Shuffles by its epoch, which cannot be set."""

    count = 0

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[int]:
        self.count += 1
        return iter(random.Random(self.count).sample(range(6), 6))


class Seeded(Counting):
    """Draws from its own ``random.Random``."""

    def __init__(self) -> None:
        self.random = random.Random(1)

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.sample(range(6), 6))


class Around(Sampler[list[int]]):
    """A batch sampler around a sampler that counts."""

    def __init__(self) -> None:
        self.sampler = Counting()

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[list[int]]:
        indices = list(self.sampler)
        yield from (indices[:3], indices[3:])


def shuffled() -> Any:
    return torch.utils.data.DataLoader(Numbers(), None, shuffle=True)


def many(folder: Path) -> Any:
    """Return a shuffled stream of eight numbers."""
    for shard in range(4):
        (folder / f"{shard}.txt").write_text(f"{shard}0\n{shard}1\n")
    return TextDataset("*.txt", store=folder, shuffle=True).map(int)


LOST: dict[str, Callable[[], dict[str, Any]]] = {
    "counter": lambda: {"dataset": from_iterable(Counter())},
    "function": lambda: {"dataset": from_iterable(lambda: iter(range(6)))},
    "draws": lambda: {"dataset": from_iterable(Drawing())},
    "mapped draws": lambda: {"dataset": from_iterable(Drawing()).map(int).shuffle(3)},
    "torch's loader": lambda: {"dataset": from_iterable(shuffled())},
    "inner loader": lambda: {"dataset": from_iterable(Loader([1, 2], shuffle=True))},
    "mixed": lambda: {"dataset": from_iterable([1]).mix(from_iterable(Counter()))},
    "plain counter": lambda: {"dataset": Counter()},
    "plain draws": lambda: {"dataset": Drawing()},
    "sampler": lambda: {"dataset": Numbers(), "sampler": Counting()},
    "sampler's generator": lambda: {"dataset": Numbers(), "sampler": Seeded()},
    "sampler within": lambda: {"dataset": Numbers(), "batch_sampler": Around()},
    "iterator with state": lambda: {"dataset": Cursors()},
}
KNOWN: dict[str, Callable[[], dict[str, Any]]] = {
    "range": lambda: {"dataset": from_iterable(range(6)).map(int).shuffle(2)},
    "streaming": lambda: {"dataset": from_iterable(Streamed(6))},
    "loader": lambda: {"dataset": from_iterable(Loader(range(6)))},
    "weights": lambda: {
        "dataset": Numbers(),
        "sampler": WeightedRandomSampler([1.0, 2.0], 2),
    },
    "list": lambda: {"dataset": Numbers(), "sampler": [3, 1, 2]},
    "iterator and epoch": lambda: {"dataset": OnDataset()},
    "iterator and dataset": lambda: {"dataset": Epochs()},
}


def warnings_of(make: Callable[[], dict[str, Any]], epochs: int, taken: int) -> Any:
    """Return the warnings of a resume after some epochs and batches."""
    loader = Loader(**make())
    for _ in range(epochs):
        listed(loader)
    state = left_at(loader, taken) if taken else saved(loader)
    resumed = Loader(**make())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)  # not those of a fork
        resumed.load_state_dict(state)
        listed(resumed), listed(resumed)
    return [str(warning.message) for warning in caught]


@pytest.mark.slow
@pytest.mark.parametrize("taken", [0, 1])
@pytest.mark.parametrize("name", LOST)
def test_inexact_resuming_warns_once(name: str, taken: int) -> None:
    """Also between two epochs."""
    (message,) = warnings_of(LOST[name], 1, taken)
    assert "correct only if" in message
    assert warnings_of(LOST[name], 0, 0) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize(("epochs", "taken"), [(1, 0), (2, 0), (1, 1)])
def test_exact_resuming_does_not_warn(name: str, epochs: int, taken: int) -> None:
    """All epochs are the same, or their number is restored."""
    assert warnings_of(KNOWN[name], epochs, taken) == []


@pytest.mark.slow
@pytest.mark.parametrize(("make", "taken"), [(Counter, 0), (Cursors, 0), (Cursors, 1)])
def test_copies_in_new_workers_resume_without_a_warning(make: Any, taken: int) -> None:
    """Each epoch starts from this process's dataset, which does not change."""
    options = {"dataset": make(), "num_workers": 1}
    assert warnings_of(lambda: options, 2, taken) == []


@pytest.mark.parametrize("taken", [0, 1])
def test_an_inner_stream_follows_the_outer_epoch(taken: int, tmp_path: Path) -> None:
    """In a new process, too."""

    def make() -> Any:
        return Loader(from_async_iterable(many(tmp_path)), 4)

    loader = make()
    first, second = listed(loader), listed(loader)
    assert first != second
    state = left_at(loader, taken) if taken else loader.state_dict()
    loader, resumed = make(), make()
    resumed.load_state_dict(state)
    whole = [listed(loader) for _ in range(4)][2:]
    assert [listed(resumed), listed(resumed)] == [whole[0][taken:], whole[1]]


def test_workers_do_not_split_an_inner_stream(tmp_path: Path) -> None:
    """Only the outer stream is split among workers."""
    options = {"num_workers": 2, "fetch": "workers"}
    with Loader(from_async_iterable(many(tmp_path)), 2, **options) as loader:
        samples = [sample for batch in listed(loader) for sample in batch]
    assert sorted(samples) == [0, 1, 10, 11, 20, 21, 30, 31]


def test_from_iterable_sets_the_epoch_of_its_source() -> None:
    """The order does not depend on the process."""
    loader = Loader(from_iterable(Streamed(4)), 4)
    assert listed(loader) == [[0, 1, 2, 3]]
    assert listed(loader) == [[100, 101, 102, 103]]


# -- too few samples --------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"prefetch_factor": 2}], ids=str)
def test_a_resumed_epoch_without_samples_raises(options: dict[str, Any]) -> None:
    """The dataset kept the state of the previous epoch's end."""
    loader = Loader(Started(), 3, **options)
    listed(loader)
    resumed = loaded(Loader(Started(), 3, **options), loader.state_dict())
    with pytest.raises(DatasetError, match="has no samples, but the one before had 10"):
        listed(resumed)


@REPEATED
@pytest.mark.parametrize("workers", [0, 1])
def test_resuming_a_dataset_that_shrank_raises(workers: int) -> None:
    """The dataset has fewer samples than were delivered."""
    state = left_at(Loader(Plain(10), 3, num_workers=workers), 3)
    resumed = loaded(Loader(Plain(8), 3, num_workers=workers), state)
    with pytest.raises(ShardChangedError, match="ended after 8 samples"):
        listed(resumed)


@REPEATED
def test_resuming_an_iterator_raises() -> None:
    """An iterator cannot be read again."""
    loader = Loader(iter(range(10)), 4)
    loader.load_state_dict(left_at(loader, 2))
    with pytest.raises(TypeError, match="was read before, and this epoch would lack"):
        listed(loader)


# -- as in torchdata 0.11 --------------------------------------------------------------


@pytest.mark.slow
def test_readers_that_have_ended_are_not_read_again() -> None:
    """Their dataset starts again at its end."""
    state = left_at(Loader(Kept(5), 2, num_workers=2), 2)
    resumed = Loader(Kept(5), 2, num_workers=2)
    assert rest_of(resumed, state) == [[4]]
    state = left_at(Loader(Kept(5), 2, num_workers=2), 3)
    assert rest_of(Loader(Kept(5), 2, num_workers=2), state) == []


# -- map-style datasets with a state -----------------------------------------------


@pytest.mark.slow
def test_each_copy_of_a_dataset_resumes_its_state() -> None:
    """Each worker's state is that after its latest delivered batch."""
    state = left_at(Loader(Counted(), 3, num_workers=2), 3)
    assert state["datasets"][0] == {"0": {"read": 6}, "1": {"read": 3}}
    assert rest_of(Loader(Counted(), 3, num_workers=2), state) == [[409]]
    state = left_at(Loader(Counted(), 3, num_workers=2), 1)
    rest = [[103, 204, 305], [406, 507, 608], [409]]
    assert rest_of(Loader(Counted(), 3, num_workers=2), state) == rest


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_other_workers_get_the_latest_state(num_workers: int) -> None:
    """The state of the worker that made the last delivered batch."""
    state = left_at(Loader(Counted(), 3, num_workers=2), 3)
    resumed = Loader(Counted(), 3, num_workers=num_workers)
    assert rest_of(resumed, state) == [[709]]


@pytest.mark.parametrize("options", [{}, {"prefetch_factor": 3}], ids=str)
def test_prefetched_samples_do_not_count(options: dict[str, Any]) -> None:
    state = left_at(Loader(Counted(), 3, **options), 2)
    assert state["datasets"][0] == {"loader": {"read": 6}}
    rest = [[706, 807, 908], [1009]]
    assert rest_of(Loader(Counted(), 3, **options), state) == rest


class Mortal(Counted):
    """One copy kills its process, once."""

    def __init__(self, mark: str) -> None:
        super().__init__()
        self.mark = mark

    def __getitem__(self, index: int) -> int:
        if index == 7 and not os.path.exists(self.mark):  # noqa: PTH110
            os.close(os.open(self.mark, os.O_CREAT))
            os._exit(3)
        return super().__getitem__(index)


def test_a_replacement_continues_a_dead_copy(tmp_path: Any) -> None:
    loader = Loader(Mortal(str(tmp_path / "dead")), 3, num_workers=2)
    batches = listed(loader)
    assert batches == [[100, 201, 302], [103, 204, 305], [406, 507, 608], [409]]


# -- iterables ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_before_the_first_batch_is_exact(num_workers: int) -> None:
    """Each reader has the dataset's own state until it has delivered a batch."""
    dataset = Kept(12)
    dataset.place = 2
    loader = Loader(dataset, 3, num_workers=num_workers)
    whole = [[2, 3, 4], [5, 6, 7], [8, 9, 10], [11]]
    if num_workers:
        whole = [[4, 6, 8], [5, 7, 9], [10], [11]]
    state = saved(loader)
    assert rest_of(Loader(Kept(12), 3, num_workers=num_workers), state) == whole
    state = left_at(loader, 1)
    assert rest_of(Loader(Kept(12), 3, num_workers=num_workers), state) == whole[1:]


@pytest.mark.parametrize("every", [0, 3, None])
def test_snapshot_every_n_steps_is_ignored(every: Any) -> None:
    """Torchdata's argument is accepted, and states are always exact."""
    options = {"batch_size": 2, "snapshot_every_n_steps": every}
    state = left_at(Loader(Cursors(), **options), 3)
    assert state["states"][0]["0"]["iterator"]["place"] == 6
    assert rest_of(Loader(Cursors(), **options), state) == [[6, 7], [8, 9]]
