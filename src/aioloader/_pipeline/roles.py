"""What a pipeline is given: a pool of workers, and a stage after it."""

import abc
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeAlias

from aioloader._order.forks import fork_safe
from aioloader._pipeline.batch_task import BatchResult, BatchTask
from aioloader._pipeline.ready import Pump

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


class Lease(Pool):
    """Workers that may outlive the iteration, as it sees them.

    Args:
        start: Starts workers, or returns those that are kept; called with the first
            request.
        reads: Whether workers read the samples too.
        keep: Whether the workers outlive the iteration and serve the next ones.
        pumps: Whether the consumer itself collects results while it waits.
    """

    place = "pool"

    def __init__(
        self,
        start: Callable[[], LastingPool],
        *,
        reads: bool,
        keep: bool,
        pumps: bool = False,
    ) -> None:
        self.reads = reads
        self._start = start
        self._keep = keep
        self._pumps = pumps
        self._pool: LastingPool | None = None
        self._is_begun = False
        self._is_over = False
        self._lock = fork_safe(threading.RLock())

    @property
    def pump(self) -> "Lease | None":
        """This lease, if the consumer collects results while it waits."""
        return self if self._pumps else None

    def open(self, pipeline: Pipeline) -> None:
        """Start the workers or find the kept ones, once; may take long."""
        if self._is_begun:
            return
        self._is_begun = True
        try:
            pool = self._start()
        except Exception as error:  # mostly: something cannot be pickled
            pipeline.fail(error)
            return
        with self._lock:
            self._pool = pool
            if not self._keep:
                # If anybody waits for their end, they are joined before this runs.
                weakref.finalize(self, pool.close)
                if self._is_over:
                    pool.end()

    def submit(self, pipeline: Pipeline, task: BatchTask) -> None:
        """Have the rest of ``task`` made."""
        if self._pool is not None:
            self._pool.submit(pipeline, task)

    def descriptors(self) -> Sequence[int]:
        """Return what becomes readable when ``collect`` has something to do."""
        return () if self._pool is None else self._pool.descriptors()

    def collect(self) -> None:
        """Deliver the results that have arrived."""
        if self._pool is not None:
            self._pool.collect()

    def explain(self, task: BatchTask) -> str:
        """Say which worker has ``task``, since when, and where it is stuck."""
        if self._pool is None:
            return "waits for the workers to start"
        return self._pool.explain(task)

    def restart(self, task: BatchTask) -> bool:
        """Replace the workers that have ``task``; tell whether there are any."""
        return self._pool is not None and self._pool.restart(task)

    def forget(self, pipeline: Pipeline) -> None:
        """End the lease."""
        with self._lock:
            self._is_over = True
            pool = self._pool
        if pool is not None:
            pool.forget(pipeline)
            if not self._keep:
                pool.end()

    def join(self) -> bool:
        """Wait until the workers are gone, if they are not kept."""
        return self._keep or self._pool is None or self._pool.join()


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
