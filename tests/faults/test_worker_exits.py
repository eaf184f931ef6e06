"""Every way out of a loop over workers releases processes, threads and memory."""

import asyncio
import gc
import itertools
import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import uvloop

from aioloader import DataLoader
from aioloader.testing import no_leaks
from beside import beside
from faulty import (
    Faulty,
    Pids,
    is_alive,
    kill_itself,
    pids_of,
    pools_of,
    sleep_forever,
    workers_by,
    workers_of,
)
from working import AsyncSharded

KINDS: list[Any] = ["process", "thread", "forkserver"]
# Each worker of a fork server that has not imported torch yet takes a second.
MARKED = [*KINDS[:2], pytest.param("forkserver", marks=pytest.mark.slow)]
FLAGS = [True, False]


class LeaveError(Exception):
    """The consumer's own error."""


def refuse() -> None:
    """Raise an error, as a broken dataset does."""
    raise LeaveError


def made(how: str, kind: Any, **options: Any) -> DataLoader[Any]:
    """Return a loader for one cell of the matrix."""
    acts = {"dataset error": refuse, "worker kill": kill_itself}
    dataset = Faulty(40, (17,) if how in acts else (), acts.get(how, refuse))
    return DataLoader(dataset, 4, num_workers=2, **workers_by(kind), **options)


def leave(loader: DataLoader[Any], how: str) -> None:
    """Leave a ``for`` loop in one of several ways."""
    for number, _ in enumerate(loader):
        if how == "break" and number == 2:
            break
        if how == "consumer error" and number == 2:
            raise LeaveError


async def leave_async(loader: DataLoader[Any], how: str) -> None:
    """Leave an ``async for`` loop in one of several ways."""
    number = 0
    async for _ in loader:
        number += 1
        if how == "break" and number == 2:
            break
        if how == "consumer error" and number == 2:
            raise LeaveError
        if how == "cancel" and number == 2:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()


def cell(how: str, kind: str, in_order: bool, is_kept: bool) -> Any:
    """Return a cell of the matrix."""
    marks = [pytest.mark.slow] if kind == "forkserver" else []
    return pytest.param(how, kind, in_order, is_kept, marks=marks)


HOWS = ["end", "break", "consumer error", "dataset error", "worker kill"]
CELLS = [
    cell(how, kind, in_order, is_kept)
    for how, kind, in_order, is_kept in itertools.product(HOWS, KINDS, FLAGS, FLAGS)
    if (how, kind) != ("worker kill", "thread")
]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "kind", "in_order", "is_kept"), CELLS)
def test_leaving_a_for_loop_releases_everything(
    how: str, kind: Any, in_order: bool, is_kept: bool
) -> None:
    """The loader is dropped, not closed."""
    with no_leaks():
        loader = made(how, kind, in_order=in_order, persistent_workers=is_kept)
        try:
            leave(loader, how)
        except (LeaveError, RuntimeError):
            assert how not in {"end", "break"}
        del loader


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "kind", "in_order", "is_kept"),
    [*CELLS, *(cell("cancel", kind, True, flag) for kind in KINDS for flag in FLAGS)],
)
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_leaving_an_async_for_loop_releases_everything(
    run: Any, how: str, kind: Any, in_order: bool, is_kept: bool
) -> None:
    """By cancellation, too."""
    with no_leaks():
        loader = made(how, kind, in_order=in_order, persistent_workers=is_kept)
        try:
            run(leave_async(loader, how))
        except (LeaveError, RuntimeError, asyncio.CancelledError):
            assert how not in {"end", "break"}
        del loader


# -- closing ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("is_kept", FLAGS)
@pytest.mark.parametrize("kind", ["process", "forkserver"])
def test_close_ends_a_stuck_worker(kind: str, is_kept: bool) -> None:
    """It is asked to end, then terminated."""
    options: Any = {"num_workers": 2, "persistent_workers": is_kept, **workers_by(kind)}
    loader = DataLoader[Any](Faulty(40, (9,), sleep_forever), 4, **options)
    iterator = iter(loader)
    next(iterator)
    pids = pids_of(pools_of(iterator))
    loader.close()
    assert not any(map(is_alive, pids.values()))


