"""``lifespan=`` in worker processes, and of aioloader's own datasets."""

import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import ConcatDataset, Subset

from aioloader import DataLoader
from aioloader.datasets import FileDataset
from lifespans import (
    AsyncLog,
    AsyncStreamLog,
    Log,
    SyncLog,
    SyncStreamLog,
    on_loop,
    plain,
)
from samples import collect, labels

Loader: Any = DataLoader  # options are tables here


# -- in worker processes --------------------------------------------------------------


class Logged(Log):
    """Mixed into datasets: logs events with their processes in a file."""

    def __init__(self, path: Path, n: int = 16) -> None:
        super().__init__(n)
        self.path = path

    def note(self, event: str) -> None:
        """Append one line."""
        file = os.open(self.path, os.O_APPEND | os.O_CREAT | os.O_WRONLY)
        os.write(file, f"{os.getpid()} {event}\n".encode())
        os.close(file)


class LoggedMap(Logged, SyncLog):
    """Read in a worker's main thread."""


class LoggedAsyncMap(Logged, AsyncLog):
    """Read on a worker's loop."""


class LoggedStream(Logged, SyncStreamLog):
    """Replicated in each worker."""


class LoggedAsyncStream(Logged, AsyncStreamLog):
    """Replicated with ``fetch="workers"``."""


KINDS = [
    pytest.param(LoggedMap, plain, {}, id="map"),
    pytest.param(LoggedAsyncMap, on_loop, {}, id="async map"),
    pytest.param(LoggedStream, plain, {}, id="iterable"),
    pytest.param(
        *(LoggedAsyncStream, on_loop, {"fetch": "workers"}), id="async iterable"
    ),
]


def lives(path: Path) -> dict[int, list[str]]:
    """Return the events of each process; consecutive reads count as one."""
    events: dict[int, list[str]] = {}
    for line in path.read_text().splitlines():
        pid, event = line.split()
        events.setdefault(int(pid), []).append(event)
    return {pid: [name for name, _ in groupby(all_)] for pid, all_ in events.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("make", "lifespan", "options"), KINDS)
@pytest.mark.parametrize("is_cut", [False, True])
def test_each_worker_enters_the_lifespan_once(
    make: Any, lifespan: Any, options: dict[str, Any], is_cut: bool, tmp_path: Path
) -> None:
    """Around all reads and their generators; not in this process."""
    path = tmp_path / "log"
    loader = Loader(make(path), 2, num_workers=2, lifespan=lifespan, **options)
    iterator = iter(loader)
    next(iterator)
    if not is_cut:
        list(iterator)
    iterator.close()
    logs = lives(path)
    assert logs  # a worker may never have begun
    assert os.getpid() not in logs
    for events in logs.values():
        assert events[0] == "enter"
        assert events[-1] == "leave", events
        assert {*events[1:-1]} <= {"read", "closed"}
    assert any("read" in events for events in logs.values())


