"""The hand-over to the consumer."""

import asyncio
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader._base.records import Counters
from aioloader._device.stage import Staged
from aioloader._pipeline.batch_task import BatchResult
from aioloader._pipeline.ready import ReadyQueue
from aioloader.errors import LoaderClosedError


def numbers(queue: ReadyQueue) -> list[int]:
    """Take what is there."""
    taken = []
    while (item := queue.pop_nowait()) is not None:
        taken.append(item[0])
    return taken


@given(st.permutations(range(9)), st.sets(st.integers(1, 8)), st.booleans())
def test_any_order_of_arrival(
    arriving: list[int], without: set[int], in_order: bool
) -> None:
    """In order, results leave by number, and none is lost; or else as they come."""
    queue = ReadyQueue(in_order=in_order, without=frozenset(without))
    wanted = [number for number in arriving if number not in without]
    found: list[int] = []
    for number in wanted:
        queue.put(number, BatchResult())
        found += numbers(queue)
    assert found == (sorted(wanted) if in_order else wanted)
    assert queue.held_back() == 0


async def test_a_failure_ends_every_wait_after_the_items() -> None:
    """What is ready is delivered first; the error itself is raised once."""
    queue = ReadyQueue(in_order=True)
    waiting = [asyncio.ensure_future(queue.wait_async()) for _ in range(3)]
    await asyncio.sleep(0)
    queue.put(0, BatchResult("a"))
    queue.fail(KeyError("gone"))
    assert all(await asyncio.gather(*waiting))
    assert queue.pop_nowait() is not None
    with pytest.raises(KeyError):
        queue.pop_nowait()
    with pytest.raises(LoaderClosedError):
        queue.pop_nowait()


def test_a_wake_for_a_closed_loop_is_dropped() -> None:
    """The waiter's loop may be gone when the item comes."""
    queue = ReadyQueue(in_order=True)
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(queue.wait_async())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    queue.put(0, BatchResult("a"))
    assert numbers(queue) == [0]
    waiting.get_coro().close()
    waiting._log_destroy_pending = False  # type: ignore[attr-defined]


def test_a_stopped_device_stage_ends_waits() -> None:
    """Another thread may have closed the iterator, whose consumer waits here."""
    queue, mover = ReadyQueue(in_order=True), cast("Any", None)
    stage = Staged(queue, mover, 1, Counters())
    stage.stop()
    assert stage.wait(0)
