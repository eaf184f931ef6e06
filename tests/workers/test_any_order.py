"""``in_order=False`` over iterables in workers: a slow worker delays no other."""

import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from aioloader import DataLoader
from stateful import Cursor
from working import share

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.* has no state_dict:UserWarning"),
]
Loader: Any = DataLoader  # options are tables here
CONTEXT = multiprocessing.get_context("fork")


class Gated(IterableDataset[int]):
    """The first worker waits at a sample until the gate opens."""

    def __init__(self, n: int, waits_at: int = 0) -> None:
        self.n, self.waits_at = n, waits_at
        self.gate = CONTEXT.Event()

    def __iter__(self) -> Iterator[int]:
        for number in share(self.n):
            if number == self.waits_at:
                assert self.gate.wait(20)
            yield number


class GatedCursor(Cursor):
    """An iterator with a state, of a gated dataset."""

    def __init__(self, dataset: Gated) -> None:
        super().__init__(share(dataset.n))
        self.dataset = dataset

    def __next__(self) -> int:
        number = super().__next__()
        if number == self.dataset.waits_at:
            assert self.dataset.gate.wait(20)
        return number


class GatedCursors(Gated):
    """The same, with iterators that have a state."""

    def __iter__(self) -> Any:
        return GatedCursor(self)


def make(dataset: Any, cls: Any = Loader, workers: int = 2, **options: Any) -> Any:
    """Return a loader, ours or torch's."""
    arguments = {"num_workers": workers, "multiprocessing_context": CONTEXT}
    return cls(dataset, 2, in_order=False, **arguments, **options)


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    "cls", [Loader, torch.utils.data.DataLoader], ids=["ours", "torch"]
)
def test_a_slow_worker_delays_no_other(cls: Any, persistent: bool) -> None:
    """All batches of the other worker are delivered first, as by torch."""
    dataset = Gated(81)
    loader = make(dataset, cls, persistent_workers=persistent)
    iterator = iter(loader)
    early = [next(iterator).tolist() for _ in range(20)]
    assert early == [[k, k + 2] for k in range(1, 81, 4)]
    dataset.gate.set()
    late = [batch.tolist() for batch in iterator]
    assert late == [*([k, k + 2] for k in range(0, 80, 4)), [80]]
    again = sorted(batch.tolist() for batch in loader)
    assert again == sorted(early + late)
    if persistent and cls is Loader:
        loader.close()


@pytest.mark.slow
@pytest.mark.parametrize("cls", [Gated, GatedCursors])
@pytest.mark.parametrize("taken", [0, 3, 10, 13])
def test_resuming_in_any_order_repeats_no_batch(cls: Any, taken: int) -> None:
    """Whichever worker the delivered batches came from."""
    dataset = cls(41, waits_at=4)
    loader = make(dataset)
    iterator = iter(loader)
    delivered = []
    for place in range(taken):
        if place == 11:  # all others were
            dataset.gate.set()
        delivered.append(next(iterator).tolist())
    state = loader.state_dict()
    dataset.gate.set()
    iterator.close()
    again = cls(41, waits_at=-1)
    resumed = make(again)
    resumed.load_state_dict(state)
    rest = [batch.tolist() for batch in resumed]
    whole = [[k, k + 2] for k in (*range(0, 40, 4), *range(1, 40, 4))]
    assert sorted(delivered + rest) == sorted([*whole, [40]])
    assert resumed.state_dict()["epoch"] == 1


class Failing(Gated):
    """The second worker fails at its first sample, and continues with the next."""

    def __iter__(self) -> Any:
        return FailingCursor(self)


class FailingCursor(GatedCursor):
    """An iterator that fails once, and continues."""

    def __next__(self) -> int:
        number = super().__next__()
        if number == 1:
            raise KeyError("planted")
        return number

    state_dict: Any = None  # it is read again from the front


@pytest.mark.usefixtures("fork_is_default")
def test_a_raised_error_is_not_raised_after_resuming() -> None:
    """Though its sample is read again, to get past it."""
    dataset = Failing(8)
    options: Any = {"batch_size": 1, "num_workers": 2, "in_order": False}
    loader = Loader(dataset, **options)
    iterator = iter(loader)
    with pytest.raises(KeyError, match="planted"):
        next(iterator)
    assert next(iterator).tolist() == [3]  # the first worker waits
    state = loader.state_dict()
    dataset.gate.set()
    iterator.close()
    again = Loader(dataset, **options)
    again.load_state_dict(state)
    assert sorted(batch.item() for batch in again) == [0, 2, 4, 5, 6, 7]
