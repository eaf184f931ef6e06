"""The stage that moves batches to the device before the consumer requests them.

A thread takes ready batches, starts their copies and passes them on immediately; the
consumer's stream waits for the copies on the device. The host memory of at most two
batches is kept until their copies end: the second copy is queued during the first, so
there is no gap. (Leaves that move at delivery keep it longer.) The thread sleeps while
no batch is ready or the queue is full, and while the device is several batches late.
"""

import contextlib
import time
from collections import deque
from typing import Any

import torch

from aioloader._base.cpu_threads import CpuThread
from aioloader._base.failures import noted
from aioloader._base.raising import raisable
from aioloader._base.records import Copy, Counters
from aioloader._base.waiting import Waiters
from aioloader._device.leaves import leaves_of
from aioloader._device.mover import Moved, Mover
from aioloader._pipeline.batch_task import BatchResult
from aioloader._pipeline.ready import ReadyQueue
from aioloader._pipeline.runner import GRACE


class Staged:
    """A queue like ``ReadyQueue`` whose first few batches are already moved.

    A batch is moved when fewer than ``depth`` moved batches await the consumer. So the
    device has up to ``depth`` batches besides those that the consumer holds.
    """

    def __init__(
        self, inner: ReadyQueue, mover: Mover, depth: int, counters: Counters
    ) -> None:
        self._inner = inner
        self._mover = mover
        self._depth = depth
        self._counters = counters
        self._ready = ReadyQueue(in_order=False)
        self.wait, self.wait_async = self._ready.wait, self._ready.wait_async
        self._asked = 0.0  # since when there is room for a batch; 0: no room
        # Per copy: the batch, its number, when there was room, and when the copy began.
        self._in_flight: deque[tuple[Moved, int, float, float]] = deque()
        self._taken: deque[Moved] = deque()
        self._has_started = self._is_stopped = False
        self._is_requested = False  # whether the consumer waits for the next item
        self._room = Waiters(self._may_proceed)
        self._thread = CpuThread("aioloader-device")

    def pop_nowait(self) -> tuple[int, BatchResult] | None:
        if not self._has_started:
            self._has_started = True
            self._thread.post(self._serve)
        item = self._ready.pop_nowait()
        self._is_requested = item is None
        if item is not None:
            self._room.wake()
            if item[1].batch is not None:
                self._hand_over(*item)
        return item

    def finish(self) -> None:
        self._inner.finish()
        self.stop()

    def stop(self) -> None:
        """Tell the thread to end; callable from any thread and from finalizers."""
        if not self._is_stopped:
            self._is_stopped = True
            self._ready.finish()  # a consumer may wait in another thread
            self._room.wake()
            self._thread.stop(self._thread.ident)

    def join(self) -> bool:
        self._thread.join(GRACE)
        return not self._thread.is_alive()  # a forked child does not have the thread

    def _hand_over(self, number: int, result: BatchResult) -> None:
        moved: Moved = result.batch
        self._counters.taken_bytes += moved.held_bytes
        try:
            result.batch = moved.hand_over()
        except BaseException as error:  # raised by the step
            result.batch = None
            error = raisable(error, "the batch's move")
            result.error = noted(error, f"in stage 'device', batch {number}")
        if moved.taken is not None:
            self._taken.append(moved)
            if self._is_stopped and moved.late:  # the thread may not see it anymore
                moved.end()

    def _serve(self) -> None:
        try:
            self._mover.enter_thread()
            while not self._is_stopped:
                self._step()
        except BaseException as error:  # handed to the consumer
            self._ready.fail(error)
        finally:
            self._wind_up()

    def _step(self) -> None:
        """Move a batch, release a batch's host memory, or sleep until there is work."""
        has_room = self._has_room()
        if has_room and not self._asked:
            self._asked = time.perf_counter()
        item = self._inner.pop_nowait() if has_room else None
        if item is not None:
            number, result = item
            if result.batch is not None:
                self._move(number, result)
            self._ready.put(number, result)
            while len(self._in_flight) > 1:
                self._release()
        elif self._in_flight:
            self._release()
        elif has_room:
            self._inner.wait()
        else:
            self._room.wait()

    def _move(self, number: int, result: BatchResult) -> None:
        """Replace the batch in ``result`` by its moved copy, or by an error."""
        while len(self._taken) > self._depth + 1:
            self._taken.popleft().end()
        began, asked = time.perf_counter(), self._asked
        self._asked = 0.0
        try:
            moved = self._mover.move(result.batch)
        except BaseException as error:  # handed to the consumer, in order
            batch, result.batch = result.batch, None
            where = self._place(number, batch)
            result.error = noted(raisable(error, "the batch's move"), where)
            return
        result.batch = moved
        self._counters.moved_bytes += moved.held_bytes
        self._in_flight.append((moved, number, asked, began))
        if moved.mark is None:
            self._release()

    def _release(self) -> None:
        """Wait for the oldest copy, release its host memory and record its times."""
        moved, number, asked, began = self._in_flight.popleft()
        moved.release()
        ended, nbytes = time.perf_counter(), moved.copied_bytes
        self._counters.copies.append(Copy(number, asked, began, ended, nbytes))

    def _place(self, number: int, batch: Any) -> str:
        """Return the error note for a batch: how many tensors and bytes it has."""
        leaves = leaves_of(batch)
        sizes = [leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor)]
        epoch = self._counters.epoch
        return (
            f"in stage 'device' of epoch {epoch}, batch {number}: moving {len(sizes)} "
            f"tensors of {sum(sizes):,} bytes to {self._mover.device}"
        )

    def _wind_up(self) -> None:
        """Release the memory that the stage still holds; called as its thread ends."""
        if self._is_stopped:
            self._ready.close()
        while self._in_flight:
            with contextlib.suppress(RuntimeError):  # the device is lost
                self._release()
        for moved in list(self._taken):
            if moved.late:  # their host memory is still needed for a copy
                with contextlib.suppress(RuntimeError):
                    moved.end()

    def _has_room(self) -> bool:
        return len(self._ready) < self._depth + self._is_requested

    def _may_proceed(self) -> bool:
        return self._is_stopped or bool(self._in_flight) or self._has_room()
