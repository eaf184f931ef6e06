"""What a pipeline uses and does not make: a pool of workers, a stage after it."""

from typing import Any, Literal, Protocol, TypeAlias

from aioloader._pipeline.batch_task import BatchResult, BatchTask
from aioloader._pipeline.pumping import Pump

# A ``Pipeline``, which imports this module.
Pipeline: TypeAlias = Any


class Pool(Protocol):
    """Workers that make batches, or the rest of those whose samples were read here."""

    @property
    def pump(self) -> Pump | None:
        """What the consumer reads while it waits, or None."""

    @property
    def reads(self) -> bool:
        """Whether workers read the samples too."""

    @property
    def place(self) -> Literal["thread", "pool"]:
        """Which host the pipeline has then."""

    def open(self, pipeline: Pipeline) -> None:
        """Start for ``pipeline``, or fail it; may take long. Idempotent."""

    def wait_up(self) -> None:
        """Wait until workers run: their start is not the user's time."""

    def submit(self, pipeline: Pipeline, task: BatchTask) -> None:
        """Take a task; calls ``pipeline.deliver`` with its result."""

    def forget(self, pipeline: Pipeline) -> None:
        """Drop what ``pipeline`` still waits for; it has ended. Idempotent."""

    def explain(self, task: BatchTask) -> str:
        """Describe which worker has ``task``, and where it is; may take a second."""

    def restart(self, task: BatchTask) -> bool:
        """Replace the worker that has ``task``; tell whether that was done."""

    def join(self) -> bool:
        """Wait, bounded, until what ``forget`` released is gone; tell whether it is."""


class Stage(Protocol):
    """What stands between ``ready`` and the consumer, with a thread of its own."""

    def pop_nowait(self) -> tuple[int, BatchResult] | None:
        """Take the next item, or None if there is none yet."""

    def wait(self, timeout: float | None = None) -> bool:
        """Block until there is an item or an end; tell whether there is."""

    async def wait_async(self, timeout: float | None = None) -> bool:
        """Suspend until there is an item or an end; tell whether there is."""

    def finish(self) -> None:
        """Let every wait end: there will be no more items."""

    def stop(self) -> None:
        """Begin to end; from any thread, and from finalizers."""

    def join(self) -> bool:
        """Wait, bounded, until it is gone; tell whether it is."""
