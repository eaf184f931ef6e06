"""The homes of one loader: found by place, made on demand, kept while entered."""

import asyncio
import threading
import warnings
import weakref
from typing import Any, Literal, TypeAlias

from aioloader._pipeline.guests import Keeper
from aioloader._pipeline.home import (
    Home,
    InlineHome,
    LoopHome,
    PoolHome,
    ThreadHome,
)
from aioloader._pipeline.lifespan import Lifespan, MakeLifespan
from aioloader._pipeline.release import wait_released, wait_released_async

Place: TypeAlias = (
    Literal["inline", "thread", "pool", "loop"] | asyncio.AbstractEventLoop
)


class Homes:
    """Lease homes to iterations, and keep them open between epochs while ``kept``.

    Args:
        dataset: What is read in every home.
        lifespan: The user's function that returns what every new home enters.
    """

    def __init__(self, dataset: Any, lifespan: MakeLifespan | None = None) -> None:
        self._dataset = dataset
        self.lifespan = lifespan
        self._by_place: dict[Place, Home] = {}
        self._kept: list[tuple[Home, Keeper]] = []
        self._keepers = 0
        self._lock = threading.Lock()
        weakref.finalize(self, _warn_kept, self._kept)

    def lease(self, place: Place) -> Home:
        """Return the open home at ``place``, with one lease taken for the caller."""
        with self._lock:
            home = self._by_place.get(place)
            if home is None or not home.lease():
                home = self._by_place[place] = self._make(place)
                if self._keepers and home.lease():
                    self._kept.append((home, Keeper()))
            return home

    def keep(self) -> None:
        """Begin to keep homes open between iterations; calls nest."""
        with self._lock:
            self._keepers += 1

    def leave(self) -> bool:
        """Undo one ``keep``; tell whether it was the last."""
        with self._lock:
            self._keepers = max(0, self._keepers - 1)
            return not self._keepers

    def release(self) -> None:
        """Let go of the homes that are kept, and wait until they are closed."""
        for home, keeper in self._dismissed():
            wait_released(home, keeper)

    async def release_async(self) -> None:
        """Let go of the homes that are kept, and wait without blocking the loop."""
        for home, keeper in self._dismissed():
            await wait_released_async(home, keeper)

    def _dismissed(self) -> list[tuple[Home, Keeper]]:
        with self._lock:
            kept = self._kept[:]
            self._kept.clear()
        for home, keeper in kept:
            home.dismiss(keeper)
        return kept

    def _make(self, place: Place) -> Home:
        for other, home in list(self._by_place.items()):
            if home.closed.is_set():
                del self._by_place[other]  # of a loop that is gone, say
        lifespan = Lifespan(self._dataset, self.lifespan)
        if place == "inline":
            return InlineHome(lifespan)
        if place == "pool":
            return PoolHome(lifespan)
        if place == "thread":
            return ThreadHome(lifespan)
        return LoopHome(lifespan, None if place == "loop" else place)


def _warn_kept(kept: list[tuple[Home, Keeper]]) -> None:
    """Close what a loader that was entered and never left still holds."""
    if kept:
        warnings.warn(
            "a DataLoader was entered and never closed", ResourceWarning, stacklevel=1
        )
    for home, keeper in kept:
        home.dismiss(keeper)
