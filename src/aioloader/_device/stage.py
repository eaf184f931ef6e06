"""The stage between the pipeline and the consumer: moves batches ahead of time.

A thread takes ready batches, starts their copies and passes them on at once; the
consumer's stream waits for the copy on the device. A batch's host memory is held until
its copy has ended, for at most two batches: the second is queued while the first is
copied, so that there is no gap. The thread sleeps when nothing is requested, and when
the device is several batches late: memory in use by the device cannot be reused.
"""

import contextlib
import time
from collections import deque
from typing import Any, NamedTuple, Protocol

import torch

from aioloader._device.accelerator import Mark
from aioloader._device.leaves import map_leaves
from aioloader._observe.records import Copies, Copy
from aioloader._order.failures import noted
from aioloader._order.raising import raisable
from aioloader._pipeline.batch_task import BatchResult
from aioloader._pipeline.cpu import CpuThread
from aioloader._pipeline.host import GRACE
from aioloader._pipeline.ready import ReadyQueue
from aioloader._pipeline.waiting import Latch, Waiters
from aioloader.errors import LoaderClosedError


class Delivery(Protocol):
    """A batch in transit.

    Attributes:
        taken: A mark on the consumer's stream at the hand-over; None before, or if
            there is no stream.
        is_async: Whether it may not have arrived when ``move`` returns.
        copied_bytes: Bytes that are copied ahead.
        held_bytes: Its memory on the device, in bytes.
    """

    taken: Mark | None
    is_async: bool
    copied_bytes: int
    held_bytes: int

    def hand_over(self) -> Any:
        """Return the batch; called once, in the consumer's thread."""

    def release(self) -> None:
        """Block until its host memory is no longer read, and release it."""

    def is_held(self) -> bool:
        """Tell whether ``release`` must be called (again)."""


class Carrier(Protocol):
    """Moves batches."""

    device: torch.device

    def enter_thread(self) -> None:
        """Prepare the stage's thread."""

    def move(self, batch: Any) -> Delivery:
        """Start moving a batch."""


class _Flight(NamedTuple):
    """A delivery whose sources are held, and the record of its copy."""

    delivery: Delivery
    number: int
    asked: float
    began: float


