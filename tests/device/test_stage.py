"""The stage between the pipeline and the consumer, step by step."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from aioloader._device.mover import Mover
from aioloader._device.stage import Staged
from aioloader._observe.records import Copies
from aioloader._pipeline.batch_task import BatchResult
from aioloader._pipeline.ready import ReadyQueue
from aioloader.errors import LoaderClosedError


class Delivery:
    """A batch that arrives when the test says so."""

    copied_bytes, held_bytes, late = 10, 20, ()
    mark = True

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self.may_arrive = threading.Event()
        self.is_released = threading.Event()
        self.is_handed_over = False
        self.taken: Any = None

    def hand_over(self) -> Any:
        """Return the batch."""
        self.is_handed_over = True
        return self.batch

    def release(self) -> None:
        """Wait for the arrival."""
        assert self.may_arrive.wait(20)
        self.is_released.set()

    def end(self) -> None:
        """Wait until the device is there."""
        self.taken.synchronize()


class Carrier(Mover):
    """Moves batches, and tells how many are ahead whenever one is."""

    kind = Delivery

    def __init__(self, *, arrives: bool = True) -> None:
        super().__init__(None)
        self.deliveries: list[Delivery] = []
        self.ahead: list[int] = []
        self.arrives = arrives
        self.moved = threading.Semaphore(0)

    def move(self, batch: Any) -> Any:
        """Begin."""
        delivery = self.kind(batch)
        if self.arrives:
            delivery.may_arrive.set()
        self.deliveries.append(delivery)
        taken = sum(each.is_handed_over for each in self.deliveries)
        self.ahead.append(len(self.deliveries) - taken)
        self.moved.release()
        return delivery


def staged(carrier: Carrier, batches: list[Any], depth: int = 1) -> Staged:
    """Return a stage behind a queue of batches."""
    ready = ReadyQueue(in_order=True)
    for number, batch in enumerate(batches):
        ready.put(number, BatchResult(batch))
    return Staged(ready, carrier, depth, 3, Copies())


def take(stage: Staged) -> BatchResult:
    """Return the next outcome, as a source takes it."""
    while (item := stage.pop_nowait()) is None:
        assert stage.wait(20)
    return item[1]


def ended(stage: Staged) -> bool:
    """End a stage, and what is before it."""
    stage.stop()
    stage._inner.finish()
    return stage.join()


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_depth(depth: int) -> None:
    """No more are ahead than that, but for the one that is asked for."""
    carrier = Carrier()
    stage = staged(carrier, list(range(40)), depth)
    batches = []
    for _ in range(40):
        batches.append(take(stage).batch)
        for _ in range(min(depth, 40 - len(batches))):
            assert carrier.moved.acquire(timeout=20)  # it goes on by itself
        for _ in range(min(depth, 40 - len(batches))):
            carrier.moved.release()
    assert batches == list(range(40))
    assert max(carrier.ahead) <= depth + 1
    stage.finish()
    assert stage.join()


def test_nothing_is_moved_before_it_is_asked_for() -> None:
    """An iterator that is not used costs nothing; nor does ending it."""
    carrier = Carrier()
    stage = staged(carrier, [0, 1])
    assert ended(stage)
    assert carrier.deliveries == []


def test_host_memory_is_held_until_the_copy_has_ended() -> None:
    """Also while the consumer has the batch already; of two batches at most."""
    carrier = Carrier(arrives=False)
    stage = staged(carrier, list(range(9)), depth=4)
    assert take(stage).batch == 0
    for _ in range(2):
        assert carrier.moved.acquire(timeout=20)
    first, second = carrier.deliveries
    assert not first.is_released.is_set()
    first.may_arrive.set()
    assert first.is_released.wait(20)
    assert carrier.moved.acquire(timeout=20)  # then there is room for a third
    assert not second.is_released.is_set()
    carrier.arrives = True
    for delivery in carrier.deliveries:
        delivery.may_arrive.set()
    assert ended(stage)
    assert all(each.is_released.is_set() for each in carrier.deliveries)


def test_copies_are_noted() -> None:
    """When there was room for each, when it began and ended; and what is ahead."""
    carrier = Carrier()
    stage = staged(carrier, list(range(3)), depth=2)
    for _ in range(3):
        take(stage)
    for delivery in carrier.deliveries:
        assert delivery.is_released.wait(20)
    assert ended(stage)
    notes = list(stage._copies.latest)
    assert [(one.number, one.nbytes) for one in notes] == [(0, 10), (1, 10), (2, 10)]
    for one in notes:
        assert 0 < one.asked <= one.began <= one.ended
    assert stage._copies.moved_bytes == stage._copies.taken_bytes == 60


@pytest.mark.parametrize("batches", [[], [0]])
def test_the_pipelines_failure(batches: list[int]) -> None:
    """It is raised behind what came before, once."""
    ready = ReadyQueue(in_order=True)
    for number in batches:
        ready.put(number, BatchResult(number))
    ready.fail(KeyError("lost"))
    stage = Staged(ready, Carrier(), 1, 0, Copies())
    assert [take(stage).batch for _ in batches] == batches
    with pytest.raises(KeyError, match="lost"):
        take(stage)
    with pytest.raises(LoaderClosedError):
        take(stage)
    assert ended(stage)


class Lost(Delivery):
    """The device is gone."""

    def release(self) -> None:
        """Raise what torch raises then."""
        raise RuntimeError("CUDA error: device lost")


def test_a_lost_device() -> None:
    """Whoever waits learns of it."""
    carrier = Carrier()
    carrier.kind = Lost
    stage = staged(carrier, [0])
    assert take(stage).batch == 0
    with pytest.raises(RuntimeError, match="device lost"):
        take(stage)
    assert ended(stage)


def after_a_wait(stage: Staged, act: Callable[[], None]) -> bool:
    """Call ``act`` while a thread waits; return what the wait returned."""
    waiting = threading.Event()
    results = []

    def wait() -> None:
        stage.pop_nowait()
        waiting.set()
        results.append(stage.wait(20))

    thread = threading.Thread(target=wait)
    thread.start()
    assert waiting.wait(20)
    act()
    thread.join(20)
    return results == [True]


def test_an_end_wakes_who_waits() -> None:
    """Nobody waits for what will not come."""
    stage = staged(Carrier(), [])
    assert after_a_wait(stage, stage.finish)
    assert stage.join()


class Point:
    """A point on the consumer's stream."""

    def __init__(self) -> None:
        self.is_awaited = threading.Event()
        self.is_reached = threading.Event()

    def synchronize(self) -> None:
        """Wait until the device is there."""
        self.is_awaited.set()
        assert self.is_reached.wait(20)