@pytest.mark.slow
def test_close_ends_busy_workers() -> None:
    """They end after their current batch."""
    loader = DataLoader(Faulty(4000), 4, num_workers=2, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    pids = workers_of(loader)
    loader.close()
    assert not any(map(is_alive, pids.values()))
    assert list(iterator) == []
    assert len(next(iter(loader))) == 3
    loader.close()


def test_closing_kept_workers_that_stream_is_silent(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Requests that wait in a worker are dropped with it."""
    loader: Any = DataLoader(
        AsyncSharded(24), 4, num_workers=2, fetch="workers", persistent_workers=True
    )
    assert len(list(loader)) == 6
    loader.close()
    assert capfd.readouterr().err == ""


def test_a_dropped_iterator_is_released_by_the_collector() -> None:
    """Also in a cycle, whichever thread the collector runs in."""
    for kind in KINDS:
        iterator: Any = iter(DataLoader(Faulty(), 4, num_workers=2, **workers_by(kind)))
        next(iterator)
        iterator.me = iterator
        del iterator
        gc.collect()


def test_dropped_workers_of_multiprocessing_are_reaped() -> None:
    """No zombie stays."""
    loader = DataLoader(Faulty(), 4, num_workers=2, multiprocessing_context="fork")
    iterator = iter(loader)
    next(iterator)
    entries = [Path(f"/proc/{pid}") for pid in pids_of(pools_of(iterator)).values()]
    del iterator
    until = time.monotonic() + 20
    while any(entry.exists() for entry in entries) and time.monotonic() < until:
        gc.collect()
    assert not any(entry.exists() for entry in entries)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MARKED)
@pytest.mark.parametrize("is_kept", FLAGS)
def test_two_iterators_at_once_each_see_all_batches(kind: Any, is_kept: bool) -> None:
    """They share persistent workers."""
    loader = DataLoader(
        Faulty(), 4, num_workers=2, **workers_by(kind), persistent_workers=is_kept
    )
    with loader:
        first, second = iter(loader), iter(loader)
        pairs = list(zip(first, second, strict=True))
    labels = [[i for pair in pairs for i in pair[k][2].tolist()] for k in (0, 1)]
    assert labels == [list(range(24))] * 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", MARKED)
async def test_tasks_share_persistent_workers(kind: Any) -> None:
    loader = DataLoader(
        Faulty(200), 4, num_workers=2, **workers_by(kind), persistent_workers=True
    )

    async def read() -> list[int]:
        return [i async for batch in loader for i in batch[2].tolist()]

    async with loader:
        labels = list(await asyncio.gather(read(), read(), read()))
    assert labels == [list(range(200))] * 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", MARKED)
def test_two_threads_share_an_iterator(kind: Any) -> None:
    """Each batch goes to one of them, and both see the end."""
    iterator = iter(DataLoader(Faulty(400), 4, num_workers=2, **workers_by(kind)))
    with ThreadPoolExecutor(2) as threads:
        parts: Any = threads.map(list, [iterator, iterator])
    labels = [i for batch in itertools.chain(*parts) for i in batch[2].tolist()]
    assert sorted(labels) == [*range(400)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", MARKED)
async def test_a_thread_beside_a_running_loop_may_iterate(kind: Any) -> None:
    loader = DataLoader(Faulty(), 4, num_workers=2, **workers_by(kind))
    assert len(await beside(lambda: list(loader))) == 6


# -- forks and pickles --------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", [MARKED[0], MARKED[2]])
@pytest.mark.parametrize("is_kept", FLAGS)
def test_a_forked_child_has_workers_of_its_own(kind: str, is_kept: bool) -> None:
    """It drops its copies of the parent's."""
    options = workers_by(kind)
    loader = DataLoader(
        Pids(400), 4, num_workers=2, persistent_workers=is_kept, **options
    )
    iterator = iter(loader)
    batches = [next(iterator)]
    pids = pids_of(pools_of(iterator))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            mine = {pid for batch in loader for pid in batch.tolist()}
            loader.close()
            del iterator
            gc.collect()
            status = 2 if mine & set(pids.values()) or len(mine) < 1 else 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    batches += iterator
    assert {pid for batch in batches for pid in batch.tolist()} <= set(pids.values())
    assert len(batches) == 100
    loader.close()


@pytest.mark.slow
def test_a_pickled_loader_has_workers_of_its_own() -> None:
    """The original continues."""
    loader = DataLoader(Faulty(), 4, num_workers=2, persistent_workers=True)
    torch.manual_seed(1)
    iterator = iter(loader)
    batches = [next(iterator)]
    copy = pickle.loads(pickle.dumps(loader))
    assert len(list(copy)) == 6
    batches += iterator
    assert len(batches) == 6
    assert set(workers_of(copy).values()).isdisjoint(workers_of(loader).values())
    copy.close()
    loader.close()
