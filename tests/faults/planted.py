"""Datasets whose workers fail as they start, and marks that count the starts."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from aioloader import DataLoader, get_worker_info
from faulty import Act, exit_politely, is_alive, kill_itself, leave

FORKED: list[Any] = [None, pytest.param("fork", marks=pytest.mark.slow)]
UNPICKLED: list[Any] = [
    pytest.param("forkserver", marks=pytest.mark.slow),
    pytest.param("spawn", marks=pytest.mark.fuzz),
]
WAYS = [*FORKED, *UNPICKLED]
WORKERS = 2
STARTS = 3
SECONDS = 40


class PlantedError(Exception):
    """The user's error, whose constructor takes two arguments."""

    def __init__(self, where: str, pid: int) -> None:
        super().__init__(f"planted in {where}")
        self.pid = pid


class HungError(BaseException):
    """A test took too long."""


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """Fail a test that hangs."""

    def give_up(*_: object) -> None:
        raise HungError

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def marks(tmp_path: Path) -> Iterator["Marks"]:
    """Return a file for marks; afterwards kill the processes that left one."""
    marks = Marks(tmp_path)
    yield marks
    for pid in filter(is_alive, {*marks.pids()} - {os.getpid()}):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, signal.SIGKILL)


class Marks:
    """A file to which each start adds a line: the worker, if it has a number yet."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "marks"
        self.path.touch()

    def add(self, word: object = "") -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {word}\n")

    def pids(self) -> list[int]:
        """Return the processes that have left a mark, in order."""
        lines = self.path.read_text(encoding="utf-8").splitlines()
        return [*dict.fromkeys(int(line.split()[0]) for line in lines)]

    def __len__(self) -> int:
        return len(self.pids())


def refuse() -> None:
    raise PlantedError("a start", os.getpid())


DEATHS: list[Act] = [kill_itself, leave, exit_politely]
PLACES = ["init", "read", "iterate", "unpickle"]


class Planted:
    """A dataset that calls a function at a place in its workers.

    Args:
        marks: File for a mark of each start.
        place: Where it calls ``act``: one of ``PLACES``.
        act: The function.
        only: The worker that calls it; None: every worker.
    """

    def __init__(
        self, marks: Marks, place: str, act: Act, only: int | None = None
    ) -> None:
        self.marks = marks
        self.place = place
        self.act = act
        self.only = only
        self.home = os.getpid()

    def happen(self, place: str) -> None:
        """Leave a mark and call the function, if this is the place."""
        if place != self.place or os.getpid() == self.home:
            return
        info = get_worker_info()
        number = None if info is None else info.id
        if self.only is None or number == self.only:
            self.marks.add(number)
            self.act()

    def init(self, worker: int) -> None:
        self.happen("init")

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.happen("unpickle")

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        self.happen("read")
        return index


class PlantedStream(Planted, IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        self.happen("iterate")
        yield from range(12)


def loader_of(dataset: Planted, **options: Any) -> DataLoader[Any]:
    """Return a loader with two workers."""
    options = {"batch_size": 2, "num_workers": WORKERS, **options}
    return DataLoader(dataset, worker_init_fn=dataset.init, **options)


def kinds_at(place: str) -> Any:
    """Return the class of dataset that has such a place."""
    return PlantedStream if place == "iterate" else Planted