class Behind(Delivery):
    """Handed over to a device that has much to do yet."""

    def hand_over(self) -> Any:
        """Return the batch."""
        self.taken = Point()
        return super().hand_over()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_device_that_falls_behind(depth: int) -> None:
    """No memory is taken for a batch while that of too many may still be in use."""
    carrier = Carrier()
    carrier.kind = Behind
    stage = staged(carrier, list(range(9)), depth)
    assert [take(stage).batch for _ in range(depth + 2)] == list(range(depth + 2))
    assert carrier.deliveries[0].taken.is_awaited.wait(20)  # for one batch more
    moved = len(carrier.deliveries)
    while stage.pop_nowait() is not None:  # what was moved before
        pass
    assert depth + 2 <= moved == len(carrier.deliveries) <= 2 * depth + 2
    for delivery in carrier.deliveries:
        delivery.taken.is_reached.set()
    assert take(stage).batch == moved
    carrier.kind = Delivery
    for delivery in carrier.deliveries:
        if delivery.taken is not None:
            delivery.taken.is_reached.set()
    assert ended(stage)


def test_a_timeout() -> None:
    """A wait that is given up leaves the stage as it was."""
    stage = staged(Carrier(), [])
    assert stage.pop_nowait() is None
    assert not stage.wait(0.01)
    stage._inner.put(0, BatchResult(5))
    assert take(stage).batch == 5
    stage.finish()
    assert stage.join()