class Staged:
    """A queue like ``ReadyQueue`` whose first few batches are already moved.

    A batch is moved when fewer than ``depth`` moved ones wait for the consumer. So up
    to ``depth`` are on the device in addition to the consumer's.

    Args:
        inner: The queue that batches come from.
        carrier: Moves them.
        depth: How many are moved ahead, at least 1.
        epoch: Epoch number, for notes on errors.
        copies: The record of copies.
    """

    def __init__(
        self,
        inner: ReadyQueue,
        carrier: Carrier,
        depth: int,
        epoch: int,
        copies: Copies,
    ) -> None:
        self._inner = inner
        self._carrier = carrier
        self._depth = depth
        self._epoch = epoch
        self._copies = copies
        self._asked = 0.0  # when there was room for the next batch
        self._items: deque[tuple[int, BatchResult]] = deque()
        self._in_flight: deque[_Flight] = deque()
        self._late: deque[Delivery] = deque()  # until their late leaves have arrived
        self._taken: deque[Mark] = deque()
        self._broken: BaseException | None = None
        self._is_finished = self._is_stopped = False
        self._asking = 0
        self._waiters = Waiters(self._is_settled)
        self._room = Waiters(self._may_go_on)
        self._thread = CpuThread("aioloader-device")
        self._ended = Latch()
        self._has_started = False

    # -- for the consumer ---------------------------------------------------------

    def pop_nowait(self) -> tuple[int, BatchResult] | None:
        """Take the next item, or None if there is none yet.

        Raises:
            BaseException: The error that ended the pipeline, when nothing is left.
        """
        self._begin()
        try:
            number, result = self._items.popleft()
        except IndexError:
            self._raise_broken()
            return None
        self._room.wake()
        if result.batch is not None:
            self._hand_over(number, result)
        return number, result

    def wait(self, timeout: float | None = None) -> bool:
        """Block until there is an item or the end; return False on timeout."""
        self._ask(1)
        try:
            return self._waiters.wait(timeout)
        finally:
            self._ask(-1)

    async def wait_async(self, timeout: float | None = None) -> bool:
        """Suspend until there is an item or the end; return False on timeout."""
        self._ask(1)
        try:
            return await self._waiters.wait_async(timeout)
        finally:
            self._ask(-1)

    def finish(self) -> None:
        """End every wait: there will be no more items."""
        self._is_finished = True
        self._waiters.wake()
        self._inner.finish()
        self.stop()

    def stop(self) -> None:
        """Start ending, from any thread or finalizer."""
        if not self._is_stopped:
            self._is_stopped = True
            self._room.wake()
            self._thread.stop(self._ended.set)

    def join(self) -> bool:
        """Wait, bounded, until it has ended; return whether it has.

        A forked child does not have the thread.
        """
        is_over = not self._thread.is_alive() or self._ended.wait(GRACE)
        self._thread.join(GRACE if is_over else 0)
        return is_over

    # -- in the stage's thread ----------------------------------------------------

    def _begin(self) -> None:
        if not self._has_started:
            self._has_started = True
            self._thread.post(self._serve)

    def _serve(self) -> None:
        try:
            self._carrier.enter_thread()
            while not self._is_stopped:
                self._step()
        except BaseException as error:  # handed to the consumer
            self._broken = error
            self._waiters.wake()
        finally:
            self._wind_up()

    def _step(self) -> None:
        """Move a batch, or release one that has arrived, or sleep."""
        has_room = self._has_room()
        if has_room and not self._asked:
            self._asked = time.perf_counter()
        item = self._inner.pop_nowait() if has_room else None
        if item is not None:
            self._pass_on(*item)
        elif self._in_flight:
            self._release()
        elif self._late:
            self._late.popleft().release()
        elif has_room:
            self._inner.wait()
        else:
            self._room.wait()

    def _pass_on(self, number: int, result: BatchResult) -> None:
        if result.batch is not None:
            self._move(number, result)
        self._items.append((number, result))
        self._waiters.wake(1)
        while len(self._in_flight) > 1:
            self._release()
        while len(self._late) > 1:
            self._late.popleft().release()

    def _release(self) -> None:
        """Wait for the oldest copy, record it and release its sources."""
        delivery, number, asked, began = self._in_flight.popleft()
        delivery.release()
        ended, nbytes = time.perf_counter(), delivery.copied_bytes
        self._copies.append(Copy(number, asked, began, ended, nbytes))

    def _move(self, number: int, result: BatchResult) -> None:
        """Replace a batch in its result with its delivery, or with an error."""
        while len(self._taken) > self._depth + 1:
            self._taken.popleft().synchronize()
        began, asked = time.perf_counter(), self._asked
        self._asked = 0.0
        try:
            delivery = self._carrier.move(result.batch)
        except BaseException as error:  # handed to the consumer, in order
            batch, result.batch = result.batch, None
            where = self._place(number, batch)
            result.error = noted(raisable(error, "the batch's move"), where)
        else:
            result.batch = delivery
            self._copies.moved_bytes += delivery.held_bytes
            self._in_flight.append(_Flight(delivery, number, asked, began))
            if not delivery.is_async:
                self._release()

    def _place(self, number: int, batch: Any) -> str:
        """Return the error note for a batch, with what was to be moved."""
        sizes: list[int] = []

        def measure(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                sizes.append(leaf.nbytes)
            return leaf

        map_leaves(batch, measure)
        return (
            f"in stage 'device' of epoch {self._epoch}, batch {number}: moving "
            f"{len(sizes)} tensors of {sum(sizes):,} bytes to {self._carrier.device}"
        )

    def _wind_up(self) -> None:
        """Release everything that will not be requested."""
        if self._is_stopped:
            self._items.clear()
        while self._in_flight or self._late:
            with contextlib.suppress(RuntimeError):  # the device is lost
                if self._in_flight:
                    self._release()
                else:
                    self._late.popleft().release()

    # -- within -------------------------------------------------------------------

    def _hand_over(self, number: int, result: BatchResult) -> None:
        delivery = result.batch
        self._copies.taken_bytes += delivery.held_bytes
        try:
            result.batch = delivery.hand_over()
        except BaseException as error:  # raised by the step
            result.batch = None
            error = raisable(error, "the batch's move")
            result.error = noted(error, f"in stage 'device', batch {number}")
        if delivery.taken is not None:
            self._taken.append(delivery.taken)
        if delivery.is_held():
            self._late.append(delivery)
            self._room.wake()
            if self._is_stopped:  # the thread may not look again
                delivery.release()

    def _ask(self, change: int) -> None:
        with self._room.lock:
            self._asking += change
        if change > 0:
            self._room.wake()

    def _has_room(self) -> bool:
        return len(self._items) < self._depth + self._asking

    def _may_go_on(self) -> bool:
        is_held = bool(self._in_flight or self._late)
        return self._is_stopped or is_held or self._has_room()

    def _is_settled(self) -> bool:
        return bool(self._items) or self._is_finished or self._broken is not None

    def _raise_broken(self) -> None:
        error = self._broken
        if error is not None:
            # Raised once: keeping the error would keep the frames of its traceback.
            self._broken = LoaderClosedError("the iterator has failed before")
            try:
                raise error
            finally:
                del error
