"""Workers that fail at their start: soon, once, and with the user's error.

An exception ends the epoch at the first start of a worker; a death is tried again,
three starts in all. Each start leaves a mark in a file, by the user code in it.
"""

import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from aioloader import DataLoader
from aioloader.errors import BatchTimeoutError, WorkerError
from faults.planted import (  # noqa: F401  (fixtures too)
    DEATHS,
    FORKED,
    PLACES,
    STARTS,
    UNPICKLED,
    WAYS,
    WORKERS,
    Marks,
    Planted,
    PlantedError,
    in_time,
    kinds_at,
    loader_of,
    marks,
    refuse,
)
from faulty import Act, await_gone, kill_itself, leave, sleep_forever
from python_process import python


def skip_unless_unpickled(way: Any, place: str) -> None:
    """Skip what cannot happen: a forked worker inherits the dataset."""
    if place == "unpickle" and way in {None, "fork"}:
        pytest.skip("nothing is unpickled")


# -- exceptions ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", WAYS)
def test_an_exception_at_a_start_is_raised_once(
    way: Any, place: str, is_kept: bool, marks: Marks
) -> None:
    """No worker is started again."""
    skip_unless_unpickled(way, place)
    dataset = kinds_at(place)(marks, place, refuse)
    loader = loader_of(dataset, multiprocessing_context=way, persistent_workers=is_kept)
    with pytest.raises(PlantedError, match="planted in a start") as caught:
        list(loader)
    assert caught.value.pid in marks.pids()
    loader.close()
    assert 1 <= len(marks) <= WORKERS


MODULE = """
import os, time
with open(os.environ["MARKS"], "a") as file:
    file.write(f"{os.getpid()} import\\n")
if os.environ["HOME_PID"] != str(os.getpid()):
    exec(os.environ["ACT"])

class Data(list):
    pass
"""


@pytest.mark.parametrize("way", UNPICKLED)
@pytest.mark.parametrize(
    ("act", "error", "starts"),
    [("raise LookupError('planted')", LookupError, 1), ("os._exit(3)", WorkerError, 3)],
    ids=["raises", "exits"],
)
def test_a_module_that_cannot_be_imported_is_an_error(
    way: Any,
    act: str,
    error: type[Exception],
    starts: int,
    marks: Marks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where workers unpickle the dataset."""
    (tmp_path / "planted_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    for name, value in (("MARKS", marks.path), ("HOME_PID", os.getpid()), ("ACT", act)):
        monkeypatch.setenv(name, str(value))
    import planted_module  # type: ignore[import-not-found]  # noqa: PLC0415

    try:
        loader = DataLoader(
            planted_module.Data(range(8)),
            num_workers=WORKERS,
            multiprocessing_context=way,
        )
        with pytest.raises(error):
            list(loader)
        loader.close()
    finally:
        del sys.modules["planted_module"]
    assert 2 <= len(marks) <= 1 + starts * WORKERS


# -- deaths -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("act", DEATHS)
@pytest.mark.parametrize("place", ["init", "read", "iterate"])
@pytest.mark.parametrize("way", WAYS)
def test_a_worker_has_three_starts(
    way: Any, place: str, act: Act, marks: Marks
) -> None:
    """The error says so."""
    dataset = kinds_at(place)(marks, place, act)
    loader = loader_of(dataset, multiprocessing_context=way)
    words = r"DataLoader worker \(pid"
    if place == "init":
        words += "(.|\n)*3 processes in a row"
    with pytest.raises(WorkerError, match=words):
        list(loader)
    loader.close()
    assert 1 <= len(marks) <= STARTS * WORKERS


@pytest.mark.parametrize("way", UNPICKLED)
def test_a_death_while_unpickling_is_an_error(way: Any, marks: Marks) -> None:
    """After three starts of each worker."""
    loader = loader_of(Planted(marks, "unpickle", leave), multiprocessing_context=way)
    with pytest.raises(WorkerError):
        list(loader)
    loader.close()
    assert 1 <= len(marks) <= STARTS * WORKERS


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_worker_that_always_dies_has_three_starts(way: Any, marks: Marks) -> None:
    """Batches of the other worker give it no more of them."""
    dataset = Planted(marks, "init", kill_itself, only=1)
    loader = loader_of(dataset, multiprocessing_context=way)
    with pytest.raises(WorkerError):
        list(loader)
    loader.close()
    assert 1 <= len(marks) <= STARTS


@pytest.mark.slow
@pytest.mark.parametrize("way", FORKED)
def test_a_death_at_the_first_start_loses_nothing(way: Any, marks: Marks) -> None:
    """The second start succeeds."""

    def first_two() -> None:
        if len(marks) <= WORKERS:
            kill_itself()

    dataset = Planted(marks, "init", first_two)
    with loader_of(dataset, multiprocessing_context=way) as loader:
        assert [batch.tolist() for batch in loader] == [
            [k, k + 1] for k in range(0, 12, 2)
        ]
    assert len(marks) <= STARTS * WORKERS


def test_deaths_are_logged_with_pid_and_signal(
    marks: Marks, caplog: pytest.LogCaptureFixture
) -> None:
    """The logger is the package's."""

    def once() -> None:
        if len(marks) == 1:
            kill_itself()

    with caplog.at_level(logging.WARNING, "aioloader"):
        list(loader_of(Planted(marks, "init", once, only=0)))
    (record,) = [log for log in caplog.records if log.name.startswith("aioloader")]
    assert str(marks.pids()[0]) in record.getMessage()
    assert "SIGKILL" in record.getMessage()


# -- silence ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("place", ["init", "iterate", "unpickle"])
@pytest.mark.parametrize("way", WAYS)
def test_the_timeout_covers_stuck_starts(way: Any, place: str, marks: Marks) -> None:
    """The worker does not outlive the loader."""
    skip_unless_unpickled(way, place)
    dataset = kinds_at(place)(marks, place, sleep_forever)
    loader = loader_of(dataset, multiprocessing_context=way, timeout=0.5)
    with pytest.raises(BatchTimeoutError, match=r"timed out after 0\.5 seconds"):
        list(loader)
    loader.close()
    assert await_gone(marks.pids()) == []
    assert len(marks) <= STARTS * WORKERS


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_close_ends_a_worker_stuck_at_its_start(way: Any, marks: Marks) -> None:
    dataset = Planted(marks, "init", sleep_forever)
    loader = loader_of(dataset, multiprocessing_context=way)
    iterator = iter(loader)
    while len(marks) < WORKERS:
        os.sched_yield()
    loader.close()
    assert await_gone(marks.pids()) == []
    del iterator


PATCHED = """
from gevent import monkey
monkey.patch_all()
from aioloader import DataLoader
from aioloader.datasets import from_iterable

class Async:
    __len__ = list(range(4)).__len__

    async def __getitem__(self, index):
        return index

print([batch.tolist() for batch in DataLoader([1, 2], 2)])
for dataset, options in (
    (Async(), {}),
    (from_iterable(range(4)), {}),
    ([1], {"num_workers": 1}),
    ([1], {"num_workers": 1, "multiprocessing_context": "forkserver"}),
):
    try:
        list(DataLoader(dataset, **options))
    except RuntimeError as error:
        print(str(error)[:28])
"""


@pytest.mark.slow
def test_what_would_hang_under_gevent_raises() -> None:
    """A plain ``for`` works; for anything else an error names gevent."""
    run = python("-c", PATCHED, timeout=60)
    first, *rest = run.stdout.splitlines()
    assert (first, rest) == ("[[1, 2]]", ["gevent has patched threading"] * 4)
