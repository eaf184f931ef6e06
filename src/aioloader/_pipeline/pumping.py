"""Waiting for results of worker processes, which the consumer itself reads.

There is no thread between workers and consumer: a waiting thread polls their sockets, a
waiting task lets its loop watch them, and either reads the results that arrive.
"""

import asyncio
import contextlib
import math
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from aioloader._order.forks import fork_safe
from aioloader._pipeline.waiting import LOOK_UP, Waiters


class Pump(Protocol):
    """A source of results that must be read by the consumer."""

    def descriptors(self) -> Sequence[int]:
        """Return descriptors that are readable when ``collect`` has work."""

    def collect(self) -> None:
        """Read and deliver the results that have arrived, without blocking."""


class PumpingWaiters(Waiters):
    """Waiters that operate a pump while they wait.

    Args:
        is_true: The condition to wait for.
        pump: Makes it true when operated; others may make it true as well.
    """

    def __init__(self, is_true: Callable[[], bool], pump: Pump) -> None:
        super().__init__(is_true)
        self._pump = pump
        self._watches: dict[asyncio.AbstractEventLoop, _Watch] = {}

    def wait(self, timeout: float | None = None) -> bool:
        """Block this thread until woken; return False after ``timeout`` seconds."""
        with contextlib.closing(_Bell()) as bell:
            wake = bell.ring
            if not self._enter(wake):
                return True
            try:
                is_true = self._pump_until(bell, timeout)
            except BaseException:
                self._leave(wake)
                raise
            return not self._leave(wake) or is_true

    def _pump_until(self, bell: "_Bell", timeout: float | None) -> bool:
        left = math.inf if timeout is None else max(0.0, timeout)
        until = time.monotonic() + left
        while True:
            poll = select.poll()
            for descriptor in (bell.fileno, *self._pump.descriptors()):
                poll.register(descriptor, select.POLLIN)
            ready = poll.poll(min(left, LOOK_UP) * 1000)
            self._pump.collect()
            if self._is_true():
                return True
            if any(descriptor == bell.fileno for descriptor, _ in ready):
                return True
            left = max(0.0, until - time.monotonic())
            if not ready and not left:
                return False

    def drop_pump(self) -> None:
        """Release the pump: nobody waits any longer."""
        self._pump = _Idle()
        self._watches.clear()

    def _watching(self, loop: asyncio.AbstractEventLoop) -> "_Watch":
        for other in [other for other in self._watches if other.is_closed()]:
            del self._watches[other]
        return self._watches.setdefault(loop, _Watch(loop, self._pump))


class _Idle:
    """A pump that has nothing to do."""

    def descriptors(self) -> Sequence[int]:
        """Return nothing."""
        return ()

    def collect(self) -> None:
        """Do nothing."""


class _Watch:
    """One loop's readers of the pump, shared by the tasks that wait there."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pump: Pump) -> None:
        self._loop = loop
        self._pump = pump
        self._count = 0
        self._watched: list[int] = []
        self._copies: list[int] = []

    def __enter__(self) -> None:
        self._count += 1
        if self._count == 1:
            self._watch()

    def __exit__(self, *_exc: object) -> None:
        self._count -= 1
        if not self._count:
            self._unwatch()

    def _watch(self) -> None:
        self._watched = list(self._pump.descriptors())
        # Duplicates: if the originals are closed meanwhile, their numbers may be reused
        # while the loop still watches them.
        self._copies = []
        for descriptor in self._watched:
            with contextlib.suppress(OSError):  # just closed: nothing more comes
                self._copies.append(os.dup(descriptor))
        for copy in self._copies:
            self._loop.add_reader(copy, self._collect)

    def _unwatch(self) -> None:
        for copy in self._copies:
            self._loop.remove_reader(copy)
            os.close(copy)
        self._watched, self._copies = [], []

    def _collect(self) -> None:
        before = self._watched
        self._pump.collect()
        if self._count and list(self._pump.descriptors()) != before:
            self._unwatch()  # a part of the pump was replaced
            self._watch()


class _Bell:
    """A descriptor that wakes a thread from its poll."""

    def __init__(self) -> None:
        self.fileno = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_open = True
        self._lock = fork_safe(threading.RLock())  # a finalizer may need it too

    def ring(self) -> None:
        """Wake; late calls are harmless."""
        with self._lock:
            if self._is_open:
                os.eventfd_write(self.fileno, 1)

    def close(self) -> None:
        """Close the descriptor."""
        with self._lock:
            self._is_open = False
            os.close(self.fileno)
