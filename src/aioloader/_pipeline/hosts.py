"""The hosts of one loader: found by place, made on demand, kept while entered."""

import asyncio
import contextlib
import threading
import warnings
import weakref
from typing import Any, Literal, TypeAlias

from aioloader._order.forks import fork_safe
from aioloader._pipeline.cpu import is_shared_thread
from aioloader._pipeline.host import (
    CallerHost,
    Host,
    Pipeline,
    wait_released,
    wait_released_async,
)
from aioloader._pipeline.lifespan import Lifespan, MakeLifespan, reads_on_loop
from aioloader._pipeline.waiting import Latch

Place: TypeAlias = (
    Literal["inline", "thread", "pool", "loop"] | asyncio.AbstractEventLoop
)


class Hosts:
    """Lease hosts to iterations, and keep them open between epochs while entered.

    Args:
        dataset: The dataset that every host reads.
        lifespan: The user's function that returns what every new host enters.
    """

    def __init__(self, dataset: Any, lifespan: MakeLifespan | None = None) -> None:
        self._dataset = dataset
        self.lifespan = lifespan
        self._by_place: dict[Place, Host] = {}
        self._kept: list[Host] = []
        self._entered = 0
        self._hosts: weakref.WeakSet[Host] = weakref.WeakSet()
        self._lock = fork_safe(threading.Lock())
        weakref.finalize(self, _release_all, self._kept)

    def lease(self, place: Place) -> Host:
        """Return the open host at ``place``, with one lease taken for the caller."""
        with self._lock:
            host = self._by_place.get(place)
            if host is None or not host.lease():
                host = self._by_place[place] = self._make(place)
                self._hosts.add(host)
                if self._entered and host.lease():
                    self._kept.append(host)
            return host

    def keep(self) -> None:
        """Keep hosts open between iterations from now on; calls nest."""
        with self._lock:
            self._entered += 1

    def leave(self) -> bool:
        """Undo one ``keep``; return whether it was the last."""
        with self._lock:
            self._entered = max(0, self._entered - 1)
            return not self._entered

    def release(self) -> None:
        """Release the kept hosts and wait until they are closed."""
        with contextlib.ExitStack() as stack:  # in reverse order, whatever is raised
            for released in self._released():
                stack.callback(wait_released, *released)

    async def release_async(self) -> None:
        """Release the kept hosts and wait without blocking the loop."""
        async with contextlib.AsyncExitStack() as stack:
            for released in self._released():
                stack.push_async_callback(wait_released_async, *released)

    def _released(self) -> list[tuple[Host, Latch, Pipeline | None]]:
        """Release the kept hosts; return them and the pipelines still ending.

        The iterators of these were dropped, so nobody else waits for them.
        """
        with self._lock:
            kept = self._kept[:]
            self._kept.clear()
            hosts = list(self._hosts)
        ending: list[tuple[Host, Latch, Pipeline | None]] = [
            (host, host.release(), None) for host in kept
        ]
        for host in hosts:
            ending += [(host, one.ended, one) for one in host.ending()]
        return ending

    def _make(self, place: Place) -> Host:
        for other, host in list(self._by_place.items()):
            if host.closed.is_set():
                del self._by_place[other]  # e.g. of a loop that is gone
        if place == "pool":
            return CallerHost(Lifespan(()))  # workers read, and enter it
        lifespan = Lifespan(self._dataset, self.lifespan)
        if place == "inline":
            return CallerHost(lifespan)
        if place == "thread":
            return Host(lifespan)
        from aioloader._pipeline.loop_host import LoopHost

        if place == "loop":
            return LoopHost(lifespan, None)
        # If nothing is bound to a thread, all loaders on callers' loops share a few.
        shares = not (lifespan or is_shared_thread()) and reads_on_loop(self._dataset)
        return LoopHost(lifespan, place, shares_threads=shares)


def _release_all(kept: list[Host]) -> None:
    """Release the hosts of a loader that was entered and never closed."""
    if kept:
        warnings.warn(
            "a DataLoader was entered and never closed", ResourceWarning, stacklevel=1
        )
    for host in kept:
        host.release()
