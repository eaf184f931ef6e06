"""Worker threads, for code that releases the GIL, or for Python without a GIL.

Idle threads take tasks from one queue and write batches to recycled memory. All threads
share the dataset and the process's global random generators; each also has private
generators in ``get_worker_info().rng``.
"""

import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

from aioloader._base.cpu_threads import CpuThread, stack_of
from aioloader._pipeline.batch_task import BatchTask
from aioloader._pipeline.pipeline import Pipeline, Pool
from aioloader._workers.info import call_init, worker_thread

# How long a close waits for a batch in progress, in seconds.
_GRACE = 10.0


@dataclass(eq=False, repr=False)
class ThreadWorkers(Pool):
    """The worker threads of one iteration."""

    number: int  # how many threads
    _: KW_ONLY
    reads: bool
    init: Callable[[int], Any] | None  # the user's ``worker_init_fn``
    base_seed: int

    def __post_init__(self) -> None:
        self._tasks: queue.SimpleQueue[BatchTask | None] = queue.SimpleQueue()
        self._over: list[bool] = []  # not empty once the pool has ended
        self._threads = [CpuThread(f"aioloader-worker-{k}") for k in range(self.number)]
        self._in_flight: dict[int, tuple[BatchTask, float]] = {}  # by thread
        # At interpreter exit, too, this runs before the threads are joined.
        self._end = weakref.finalize(self, _end, self._over, self._tasks, self._threads)

    def open(self, pipeline: Pipeline) -> None:
        for worker, thread in enumerate(self._threads):
            if thread.ident() is None:  # else another consumer has started it
                thread.post(partial(self._serve, pipeline, worker))

    def submit(self, pipeline: Pipeline, task: BatchTask) -> None:  # noqa: ARG002  (the pool's protocol)
        self._tasks.put(task)

    def forget(self, pipeline: Pipeline) -> None:  # noqa: ARG002  (the pool's protocol)
        """End the threads after their current batches. Finalizers may call this."""
        self._end()

    def join(self) -> bool:
        """Wait up to 10 s for the threads to end; return whether all have ended."""
        until = time.monotonic() + _GRACE
        for thread in self._threads:
            if thread.ident() is not None:  # else a fork came before its start
                thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def explain(self, task: BatchTask) -> str:
        for ident, (held, since) in list(self._in_flight.items()):
            if held is task:
                seconds, stack = time.monotonic() - since, stack_of(ident)
                return (
                    f"has been with a worker thread for {seconds:.2f} s, at:\n{stack}"
                )
        return "waits for a worker thread that is free"

    def _serve(self, pipeline: Pipeline, worker: int) -> None:
        ident, dataset = threading.get_ident(), pipeline.maker.dataset
        if self._over or pipeline.runner.failure() is not None:
            return
        try:
            with worker_thread(worker, self.number, self.base_seed, dataset):
                call_init(self.init, worker)
                while (task := self._tasks.get()) is not None and not self._over:
                    self._in_flight[ident] = task, time.monotonic()
                    result = pipeline.make(task)
                    result.worker = worker
                    del self._in_flight[ident]
                    pipeline.deliver(task, result)
                    del task, result  # hold no batch while waiting for the next
        except BaseException as error:  # of ``worker_init_fn``: the consumer raises it
            pipeline.fail(error)


def _end(
    over: list[bool],
    tasks: "queue.SimpleQueue[BatchTask | None]",
    threads: list[CpuThread],
) -> None:
    """End ``threads`` after their current batches; waiting tasks are dropped."""
    over.append(True)
    for thread in threads:
        tasks.put(None)
        thread.stop(thread.ident)
