"""The hand-over to the consumer."""

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader._pipeline.batch_task import BatchResult
from aioloader._pipeline.ready import ReadyQueue
from aioloader._pipeline.waiting import Latch
from aioloader.errors import LoaderClosedError


def numbers(queue: ReadyQueue) -> list[int]:
    """Take what is there."""
    taken = []
    while (item := queue.pop_nowait()) is not None:
        taken.append(item[0])
    return taken


async def test_a_put_from_a_thread_wakes_a_task() -> None:
    """No polling: the wait ends with the put."""
    queue = ReadyQueue(in_order=True)
    waiting = asyncio.ensure_future(queue.wait_async())
    await asyncio.sleep(0)
    thread = threading.Thread(target=queue.put, args=(0, BatchResult("a")))
    thread.start()
    assert await waiting
    thread.join()
    assert numbers(queue) == [0]


def test_a_put_wakes_a_thread() -> None:
    """A blocked thread goes on."""
    queue = ReadyQueue(in_order=True)
    threading.Thread(target=queue.put, args=(0, BatchResult("a"))).start()
    assert queue.wait(10)
    assert numbers(queue) == [0]


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


async def test_early_outcomes_wait_for_their_turn() -> None:
    """Held back until the gap is closed, then released together."""
    queue = ReadyQueue(in_order=True)
    queue.put(1, BatchResult("b"))
    assert numbers(queue) == []
    assert queue.held_back() == 1
    queue.put(0, BatchResult("a"))
    assert await queue.wait_async()
    assert numbers(queue) == [0, 1]


async def test_a_cancelled_wait_loses_nothing() -> None:
    """The item stays for the next who asks."""
    queue = ReadyQueue(in_order=True)
    waiting = asyncio.ensure_future(queue.wait_async())
    await asyncio.sleep(0)
    queue.put(0, BatchResult("a"))
    waiting.cancel()  # after the wake, before it is delivered
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await queue.wait_async()
    assert numbers(queue) == [0]


async def test_a_cancelled_wait_passes_its_wake_on() -> None:
    """Another waiter is woken in its stead."""
    queue = ReadyQueue(in_order=True)
    first = asyncio.ensure_future(queue.wait_async())
    second = asyncio.ensure_future(queue.wait_async())
    await asyncio.sleep(0)
    queue.put(0, BatchResult("a"))
    first.cancel()
    assert await second


async def test_a_wait_may_time_out() -> None:
    """And then it is forgotten: a later put wakes nobody in vain."""
    queue = ReadyQueue(in_order=True)
    assert not await queue.wait_async(0)
    assert not queue.wait(0)
    queue.put(0, BatchResult("a"))
    assert queue.wait(0)


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


async def test_a_latch_opens_for_all_and_for_good() -> None:
    """Tasks and threads, before and after."""
    latch = Latch()
    tasks = [asyncio.ensure_future(latch.wait_async()) for _ in range(2)]
    await asyncio.sleep(0)
    assert not latch.wait(0)
    threading.Thread(target=latch.set).start()
    assert all(await asyncio.gather(*tasks))
    assert latch.is_set()
    assert latch.wait()


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
