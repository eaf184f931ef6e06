"""The hosts of one loader: found by place, made on demand, kept while entered."""

import asyncio
import threading
import warnings
import weakref
from typing import Any, Literal, TypeAlias

from aioloader._order.forks import fork_safe
from aioloader._pipeline.host import (
    Host,
    InlineHost,
    LoopHost,
    PoolHost,
    ThreadHost,
)
from aioloader._pipeline.hosted import Keeper
from aioloader._pipeline.lifespan import Lifespan, MakeLifespan
from aioloader._pipeline.release import wait_released, wait_released_async

Place: TypeAlias = (
    Literal["inline", "thread", "pool", "loop"] | asyncio.AbstractEventLoop
)


class Hosts:
    """Lease hosts to iterations, and keep them open between epochs while ``kept``.

    Args:
        dataset: What is read in every host.
        lifespan: The user's function that returns what every new host enters.
    """

    def __init__(self, dataset: Any, lifespan: MakeLifespan | None = None) -> None:
        self._dataset = dataset
        self.lifespan = lifespan
        self._by_place: dict[Place, Host] = {}
        self._kept: list[tuple[Host, Keeper]] = []
        self._keepers = 0
        self._lock = fork_safe(threading.Lock())
        weakref.finalize(self, _warn_kept, self._kept)

    def lease(self, place: Place) -> Host:
        """Return the open host at ``place``, with one lease taken for the caller."""
        with self._lock:
            host = self._by_place.get(place)
            if host is None or not host.lease():
                host = self._by_place[place] = self._make(place)
                if self._keepers and host.lease():
                    self._kept.append((host, Keeper()))
            return host

    def keep(self) -> None:
        """Begin to keep hosts open between iterations; calls nest."""
        with self._lock:
            self._keepers += 1

    def leave(self) -> bool:
        """Undo one ``keep``; tell whether it was the last."""
        with self._lock:
            self._keepers = max(0, self._keepers - 1)
            return not self._keepers

    def release(self) -> None:
        """Let go of the hosts that are kept, and wait until they are closed."""
        for host, keeper in self._dismissed():
            wait_released(host, keeper)

    async def release_async(self) -> None:
        """Let go of the hosts that are kept, and wait without blocking the loop."""
        for host, keeper in self._dismissed():
            await wait_released_async(host, keeper)

    def _dismissed(self) -> list[tuple[Host, Keeper]]:
        with self._lock:
            kept = self._kept[:]
            self._kept.clear()
        for host, keeper in kept:
            host.dismiss(keeper)
        return kept

    def _make(self, place: Place) -> Host:
        for other, host in list(self._by_place.items()):
            if host.closed.is_set():
                del self._by_place[other]  # of a loop that is gone, say
        lifespan = Lifespan(self._dataset, self.lifespan)
        if place == "inline":
            return InlineHost(lifespan)
        if place == "pool":
            return PoolHost(lifespan)
        if place == "thread":
            return ThreadHost(lifespan)
        return LoopHost(lifespan, None if place == "loop" else place)


def _warn_kept(kept: list[tuple[Host, Keeper]]) -> None:
    """Close what a loader that was entered and never left still holds."""
    if kept:
        warnings.warn(
            "a DataLoader was entered and never closed", ResourceWarning, stacklevel=1
        )
    for host, keeper in kept:
        host.dismiss(keeper)
