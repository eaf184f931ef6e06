"""A Ray actor: one worker, with the loader's own pipeline inside.

Calls are coroutines, so that it answers while user code runs in threads of the
pipeline. Requests wait here for a place; one that has not started can be recalled. This
file needs no Ray: Ray imports it, on any machine.
"""

import asyncio
import os
import platform
import sys
import threading
import traceback
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from aioloader._pipeline.batch_task import BatchResult, BatchTask
from aioloader._pipeline.host import GRACE
from aioloader._pipeline.hosts import Hosts
from aioloader._pipeline.pipeline import Pipeline
from aioloader._transport.codec import decode
from aioloader._transport.slots import MIN_BYTES, Lender, SlotPool
from aioloader._workers.info import WorkerInfo, be_worker_process, use_sample_rng
from aioloader._workers.remote_error import RemoteError
from aioloader._workers.remote_tasks import Packed, maker_of, open_request, pack_answer
from aioloader._workers.rng import seed_worker
from aioloader._workers.rng_streams import Seeded, initialise, seed_for_sample
from aioloader._workers.worker_spec import WorkerSpec

if TYPE_CHECKING:
    from aioloader._pipeline.host import Host

# Buffers of the dataset from this size on are shared by the node and read-only.
_SHARED_BYTES = 1 << 16


class Ground(NamedTuple):
    """Settings of the loader's process that an actor takes over.

    Attributes:
        path: The module search path.
        dtype: Torch's default type.
    """

    path: list[str]
    dtype: torch.dtype


class Begun(NamedTuple):
    """An actor's report that it is ready or cannot start.

    Attributes:
        pid: Its process.
        host: Name of its machine.
        seeds_itself: Whether the user's init function has seeded the generators.
        error: The error of that function or of unpickling, if it cannot start.
    """

    pid: int
    host: str
    seeds_itself: bool = False
    error: RemoteError | None = None


class RayActor:
    """One worker, called by the loader through Ray.

    Args:
        number: Number of the worker.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._hosts = Hosts(())
        self._host: Host | None = None
        self._futures: dict[
            int, asyncio.Future[BatchResult]
        ] = {}  # by the task's identity
        self._waiting: dict[int, asyncio.Future[Any]] = {}  # by ticket
        self._slots = SlotPool()

    async def begin(self, shipped: Packed, ground: Ground) -> Begun:
        """Unpack the ``WorkerSpec`` and call the user's init function.

        Args:
            shipped: The pickle of a ``WorkerSpec``; big buffers are in Ray's memory.
            ground: The settings of the loader's process.
        """
        me = Begun(os.getpid(), platform.node())
        try:
            sys.path += [folder for folder in ground.path if folder not in sys.path]
            torch.set_default_dtype(ground.dtype)
            torch.set_num_threads(1)
            return me._replace(seeds_itself=await self._settle(shipped))
        except Exception as error:  # of user code; the loader raises it
            return me._replace(error=RemoteError.of(error, self._number))

    async def make(self, ticket: int, request: Packed) -> Packed | None:
        """Make a batch once there is a free place; return None if it was recalled."""
        place = asyncio.ensure_future(self._places.acquire())
        self._waiting[ticket] = place
        try:
            await place
        except asyncio.CancelledError:
            return None
        finally:
            del self._waiting[ticket]
        try:
            task = open_request(self._maker, copied(request, self._slots))
            result = await self._made(task)
        finally:
            self._places.release()
        return pack_answer(self._maker, task, result, self._number)

    async def return_unmade(self, ticket: int) -> None:
        """Make ``make`` return at once if the batch has not started."""
        if ticket in self._waiting:
            self._waiting[ticket].cancel()

    async def where(self) -> str:
        """Return the Python stacks of the threads that run user code."""
        ours = ("aioloader-cpu", "aioloader-loop")
        frames = sys._current_frames()  # noqa: SLF001  (the only way)
        return "".join(
            f"{thread.name}:\n{''.join(traceback.format_stack(frame)[-8:])}"
            for thread in threading.enumerate()
            if thread.name in ours and (frame := frames.get(thread.ident or 0))
        )

    async def stay(self) -> None:
        """Never return: this call fails when the actor is gone."""
        await asyncio.Event().wait()

    async def leave(self) -> None:
        """Leave the lifespan of the dataset."""
        self._run.dismiss()
        await self._run.ended.wait_async(GRACE)
        self._hosts.leave()
        await self._hosts.release_async()

    async def _settle(self, shipped: Packed) -> bool:
        """Set up the worker; return whether the user's init function has seeded."""
        spec = opened_spec(shipped)
        seed = seed_worker(spec.base_seed, self._number)
        info = WorkerInfo(self._number, spec.num_workers, seed, spec.dataset)
        be_worker_process(info, tell_torch=True)
        maker = self._maker = maker_of(
            spec, around=Seeded, seed=seed_for_sample, at=use_sample_rng
        )
        self._places = asyncio.Semaphore(places(spec))
        reads = (spec.dataset, spec.lifespan) if spec.reads else ((), None)
        self._hosts = Hosts(*reads)
        self._hosts.keep()
        self._host = self._hosts.lease("thread" if spec.is_plain else "loop")
        seeds_itself = await self._host.cpu.call(lambda: initialise(spec, info.id))
        if seeds_itself or spec.rng == "worker":
            maker.leave_generators()
        self._host.open()
        await self._host.opened.wait_async()
        if (failure := self._host.failure()) is not None:
            raise failure
        self._loop = asyncio.get_running_loop()
        self._run = Pipeline(
            maker,
            self._host,
            in_order=False,
            sink=self._deliver,
        )
        return seeds_itself

    async def _made(self, task: BatchTask) -> BatchResult:
        future: asyncio.Future[BatchResult] = self._loop.create_future()
        self._futures[id(task)] = future
        self._run.submit(task)
        return await future

    def _deliver(self, task: BatchTask, result: BatchResult) -> None:
        """Pass a result to ``make``, from any thread."""
        if isinstance(result.error, (KeyboardInterrupt, SystemExit)):
            os._exit(1)  # as in a worker process: they end the worker
        future = self._futures.pop(id(task))
        self._loop.call_soon_threadsafe(future.set_result, result)


def places(spec: WorkerSpec) -> int:
    """Return how many batches a worker makes at once."""
    return 1 if spec.is_plain else spec.window


def opened_spec(shipped: Packed) -> WorkerSpec:
    """Return the spec in a pickle.

    Big buffers are not copied, so arrays over them are read-only. Torch has no
    read-only tensors: all workers of the node would see a write to one.
    """
    header, buffers = shipped
    mine = [one if len(one) >= _SHARED_BYTES else bytearray(one) for one in buffers]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given (NumPy array|buffer) is not writ")
        spec: WorkerSpec = decode(header, mine)
    return spec


def copied(packed: Packed, lender: Lender) -> Packed:
    """Return a pickle with its buffers copied to writable memory.

    Args:
        packed: A pickle from Ray, with read-only buffers.
        lender: Lends memory for big buffers.
    """
    return packed[0], [_copied(buffer, lender) for buffer in packed[1]]


def _copied(buffer: Any, lender: Lender) -> Any:
    raw = memoryview(buffer).cast("B")
    if raw.nbytes < MIN_BYTES:
        return bytearray(raw)
    memory = lender.lease(raw.nbytes)
    memory[:] = np.frombuffer(raw, np.uint8)
    return memoryview(memory)  # a numpy view would not keep its owner alive
