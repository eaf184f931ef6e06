"""Workers that may outlive an iteration, and one iteration's handle on them."""

import abc
import threading
import weakref
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from aioloader._base.forks import fork_safe
from aioloader._pipeline.batch_task import BatchTask
from aioloader._pipeline.pipeline import Pipeline, Pool
from aioloader._pipeline.ready import ResultReader


class LastingPool(Pool, ResultReader):
    """A pool whose workers may outlive an iteration; ``PoolHandle`` refers to it."""

    @abc.abstractmethod
    def is_open(self) -> bool:
        """Tell whether the workers accept tasks."""

    @abc.abstractmethod
    def end(self) -> None:
        """End the workers in the background; safe in any thread and finalizer."""

    def close(self) -> None:
        """Release resources of this process; called when the handle is collected."""
        self.end()


@dataclass(eq=False, repr=False)
class PoolHandle(Pool):
    """One iteration's handle on workers that may outlive it.

    Once the workers start, ``submit``, ``restart`` and ``explain`` are the pool's own.
    """

    start: Callable[[], LastingPool]  # starts workers, or returns kept ones
    _: KW_ONLY
    reads: bool
    keep: bool  # whether the workers outlive the iteration and serve the next ones
    has_copies: bool = False

    def __post_init__(self) -> None:
        self._pool: LastingPool | None = None
        self._is_begun = False
        self._is_over = False
        self._lock = fork_safe(threading.RLock())

    def open(self, pipeline: Pipeline) -> None:
        """Start workers or reuse kept ones; may take long. Idempotent."""
        if self._is_begun:
            return
        self._is_begun = True
        try:
            pool = self.start()
        except Exception as error:  # usually of pickling
            pipeline.fail(error)
            return
        with self._lock:
            self._pool = pool
            self.submit = pool.submit  # type: ignore[method-assign]
            self.restart = pool.restart  # type: ignore[method-assign]
            self.explain = pool.explain  # type: ignore[method-assign]
            self.has_result_reader = pool.has_result_reader
            if self.has_result_reader and not self._is_over:
                pipeline.ready.result_reader = pool
            if not self.keep:
                # A consumer that waits for the workers' end joins them before this.
                weakref.finalize(self, pool.close)
                if self._is_over:
                    pool.end()

    def submit(self, pipeline: Pipeline, task: BatchTask) -> None:
        """Drop a task: no workers could be started, so the pipeline has failed."""

    def explain(self, task: BatchTask) -> str:  # noqa: ARG002  (a pool's)
        return "waits for the workers to start"

    def forget(self, pipeline: Pipeline) -> None:
        with self._lock:
            self._is_over = True
            pool = self._pool
        if pool is not None:
            pool.forget(pipeline)
            if not self.keep:
                pool.end()

    def join(self) -> bool:
        """Wait for the workers to end, unless ``keep``; return False on timeout."""
        return self.keep or self._pool is None or self._pool.join()
