"""What a run tasks with and does not make: a pool of workers, a stage behind it."""

from typing import TYPE_CHECKING, Literal, Protocol

from aioloader._pipeline.batch_task import BatchResult, BatchTask
from aioloader._pipeline.pumping import Pump

if TYPE_CHECKING:
    from aioloader._pipeline.pipeline import Pipeline


class Pool(Protocol):
    """Workers that make the rest of a batch; each takes the next when it is free."""

    @property
    def pump(self) -> Pump | None:
        """What the consumer is to read while it waits, if anything."""

    @property
    def reads(self) -> bool:
        """Whether workers read the samples too."""

    @property
    def place(self) -> Literal["thread", "pool"]:
        """Where the run lives then."""

    def open(self, run: "Pipeline") -> None:
        """Make ready for ``run``, or fail it; may take long. Again is harmless."""

    def wait_up(self) -> None:
        """Wait until the time that passes is the user's, not that of a start."""

    def submit(self, run: "Pipeline", task: BatchTask) -> None:
        """Take a task; ``run.deliver`` will be called with what came of it."""

    def forget(self, run: "Pipeline") -> None:
        """Drop what ``run`` still waits for; it has ended."""

    def explain(self, task: BatchTask) -> str:
        """Say who has ``task`` in hand, and where they are stuck; may take a second."""

    def restart(self, task: BatchTask) -> bool:
        """Replace the worker that has ``task`` in hand; tell whether that was done."""

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