@pytest.mark.slow
@pytest.mark.parametrize(("make", "lifespan", "options"), KINDS)
def test_persistent_workers_enter_the_lifespan_once(
    make: Any, lifespan: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    """They leave it when they end."""
    path = tmp_path / "log"
    options = {**options, "num_workers": 1, "persistent_workers": True}
    loader = Loader(make(path), 2, lifespan=lifespan, **options)
    for _ in range(3):
        list(loader)
    assert "leave" not in path.read_text()
    loader.close()
    (events,) = lives(path).values()
    assert events[0] == "enter"
    assert events[-1] == "leave"
    assert events.count("enter") == events.count("leave") == 1


def test_the_loader_enters_the_lifespan_if_it_reads(tmp_path: Path) -> None:
    """And no worker does."""
    path = tmp_path / "log"
    options = {"num_workers": 1, "fetch": "loader"}
    list(Loader(LoggedMap(path), 2, lifespan=plain, **options))
    assert lives(path) == {os.getpid(): ["enter", "read", "leave"]}


@pytest.mark.slow
@pytest.mark.parametrize(("make", "lifespan", "options"), KINDS)
@pytest.mark.parametrize("is_kept", [False, True])
def test_an_error_on_entering_a_lifespan_is_raised(
    make: Any, lifespan: Any, options: dict[str, Any], is_kept: bool, tmp_path: Path
) -> None:
    """With the user's type; no worker is started again."""
    path = tmp_path / "log"

    @contextlib.contextmanager
    def refuse(dataset: Any) -> Iterator[None]:
        dataset.note("enter")
        raise ConnectionRefusedError("no such server")
        yield

    options = {**options, "num_workers": 2, "persistent_workers": is_kept}
    loader = Loader(make(path), 2, lifespan=refuse, **options)
    for epoch in (1, 2):
        with pytest.raises(ConnectionRefusedError, match="no such server") as caught:
            list(loader)
        notes = "\n".join(caught.value.__notes__)
        assert "aioloader: in stage 'lifespan', entering it" in notes
        assert "in DataLoader worker process" in notes
        assert len(lives(path)) <= 2 * epoch
    loader.close()
    assert {*map(tuple, lives(path).values())} == {("enter",)}


@pytest.mark.slow
@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("make", [LoggedMap, LoggedStream])
def test_an_error_on_leaving_a_lifespan_is_raised(
    make: Any, is_kept: bool, tmp_path: Path
) -> None:
    """Where the worker is awaited: by the loop, or by ``close``."""

    @contextlib.contextmanager
    def refuse(dataset: Any) -> Iterator[None]:
        dataset.note("enter")
        yield
        raise BrokenPipeError("late")

    options: Any = {"num_workers": 1, "persistent_workers": is_kept}
    loader = Loader(make(tmp_path / "log"), 2, lifespan=refuse, **options)
    with pytest.raises(BrokenPipeError, match="late") as caught:
        list(loader)
        assert is_kept
        loader.close()
    assert loader.stats().batches == 8
    assert "aioloader: in stage 'lifespan', leaving it" in caught.value.__notes__
    loader.close()


class Killed(LoggedMap):
    """Kills its first worker."""

    def __getitem__(self, index: int) -> Any:
        if index == 5 and not (flag := self.path.with_name("flag")).exists():
            flag.touch()
            signal.raise_signal(signal.SIGKILL)
        return super().__getitem__(index)


def test_a_replacement_worker_enters_the_lifespan(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with Loader(Killed(path), 2, num_workers=1, lifespan=plain) as loader:
        assert labels(list(loader)) == [[i, i + 1] for i in range(0, 16, 2)]
    first, second = lives(path).values()
    assert first == ["enter", "read"]
    assert second == ["enter", "read", "leave"]


# -- aioloader's own datasets ----------------------------------------------------------


class Watched(FileDataset):
    """Counts entries and exits."""

    entered = 0
    left = 0

    async def __aenter__(self) -> Any:
        self.entered += 1
        return await super().__aenter__()

    async def __aexit__(self, *_exc: object) -> None:
        self.left += 1
        await super().__aexit__(None, None, None)


WRAPPERS: dict[str, Any] = {
    "itself": lambda files: files,
    "subset": lambda files: Subset(files, [0, 1]),
    "twice": lambda files: ConcatDataset([Subset(files, [0]), files]),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
async def test_our_datasets_need_no_lifespan(wrapper: str, tmp_path: Path) -> None:
    """They are entered inside torch's wrappers, too, and beside a user's lifespan."""
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "b").write_bytes(b"b")
    events: list[Any] = []

    @contextlib.asynccontextmanager
    async def lifespan(dataset: Any) -> AsyncIterator[None]:
        events.append((files.entered, files.left))
        yield
        events.append((files.entered, files.left))

    files = Watched(["a", "b"], root=tmp_path)
    dataset = WRAPPERS[wrapper](files)
    assert len(await collect(DataLoader(dataset, collate_fn=b"".join))) >= 2
    assert (files.entered, files.left) == (1, 1)
    await collect(DataLoader(dataset, collate_fn=b"".join, lifespan=lifespan))
    assert (files.entered, files.left) == (2, 2)
    assert events == [(2, 1), (2, 1)]
