"""What a pipeline is given: a pool of workers, a stage after it."""

import abc
from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias

from aioloader._pipeline.batch_task import BatchResult, BatchTask
from aioloader._pipeline.pumping import Pump

# A ``Pipeline``, which imports this module.
Pipeline: TypeAlias = Any


class Pool(abc.ABC):
    """Workers that make batches, or transform and collate samples read here.

    Attributes:
        reads: Whether workers read the samples too.
        place: The host that the pipeline needs.
    """

    reads: bool
    place: Literal["thread", "pool"] = "thread"

    @property
    def pump(self) -> Pump | None:
        """The pump that the consumer operates while it waits, or None."""
        return None

    def open(self, pipeline: Pipeline) -> None:  # noqa: B027  (a default)
        """Start for ``pipeline``, or fail it; may take long. Idempotent."""

    def wait_up(self) -> None:  # noqa: B027  (a default)
        """Wait until workers run: ``timeout`` excludes their start."""

    @abc.abstractmethod
    def submit(self, pipeline: Pipeline, task: BatchTask) -> None:
        """Take a task; calls ``pipeline.deliver`` with its result."""

    @abc.abstractmethod
    def forget(self, pipeline: Pipeline) -> None:
        """Drop the requests of ``pipeline``, which has ended. Idempotent."""

    @abc.abstractmethod
    def explain(self, task: BatchTask) -> str:
        """Describe the worker that has ``task``, and its stack; may take a second."""

    def restart(self, task: BatchTask) -> bool:  # noqa: ARG002  (a default)
        """Replace the worker that has ``task``; return whether it was replaced."""
        return False

    def join(self) -> bool:
        """Wait, bounded, for the workers to end; return whether they have."""
        return True


class LastingPool(Pool):
    """Workers that may outlive an iteration; each has a lease on them."""

    place = "pool"

    def descriptors(self) -> Sequence[int]:
        """Return what becomes readable when ``collect`` has something to do."""
        return ()

    def collect(self) -> None:
        """Deliver the results that have arrived."""

    @abc.abstractmethod
    def is_open(self) -> bool:
        """Tell whether they take tasks."""

    @abc.abstractmethod
    def end(self) -> None:
        """End them in the background; from any thread, and finalizers."""

    def close(self) -> None:
        """Close what this process holds."""
        self.end()


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
