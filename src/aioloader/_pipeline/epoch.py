"""Where an epoch runs: inline, in a thread, on a private loop or on the caller's."""

import asyncio
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from aioloader._observe.stats import Counters
from aioloader._pipeline.homes import Homes, Place
from aioloader._pipeline.inline import InlineSource
from aioloader._pipeline.recipe import Recipe
from aioloader._pipeline.run import Run
from aioloader._pipeline.source import HostedSource


@dataclass(frozen=True)
class Settings:
    """The loader's arguments that decide about hosting; their meaning is the loader's.

    Attributes:
        is_async: Whether the consumer is a task (``async for``) or a thread (``for``).
    """

    is_async: bool
    loop: str
    concurrency: int
    prefetch_factor: int | None
    timeout: float | None
    in_order: bool
    drop_last: bool


@dataclass(frozen=True, eq=False)
class Epoch:
    """One epoch before it begins.

    Attributes:
        recipe: The user's functions.
        requests: Index batches.
        counters: What is counted on the way.
        settings: What decides where it runs.
    """

    recipe: Recipe
    requests: Iterator[Any]
    counters: Counters
    settings: Settings

    def start(self, homes: Homes) -> InlineSource | HostedSource:
        """Make the source, when the first batch is asked for.

        Raises:
            RuntimeError: If a plain ``for`` would block the loop that is to serve it.
        """
        settings = self.settings
        ahead = settings.is_async or settings.timeout or settings.prefetch_factor
        if self.recipe.is_plain() and not ahead:
            opens = hasattr(self.recipe.dataset, "__enter__")
            return InlineSource(
                self.recipe,
                self.requests,
                self.counters,
                homes.lease("inline") if opens else None,
                drop_last=settings.drop_last,
            )
        run = Run(
            self.recipe,
            homes.lease(self._place()),
            concurrency=settings.concurrency,
            in_order=settings.in_order,
            drop_last=settings.drop_last,
        )
        timeout = settings.timeout
        return HostedSource(run, self.requests, self._window, self.counters, timeout)

    def _place(self) -> Place:
        if self.recipe.is_plain():
            return "thread"
        if self.settings.loop == "thread":
            return "loop"
        if not self.settings.is_async:
            raise RuntimeError(
                "loop='caller' hosts coroutines on the loop that iterates, and a plain "
                "`for` would block it: use `async for`, or loop='thread'"
            )
        return asyncio.get_running_loop()

    def _window(self, indices: Any) -> int:
        """Return how many batches may be in flight, told the first one's indices."""
        if self.settings.prefetch_factor is not None:
            return self.settings.prefetch_factor
        if self.recipe.is_plain():
            return 2
        # One batch more than is in flight is being collated, one is handed over, and
        # one is late: with less, the crew runs out of samples to start.
        return math.ceil(self.settings.concurrency / max(1, len(indices))) + 3
