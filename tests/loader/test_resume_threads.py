"""Threads that start an iteration at once: one of them resumes the loaded state."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.utils.data import Sampler

from aioloader import DataLoader
from core.kit import PATIENCE

LENGTH = 12


class Meeting:
    """Where two threads meet, once each."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2)
        self._met: set[int] = set()
        self.is_on = False

    def reach(self) -> None:
        if self.is_on and threading.get_ident() not in self._met:
            self._met.add(threading.get_ident())
            self._barrier.wait(PATIENCE)


class Order(Sampler[int]):
    """Indices in order; its iterations meet, before anything has started."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        self.meeting.reach()
        return iter(range(LENGTH))


class Data:
    """Its own indices; reads meet, once both iterations have started."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        self.meeting.reach()
        return index


def make(where: str, meeting: Meeting) -> DataLoader[Any]:
    if where == "sample":
        return DataLoader(Data(meeting), 3)
    data: Any = range(LENGTH)
    workers = int("workers" in where)
    return DataLoader(data, 3, sampler=Order(meeting), num_workers=workers)


def flat(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch.tolist()]


@pytest.mark.filterwarnings("ignore:Order has no state_dict")
@pytest.mark.parametrize("where", ["sampler", "sampler, workers", "sample"])
def test_one_of_two_threads_resumes(where: str) -> None:
    """The other one reads the whole next epoch, wherever in the start they meet."""
    meeting = Meeting()
    loader = make(where, meeting)
    iterator = iter(loader)
    assert flat([next(iterator), next(iterator)]) == [*range(6)]
    state = loader.state_dict()
    iterator.close()
    resumed = make(where, meeting)
    resumed.load_state_dict(state)
    meeting.is_on = True
    with ThreadPoolExecutor(2) as pool:
        found = sorted(pool.map(lambda _: flat(resumed), range(2)), key=len)
    assert found == [[*range(6, LENGTH)], [*range(LENGTH)]]
    assert resumed.epoch == 2
