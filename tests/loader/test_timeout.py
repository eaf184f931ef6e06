"""Deadlines: from when the batch is asked for, with what is stuck in the message."""

import asyncio
import threading
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from aioloader import DataLoader
from aioloader.errors import BatchTimeoutError
from beside import beside
from samples import AsyncMap, SyncMap, labels


class Stuck:
    """Mixed into datasets: one sample waits until it is let through."""

    def __init__(self, stuck: int) -> None:
        super().__init__(8)  # type: ignore[call-arg]
        self.stuck = stuck
        self.entered = threading.Event()
        self.let_through = threading.Event()


class StuckAsync(Stuck, AsyncMap):
    """It waits on the loop."""

    async def __getitem__(self, index: int) -> Any:
        if index == self.stuck:
            self.entered.set()
            await beside(self.let_through.wait)
        return await super().__getitem__(index)


class StuckSync(Stuck, SyncMap):
    """It blocks its thread."""

    def __getitem__(self, index: int) -> Any:
        if index == self.stuck:
            self.entered.set()
            self.let_through.wait()
        return super().__getitem__(index)


def patient(iterator: Any) -> Any:
    """Return the next batch, however many deadlines pass."""
    while True:
        try:
            return next(iterator)
        except BatchTimeoutError:
            continue


def check(error: BatchTimeoutError, make: Any) -> None:
    """See that the message names batch, stage, index and, for a thread, the line."""
    text = str(error)
    assert "DataLoader timed out after 0.02 seconds: batch 1 has been in stage" in text
    assert "'fetch'" in text
    assert "first index 5" in text
    assert "queues: " in text
    assert (error.batch, error.timeout) == (1, 0.02)
    assert ("self.let_through.wait()" in text) is (make is StuckSync)


@pytest.mark.parametrize("make", [StuckAsync, StuckSync])
def test_for_times_out_and_goes_on(make: Any) -> None:
    """Without workers too; the batch is still delivered when it comes."""
    dataset = make(stuck=5)
    iterator = iter(DataLoader(dataset, batch_size=4, timeout=0.02))
    found = [patient(iterator)]
    dataset.entered.wait()
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            next(iterator)
        assert isinstance(caught.value, BatchTimeoutError)
        check(caught.value, make)
    dataset.let_through.set()
    found.append(patient(iterator))
    assert labels(found) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    iterator.close()


@pytest.mark.parametrize("make", [StuckAsync, StuckSync])
async def test_async_for_times_out_and_goes_on(make: Any) -> None:
    """The same for a task."""
    dataset = make(stuck=5)
    iterator = aiter(DataLoader(dataset, batch_size=4, timeout=0.02))
    found: list[Any] = []
    caught: list[BatchTimeoutError] = []
    while len(found) < 2:
        is_stuck = dataset.entered.is_set() and len(found) == 1
        try:
            found.append(await anext(iterator))
        except BatchTimeoutError as error:
            if is_stuck:
                caught.append(error)
                dataset.let_through.set()
    check(caught[0], make)
    assert labels(found) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    await iterator.aclose()


def test_a_ready_batch_is_never_late() -> None:
    """However long the consumer takes: the clock starts when it waits."""
    loader = DataLoader(SyncMap(8), batch_size=4, timeout=1e-9, prefetch_factor=2)
    iterator = iter(loader)
    taken: list[Any] = []
    while len(taken) < 2:
        try:
            taken.append(next(iterator))
        except BatchTimeoutError:
            feed: Any = iterator._steps.feed
            feed.pipeline.ready.wait()
    assert labels(taken) == [[0, 1, 2, 3], [4, 5, 6, 7]]


async def test_a_stuck_stage_other_than_fetch_is_named() -> None:
    """A collate that hangs."""
    gate, entered = threading.Event(), threading.Event()

    def collate(samples: Any) -> Any:
        entered.set()
        gate.wait()
        return samples

    loader = DataLoader(AsyncMap(4), batch_size=4, collate_fn=collate, timeout=0.01)
    iterator = aiter(loader)
    is_there = False
    while not is_there:
        is_there = entered.is_set()
        with pytest.raises(BatchTimeoutError) as caught:
            await anext(iterator)
    assert "batch 0 has been in stage 'collate'" in str(caught.value)
    gate.set()
    await iterator.aclose()


async def test_giving_up_after_a_timeout_releases_everything() -> None:
    """Also while the read is stuck: the loop's side is cancelled."""
    dataset = StuckAsync(stuck=0)
    with pytest.raises(TimeoutError):
        async for _ in DataLoader(dataset, batch_size=4, timeout=0.01, loop="caller"):
            pass
    dataset.let_through.set()
    await asyncio.sleep(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "timeout", [1, 0.5, np.float32(0.5), np.int64(1), Fraction(1, 2)]
)
def test_the_number_is_as_it_was_given(timeout: Any) -> None:
    """Scripts look for torch's words: "1", and not "1.0"."""
    dataset = StuckSync(stuck=0)
    iterator = iter(DataLoader(dataset, batch_size=4, timeout=timeout))
    with pytest.raises(BatchTimeoutError, match=f"timed out after {timeout} seconds"):
        next(iterator)
    dataset.let_through.set()
    iterator.close()
