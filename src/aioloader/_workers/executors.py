"""Make batches in the threads, processes or machines of a user's ``Executor``.

Threads get the task itself. Processes and other machines get the task pickled by value.
They get the functions and the dataset with the first tasks, and again with a later task
if a worker lacks them.
"""

import itertools
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import (
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ThreadPoolExecutor,
)
from functools import partial
from typing import Any

import torch

from aioloader._pipeline.batch_maker import BatchMaker
from aioloader._pipeline.batch_task import BatchResult, BatchTask
from aioloader._pipeline.pipeline import Pipeline, Pool
from aioloader._transport.codec import Buffers, decode
from aioloader._workers.info import worker_thread
from aioloader._workers.remote_tasks import (
    PackedTask,
    deliver,
    maker_of,
    open_request,
    pack_answer,
    pack_request,
)
from aioloader._workers.rng import seed_sample, swapped_for
from aioloader._workers.worker_spec import WorkerSpec
from aioloader.errors import LoaderClosedError, WorkerStartError

_MAX_MAKERS = 4
_MAKERS: dict[str, BatchMaker] = {}  # in an executor's worker: its latest makers


class ExecutorWorkers(Pool):
    """An executor's workers; the user owns the executor and shuts it down."""

    def __init__(self, executor: Executor, spec: WorkerSpec) -> None:
        self.reads = spec.reads
        self._executor = executor
        self._is_here = isinstance(executor, ThreadPoolExecutor)
        self._spec = spec
        self._packed_spec: PackedTask | None = None
        self._name = uuid.uuid4().hex
        self._is_over = False
        self._first = itertools.count()
        self._futures: set[Future[Any]] = set()
        # Worker numbers of threads, by thread identifier.
        self._numbers = defaultdict[int, int](itertools.count().__next__)

    def open(self, pipeline: Pipeline) -> None:
        """Pickle the ``WorkerSpec``, unless the executor's workers are threads."""
        if not self._is_here and self._packed_spec is None:
            try:
                self._packed_spec = _packed(*self._spec.pickled())
            except WorkerStartError as error:
                pipeline.fail(error)

    def submit(self, pipeline: Pipeline, task: BatchTask) -> None:
        if self._is_here:
            self._call(pipeline, task, self._make_here, pipeline, task)
        elif self._packed_spec is not None:  # otherwise the pipeline has failed
            is_early = next(self._first) < self._spec.num_workers
            self._send(pipeline, task, self._packed_spec if is_early else None)

    def forget(self, pipeline: Pipeline) -> None:  # noqa: ARG002  (the pool's protocol)
        """Cancel the batches that the executor has not started."""
        self._is_over = True
        for future in list(self._futures):
            future.cancel()

    def explain(self, task: BatchTask) -> str:  # noqa: ARG002  (the pool's protocol)
        return f"is with {type(self._executor).__name__}"

    def _make_here(self, pipeline: Pipeline, task: BatchTask) -> BatchResult:
        """Make a batch in one of the executor's threads, which acts as a worker."""
        ident, spec = threading.get_ident(), self._spec
        number = self._numbers[ident]
        dataset = pipeline.maker.dataset
        with worker_thread(number, spec.num_workers, spec.base_seed, dataset):
            # Two threads cannot enter the same context at once.
            result = pipeline.context.copy().run(pipeline.make, task)
        result.worker = number
        return result

    def _send(
        self, pipeline: Pipeline, task: BatchTask, packed_spec: PackedTask | None
    ) -> None:
        request = _packed(*pack_request(pipeline, task))
        self._call(pipeline, task, _make_remotely, self._name, packed_spec, request)

    def _call(
        self,
        pipeline: Pipeline,
        task: BatchTask,
        make: Callable[..., BatchResult | PackedTask | None],
        *args: Any,
    ) -> None:
        future = self._executor.submit(make, *args)
        self._futures.add(future)
        future.add_done_callback(partial(self._take, pipeline, task))

    def _take(self, pipeline: Pipeline, task: BatchTask, future: "Future[Any]") -> None:
        self._futures.discard(future)
        if self._is_over:
            return
        try:
            made = future.result()
            if self._is_here:
                pipeline.deliver(task, made)
            elif made is None:  # the executor's worker lacks the ``WorkerSpec``
                self._send(pipeline, task, self._packed_spec)
            else:
                deliver(pipeline, task, made, -1)
        except BrokenExecutor as error:  # all of the executor's batches fail
            self._futures.clear()  # cancelling a future now would raise (3.11)
            pipeline.fail(error)
        except CancelledError:
            text = (
                "the executor has cancelled this batch: shut it down after the loader"
            )
            pipeline.deliver(task, BatchResult(error=LoaderClosedError(text)))
        except BaseException as error:  # of the executor
            pipeline.deliver(task, BatchResult(error=error))


def _make_remotely(
    name: str, packed_spec: PackedTask | None, request: PackedTask
) -> PackedTask | None:
    """Make a batch in an executor's worker; return None if the spec is missing."""
    maker = _MAKERS.get(name)
    if maker is None:
        if packed_spec is None:
            return None
        # One thread, as in any worker: with more, OpenMP would hang after a fork.
        torch.set_num_threads(1)
        header, buffers = packed_spec
        spec: WorkerSpec = decode(header, [*map(bytearray, buffers)])
        maker = maker_of(spec, around=swapped_for, seed=seed_sample)
        while len(_MAKERS) >= _MAX_MAKERS:
            _MAKERS.pop(next(iter(_MAKERS)), None)
        _MAKERS[name] = maker
    task = open_request(maker, request)
    result = task.result or maker.make(task, maker.read if maker.reads else None)
    if isinstance(result.error, (KeyboardInterrupt, SystemExit)):
        raise result.error
    return _packed(*pack_answer(maker, task, result, -1))


def _packed(header: bytes, buffers: Buffers) -> PackedTask:
    """Return a pickle with its buffers as ``bytes``, which any executor can send."""
    return header, [bytes(buffer.raw()) for buffer in buffers]
