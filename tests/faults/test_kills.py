"""Workers are killed from outside, again and again: the epoch is what it would be."""

import contextlib
import os
import random
import select
import signal
import threading
import time
from typing import Any, Self

import pytest
import torch

from aioloader import DataLoader
from faulty import AsyncFaulty, Faulty, pids_of, pools_of

PERIOD = 0.1
# As many come between two deaths: on a busy machine, too, none costs two lives.
BETWEEN = 8
BATCHES = 500


class Slow(Faulty):
    """Takes its time, so that an epoch sees many deaths."""

    def __getitem__(self, index: int) -> Any:
        end = time.perf_counter() + 0.0008
        while time.perf_counter() < end:
            pass
        return super().__getitem__(index)


class SlowAsync(AsyncFaulty):
    """The same as a coroutine."""

    async def __getitem__(self, index: int) -> Any:
        end = time.perf_counter() + 0.0008
        while time.perf_counter() < end:
            pass
        return await super().__getitem__(index)


class Killer:
    """Kills a random worker of a pool, every 100 ms, until told to stop.

    Args:
        pool: The pool.
        found: The batches that have come so far.
        seed: Of the choice.
    """

    def __init__(self, pool: Any, found: list[Any], seed: int) -> None:
        self.pool = pool
        self.found = found
        self.random = random.Random(seed)
        self.kills = 0
        self.stop = os.eventfd(0)
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        """Kill by signal, as anybody could."""
        poll = select.poll()
        poll.register(self.stop, select.POLLIN)
        latest, known, was_new = 0, set[int](), False
        while not poll.poll(PERIOD * 1000):
            if len(self.found) < latest + BETWEEN:
                continue
            latest = len(self.found)
            pids = [one.pid for one in self.pool._dispatcher.workers if one.pid]
            # Three processes that die in a row without a batch end the epoch. On a busy
            # machine a new one may not have made any: never two new ones in a row.
            if was_new:
                pids = [pid for pid in pids if pid in known]
            with contextlib.suppress(IndexError, ProcessLookupError):
                pid = self.random.choice(pids)
                os.kill(pid, signal.SIGKILL)
                self.kills += 1
                was_new = pid not in known
            known = {one.pid for one in self.pool._dispatcher.workers if one.pid}

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        os.eventfd_write(self.stop, 1)
        self.thread.join()
        os.close(self.stop)


def epoch(loader: DataLoader[Any], seed: int | None) -> tuple[list[Any], int]:
    """Return the batches of an epoch, and how many workers it has cost."""
    torch.manual_seed(3)
    iterator = iter(loader)
    found = [next(iterator)]
    if seed is None:
        return found + list(iterator), 0
    pool = pools_of(iterator)
    pids_of(pool)
    with Killer(pool, found, seed) as killer:
        for batch in iterator:
            found.append(batch)  # noqa: PERF402  (the killer counts them)
    return found, killer.kills


def assert_same(found: list[Any], expected: list[Any]) -> None:
    """Fail unless batches are alike, to the bit and in order."""
    assert len(found) == len(expected)
    for batch, wanted in zip(found, expected, strict=True):
        for one, other in zip(batch, wanted, strict=True):
            assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "seed"),
    [
        (None, 1),
        pytest.param("forkserver", 3, marks=pytest.mark.fuzz),
        pytest.param(None, 2, marks=pytest.mark.fuzz),
        pytest.param("forkserver", 4, marks=pytest.mark.fuzz),
    ],
)
def test_a_worker_killed_every_100_ms(way: Any, seed: int) -> None:
    """Every sample once, in order, with the augmentations of an undisturbed run."""
    loader = DataLoader(
        Slow(BATCHES * 8),
        8,
        num_workers=2,
        shuffle=True,
        timeout=30,
        multiprocessing_context=way,
    )
    expected, _ = epoch(loader, None)
    found, kills = epoch(loader_like(loader), seed)
    assert kills >= 5
    assert len(found) == BATCHES
    assert_same(found, expected)
    assert sorted(i for batch in found for i in batch[2].tolist()) == [
        *range(BATCHES * 8)
    ]


def loader_like(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader whose first epoch is that of ``loader``."""
    return DataLoader(
        loader.dataset,
        8,
        num_workers=2,
        shuffle=True,
        timeout=loader.timeout,
        multiprocessing_context=loader.multiprocessing_context,
    )


@pytest.mark.slow
@pytest.mark.parametrize("fetch", ["workers", "loader"])
def test_async_datasets_under_fire(fetch: Any) -> None:
    """Several batches in hand, or samples that the loader has read: all arrive."""
    loader = DataLoader(
        SlowAsync(1600),
        8,
        num_workers=2,
        concurrency=16,
        fetch=fetch,
        timeout=30,
        collate_fn=slowly,
    )
    # Not by the clock: two kills are so far apart that none hits a batch again.
    chosen, found = random.Random(4), []
    iterator = iter(loader)
    for number, batch in enumerate(iterator):
        found.append(batch)
        if number % 16 == 8:
            with contextlib.suppress(ProcessLookupError):
                os.kill(chosen.choice(pids_of(pools_of(iterator))), signal.SIGKILL)
    assert [i for batch in found for i in batch[1].tolist()] == list(range(1600))


def slowly(samples: list[Any]) -> Any:
    """Collate, after 3 ms of work."""
    end = time.perf_counter() + 0.003
    while time.perf_counter() < end:
        pass
    return torch.utils.data.default_collate(samples)
