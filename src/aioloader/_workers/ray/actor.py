"""A Ray actor: one worker, which runs a pipeline as the loader does.

A call of ``make`` blocks its thread until the batch is made, so Ray queues further
calls and can cancel them. ``where`` and ``leave`` run in another thread. Ray restarts
an actor that has died, without its state. This module does not import Ray; Ray imports
the module on any machine of the cluster.
"""

import asyncio
import os
import platform
import sys
import threading
import warnings
from concurrent.futures import Future
from typing import NamedTuple

import torch

from aioloader._base.cancellation import in_thread
from aioloader._base.cpu_threads import stack_of
from aioloader._pipeline.batch_task import BatchResult, BatchTask
from aioloader._pipeline.pipeline import Pipeline
from aioloader._pipeline.runner import GRACE, Runners
from aioloader._transport.codec import decode
from aioloader._workers.info import SEEDS
from aioloader._workers.remote_tasks import (
    PackedTask,
    RemoteError,
    maker_of,
    open_request,
    pack_answer,
)
from aioloader._workers.worker_spec import WorkerSpec

# From this size, buffers of the spec are read-only and shared by a node's actors.
_SHARED_BYTES = 1 << 16


class ActorStarted(NamedTuple):
    """An actor's report that its process is ready or cannot start."""

    pid: int
    host: str  # name of its machine
    error: RemoteError | None = None  # why the process cannot start


class RayActor:
    """One worker, whose methods the loader calls through Ray."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._pipeline: Pipeline | None = None
        self._runners = Runners(())
        self._made: dict[int, Future[BatchResult]] = {}  # by the task's identity

    def begin(
        self, packed: PackedTask, path: list[str], dtype: torch.dtype
    ) -> ActorStarted:
        """Start the worker from a pickled ``WorkerSpec``, once; report the outcome."""
        me = ActorStarted(os.getpid(), platform.node())
        if self._pipeline is None:
            try:
                sys.path += [folder for folder in path if folder not in sys.path]
                torch.set_default_dtype(dtype)
                torch.set_num_threads(1)
                self._pipeline = self._start(_opened(packed))
            except Exception as error:  # of user code; the loader raises it
                return me._replace(error=RemoteError.of(error, self._number))
        return me

    def make(self, request: PackedTask) -> PackedTask | None:
        """Make a batch; return None if this process has not started the worker."""
        if self._pipeline is None:
            return None
        maker = self._pipeline.maker
        task = open_request(maker, request)
        made = self._made[id(task)] = Future()
        if task.result is not None:
            self._deliver(task, task.result)
        else:
            self._pipeline.submit([task])
        return pack_answer(maker, task, made.result(), self._number)

    def where(self) -> str:
        """Return the Python stacks of this actor's threads that run user code."""
        return "".join(
            f"{thread.name}:\n{stack_of(thread.ident)}"
            for thread in threading.enumerate()
            if thread.name in {"aioloader-cpu", "aioloader-loop"}
        )

    def leave(self) -> None:
        if self._pipeline is not None:
            self._pipeline.dismiss()
            self._pipeline.ended.wait(GRACE)
            self._runners.leave()
            self._runners.release()

    def _start(self, spec: WorkerSpec) -> Pipeline:
        spec.begin(self._number)
        maker = maker_of(spec, **SEEDS)
        self._runners = Runners(
            *((spec.dataset, spec.lifespan) if spec.reads else ((),))
        )
        self._runners.keep()
        runner = self._runners.lease("thread" if spec.is_plain else "loop")
        start = spec.initialise, self._number, maker
        asyncio.run(in_thread(*start, executor=runner.cpu))
        runner.open()
        if (failure := runner.failure()) is not None:
            raise failure
        return Pipeline(maker, runner, sink=self._deliver)

    def _deliver(self, task: BatchTask, result: BatchResult) -> None:
        """Pass a result to the waiting ``make`` call; on an exit, end this process."""
        if isinstance(result.error, (KeyboardInterrupt, SystemExit)):
            os._exit(1)  # such an error ends the worker, as in a worker process
        self._made.pop(id(task)).set_result(result)


def _opened(packed: PackedTask) -> WorkerSpec:
    """Unpickle the ``WorkerSpec`` of an actor.

    Big buffers are not copied, so arrays over them are read-only. Torch has no
    read-only tensors: all workers of the node would see a write to a tensor.
    """
    header, buffers = packed
    mine = [raw if len(raw) >= _SHARED_BYTES else bytearray(raw) for raw in buffers]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given (NumPy array|buffer) is not writ")
        spec: WorkerSpec = decode(header, mine)
    return spec
