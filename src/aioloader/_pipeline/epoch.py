"""Where an epoch runs: inline, in a thread, on a private loop or on the caller's."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from aioloader._observe.stats import Counters
from aioloader._pipeline.batch_maker import BatchMaker
from aioloader._pipeline.host import ThreadHost
from aioloader._pipeline.hosts import Hosts, Place
from aioloader._pipeline.inline import InlineIterator
from aioloader._pipeline.pipeline import Pipeline
from aioloader._pipeline.pipeline_iterator import Patience, PipelineIterator, Window
from aioloader._pipeline.plan import Plan
from aioloader._pipeline.ready import ReadyQueue
from aioloader._pipeline.roles import Pool, Stage

MakeStage: TypeAlias = Callable[[ReadyQueue], Stage]


@dataclass(frozen=True)
class Settings:
    """The loader's arguments that decide about hosting; their meaning is the loader's.

    Attributes:
        is_async: Whether the consumer is a task (``async for``) or a thread (``for``).
        prefetch_device: Batches that a stage behind the pipeline holds; 0: there is no
            such stage.
    """

    is_async: bool
    loop: str
    concurrency: int
    prefetch_factor: int | None
    patience: Patience
    in_order: bool
    drop_last: bool
    num_workers: int = 0
    prefetch_device: int = 0


@dataclass(frozen=True, eq=False)
class Epoch:
    """One epoch before it begins.

    Attributes:
        maker: The user's functions.
        plan: What is to be delivered.
        counters: What is counted on the way.
        settings: What decides where it runs.
    """

    maker: BatchMaker
    plan: Plan
    counters: Counters
    settings: Settings

    def start(
        self,
        hosts: Hosts,
        pool: Pool | None = None,
        make_stage: MakeStage | None = None,
    ) -> InlineIterator | PipelineIterator:
        """Make the source, when the first batch is asked for.

        Args:
            hosts: Where it finds its place.
            pool: What makes the batches; owned by the run.
            make_stage: Makes what stands behind the pipeline, if anything does.

        Raises:
            RuntimeError: If a plain ``for`` would block the loop that is to serve it.
        """
        settings = self.settings
        ahead = settings.is_async or make_stage is not None
        ahead = bool(ahead or settings.patience.timeout or settings.prefetch_factor)
        if pool is None and self.maker.is_plain() and not ahead:
            return InlineIterator(
                self.maker,
                self.plan,
                self.counters,
                hosts.lease("inline") if hosts.lifespan else None,
                drop_last=settings.drop_last,
            )
        run = Pipeline(
            self.maker,
            hosts.lease(self._place(pool)),
            concurrency=settings.concurrency,
            in_order=settings.in_order,
            drop_last=settings.drop_last,
            bookmark=self.plan.bookmark,
            pool=pool,
        )
        if make_stage is not None:
            run.stage = make_stage(run.ready)
        # Without workers, keyed generators are the process's own: the user's are put
        # aside while a batch is made, so none may be made behind the user's back.
        is_lazy = pool is None and self.maker.keys is not None
        window = self._window(run, is_lazy=is_lazy)
        patience = settings.patience
        return PipelineIterator(run, self.plan, window, self.counters, patience)

    def _place(self, pool: Pool | None) -> Place:
        if pool is not None and pool.reads:
            return pool.place
        if self.maker.is_plain():
            return "thread"
        if self.settings.loop == "thread":
            return "loop"
        if not self.settings.is_async:
            raise RuntimeError(
                "loop='caller' hosts coroutines on the loop that iterates, and a plain "
                "`for` would block it: use `async for`, or loop='thread'"
            )
        return asyncio.get_running_loop()

    def _window(self, pipeline: Pipeline, *, is_lazy: bool) -> Window:
        """Return how many batches may be in flight."""
        settings, readers = self.settings, max(1, self.settings.num_workers)
        if self.maker.keys is not None and not settings.num_workers:
            return Window(1, is_lazy=is_lazy)
        # What waits on the device has left the pipeline.
        window = readers * (settings.prefetch_factor or 2) + settings.prefetch_device
        if settings.prefetch_factor is not None:
            return Window(window)
        if self.maker.is_plain():
            is_threaded = isinstance(pipeline.host, ThreadHost) and not pipeline.pool
            return Window(window, per_hop=is_threaded and settings.is_async)
        # One batch is being collated, one is handed over, and one is late.
        spare = 3 * readers + settings.prefetch_device
        return Window(spare, samples=settings.concurrency * readers)


def default_window(concurrency: int, batch_size: int) -> int:
    """Return how many batches keep ``concurrency`` samples in flight on one loop.

    One batch more than is in flight is being collated, one is handed over, and one is
    late: with less, the fetchers runs out of samples to start.
    """
    return math.ceil(concurrency / max(1, batch_size)) + 3
