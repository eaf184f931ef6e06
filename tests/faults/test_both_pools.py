"""Worker processes of Linux and those of every platform end in the same ways."""

import asyncio
import errno
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from aioloader import DataLoader
from aioloader.errors import BatchTimeoutError, WorkerStartError
from faulty import (
    Faulty,
    is_alive,
    kill_itself,
    pids_of,
    pools_of,
    sleep_forever,
    stop_itself,
)
from samples import collect

pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("start", ["fork", "forkserver", "spawn"]),
]


def loader_of(start: str, *faults: Any, **options: Any) -> Any:
    options = {"num_workers": 2, "multiprocessing_context": start, **options}
    return DataLoader(Faulty(24, *faults), 4, **options)


def labels(batches: Any) -> list[int]:
    return [label for batch in batches for label in batch[2].tolist()]


def test_a_killed_workers_batch_is_made_again(start: str, tmp_path: Path) -> None:
    loader = loader_of(start, (5,), kill_itself, tmp_path)
    assert labels(loader) == [*range(24)]
    assert loader.stats().worker_restarts == 1


def test_a_timeout_names_a_stopped_worker(start: str) -> None:
    """The message says what it was doing; earlier batches were delivered."""
    with loader_of(start, (5,), stop_itself, timeout=8) as loader:
        iterator = iter(loader)
        assert labels([next(iterator)]) == [*range(4)]
        with pytest.raises(BatchTimeoutError, match="it is stopped") as caught:
            next(iterator)
        assert caught.value.batch == 1
        pids = pids_of(pools_of(iterator))
    assert not any(map(is_alive, pids.values()))


def test_a_start_without_descriptors_says_so(start: str) -> None:
    """Once there are more of them, the same loader works."""
    loader = loader_of(start)
    list(loader)  # a fork server is there
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(free := os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, hard))  # for a single one
    try:
        with pytest.raises((OSError, WorkerStartError)) as caught:
            list(loader)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert os.strerror(errno.EMFILE) in str(caught.value)
    assert labels(loader) == [*range(24)]


async def test_closing_after_a_cancelled_wait_ends_a_stuck_worker(start: str) -> None:
    """The cancelled task ends at once."""
    loader = loader_of(start, (5,), sleep_forever)
    iterator = aiter(loader)
    assert labels([await anext(iterator)]) == [*range(4)]
    pids = pids_of(pools_of(iterator))
    waiting = asyncio.ensure_future(anext(iterator))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await loader.aclose()
    assert not any(map(is_alive, pids.values()))
    loader.dataset.at = ()
    assert labels(await collect(loader)) == [*range(24)]
