"""What an epoch is to its consumer: its number, its figures, and where it stands."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from torch.utils.data import IterableDataset

import aioloader
from aioloader import DataLoader, ShuffledIndices
from samples import AsyncMap, SyncMap, labels

OURS = str(Path(aioloader.__file__).parent)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_two_iterators_are_two_epochs(num_workers: int) -> None:
    """Also where both are made before either is used."""

    def orders(*, at_once: bool) -> list[Any]:
        order = ShuffledIndices(20, seed=3)
        loader: Any = DataLoader(
            SyncMap(), 5, sampler=order, num_workers=num_workers, rng="worker"
        )
        made = [iter(loader), iter(loader)] if at_once else [loader, loader]
        return [labels(list(one)) for one in made]

    found = orders(at_once=True)
    assert found[0] != found[1]
    assert found == orders(at_once=False)


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 2}, {"workers": "thread", "num_workers": 2}]
)
@pytest.mark.parametrize("make", [SyncMap, AsyncMap])
@pytest.mark.parametrize("end", ["close", "end", "drop"])
def test_nothing_is_in_flight_after_an_iteration(
    end: str, make: Any, options: Any
) -> None:
    """However it ends."""
    loader: Any = DataLoader(make(), 2, **options)
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    if end == "close":
        iterator.close()
    elif end == "end":
        list(iterator)
    else:
        del iterator
    assert loader.stats().in_flight == 0
    loader.close()


class Stateful(IterableDataset[int]):
    """A stream with a state."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 6:
            self.at += 1
            yield self.at

    def state_dict(self) -> dict[str, int]:
        """Return how many were read."""
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there."""
        self.at = state["at"]


class Interrupting:
    """Raises KeyboardInterrupt where Ctrl-C can: as a function begins, or C returns.

    Attributes:
        left: How many such places are left before.
    """

    def __init__(self, left: int) -> None:
        self.left = left

    def __call__(self, frame: FrameType, event: str, _arg: Any) -> None:
        is_ours = frame.f_code.co_filename.startswith(OURS)
        if not is_ours or event not in {"call", "c_return"}:
            return
        self.left -= 1
        if self.left < 0:
            sys.setprofile(None)
            raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("make", [lambda: list(range(1, 7)), Stateful])
def test_the_state_after_an_interrupt(make: Any) -> None:
    """It is that after the last delivered batch, wherever it was interrupted."""
    places, interrupting = 0, Interrupting(0)
    while interrupting.left < 0 or not places:
        loader: Any = DataLoader(make(), 2)
        found: list[Any] = []
        interrupting = Interrupting(places)
        sys.setprofile(interrupting)
        try:
            for batch in loader:
                found.append(batch.tolist())  # noqa: PERF401
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        again: Any = DataLoader(make(), 2)
        again.load_state_dict(loader.state_dict())
        if len(found) < 3:  # else the epoch may be known to be over, or not
            found += [batch.tolist() for batch in again]
        assert found == [[1, 2], [3, 4], [5, 6]], places
        places += 1
    assert places > 50


@pytest.mark.parametrize("name", ["transform", "collate_fn", "concurrency", "timeout"])
def test_what_is_assigned_is_for_the_next_iteration(name: str) -> None:
    """Arguments are attributes; an iteration takes them when it is made."""
    values: dict[str, Any] = {
        "transform": lambda sample: -sample,
        "collate_fn": sum,
        "concurrency": 3,
        "timeout": 20.0,
    }
    loader: Any = DataLoader([1, 2, 3], batch_size=3)
    assert name in vars(loader)
    before = iter(loader)
    setattr(loader, name, values[name])
    assert next(before).tolist() == [1, 2, 3]
    after = next(iter(loader))
    expected = {"transform": [-1, -2, -3], "collate_fn": 6}.get(name, [1, 2, 3])
    assert (after if isinstance(after, int) else after.tolist()) == expected
