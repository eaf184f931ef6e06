"""Protocols of what a pipeline is given: a pool of workers, a stage after it."""

from typing import Any, Literal, Protocol, TypeAlias

from aioloader._pipeline.batch_task import BatchResult, BatchTask
from aioloader._pipeline.pumping import Pump

# A ``Pipeline``, which imports this module.
Pipeline: TypeAlias = Any


class Pool(Protocol):
    """Workers that make batches, or transform and collate samples read here."""

    @property
    def pump(self) -> Pump | None:
        """The pump that the consumer operates while it waits, or None."""

    @property
    def reads(self) -> bool:
        """Whether workers read the samples too."""

    @property
    def place(self) -> Literal["thread", "pool"]:
        """The host that the pipeline needs."""

    def open(self, pipeline: Pipeline) -> None:
        """Start for ``pipeline``, or fail it; may take long. Idempotent."""

    def wait_up(self) -> None:
        """Wait until workers run: ``timeout`` excludes their start."""

    def submit(self, pipeline: Pipeline, task: BatchTask) -> None:
        """Take a task; calls ``pipeline.deliver`` with its result."""

    def forget(self, pipeline: Pipeline) -> None:
        """Drop the requests of ``pipeline``, which has ended. Idempotent."""

    def explain(self, task: BatchTask) -> str:
        """Describe the worker that has ``task``, and its stack; may take a second."""

    def restart(self, task: BatchTask) -> bool:
        """Replace the worker that has ``task``; return whether it was replaced."""

    def join(self) -> bool:
        """Wait, bounded, for what ``forget`` released to end; return whether it has."""


class Stage(Protocol):
    """A step between ``ready`` and the consumer, with its own thread."""

    def pop_nowait(self) -> tuple[int, BatchResult] | None:
        """Take the next item, or None if there is none yet."""

    def wait(self, timeout: float | None = None) -> bool:
        """Block until there is an item or the end; return False on timeout."""

    async def wait_async(self, timeout: float | None = None) -> bool:
        """Suspend until there is an item or the end; return False on timeout."""

    def finish(self) -> None:
        """End every wait: there will be no more items."""

    def stop(self) -> None:
        """Start ending, from any thread or finalizer."""

    def join(self) -> bool:
        """Wait, bounded, until it has ended; return whether it has."""
