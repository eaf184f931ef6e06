"""What a worker process does: take a request, make its batch, send it, until the end.

Plain code runs in the main thread, request by request (here). Where a part is
``async``, the loader's own pipeline runs inside the worker, with several batches in
flight (``serve_async``). The process is one of ``multiprocessing``, which runs its
hooks at the beginning and at the end; the supervisor ends one that does not end.
"""

import contextlib
import ctypes
import faulthandler
import os
import signal
import time
from collections.abc import Callable

import torch

from aioloader._observe.records import processor_time
from aioloader._pipeline.batch_task import BatchResult, BatchTask
from aioloader._pipeline.stream import SyncStream
from aioloader._transport.channel import Channel
from aioloader._workers.info import WorkerInfo, be_worker_process
from aioloader._workers.process.endpoint import (
    COLLATE,
    TRANSFORM,
    Endpoint,
    Ends,
    send_fatal,
)
from aioloader._workers.process.messages import READY, UP, Request, result_head
from aioloader._workers.process.serve_async import serve_async
from aioloader._workers.rng import seed_worker
from aioloader._workers.rng_streams import initialise
from aioloader._workers.worker_spec import WorkerSpec
from aioloader.protocols import Kind

STACK_SIGNAL = int(getattr(signal, "SIGRTMIN", 0)) + 7
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _MAPPED_BYTES = 1 << 26, 1 << 25
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def settle(worker: int, ends: Ends, supervisor: int | None) -> None:
    """Make this process a worker: signals, process group, name, threads.

    Args:
        worker: Number of the worker.
        ends: Its descriptors.
        supervisor: The parent whose death ends this process; None: there is none.
    """
    os.setpgid(0, 0)  # processes that it starts end with it
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(AttributeError, OSError):
        name = f"aioloader-{worker}".encode()
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name, 0, 0, 0)
    if supervisor is not None:
        die_with(supervisor)
    os.set_blocking(ends.stacks, False)
    faulthandler.enable(ends.stacks)
    faulthandler.register(STACK_SIGNAL, ends.stacks)
    _keep_freed_memory()
    torch.set_num_threads(1)


def tell_up(worker: int, ends: Ends) -> bool:
    """Tell the loader that the process runs, before any of the user's code does.

    Returns:
        Whether the loader is still there.
    """
    frame = result_head(UP, worker)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        return Channel.adopt(os.dup(ends.results)).send(frame)
    return False


def run(worker: int, ends: Ends, spec: WorkerSpec) -> None:
    """Serve requests until the loader is gone.

    An error before the first batch ends the epoch: the loader raises it.

    Args:
        worker: Number of the worker.
        ends: Its descriptors.
        spec: What it does.
    """
    seed = seed_worker(spec.base_seed, worker)
    info = WorkerInfo(worker, spec.num_workers, seed, spec.dataset)
    be_worker_process(info, tell_torch=True)
    try:
        endpoint = Endpoint(worker, ends, spec)
        try:
            seeds_itself = initialise(spec, worker)
        except Exception as error:  # raised by the loader
            endpoint.give_up(error)
        if seeds_itself or spec.rng == "worker":
            endpoint.maker.leave_generators()
        requests = Channel.adopt(ends.own if spec.is_addressed() else ends.requests)
        serve = serve_sync if endpoint.maker.is_plain() else serve_async
        serve(endpoint, requests)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the loader is gone
    except Exception as error:
        send_fatal(worker, ends, error)


def serve_sync(endpoint: Endpoint, requests: Channel) -> None:
    """Serve with plain code, one request after the other, until the loader is gone.

    Raises:
        EOFError: Then.
    """
    streams: dict[int, SyncStream] = {}
    with contextlib.ExitStack() as stack:
        stack.callback(_enter_lifespan(endpoint))
        endpoint.send(READY, -1, None)
        stack.callback(_close_all, streams)
        reads_stream = endpoint.maker.reads and endpoint.maker.kind is Kind.ITERABLE
        while True:
            request = endpoint.receive(requests)
            if request.ticket < 0:
                if request.iteration in streams:
                    streams.pop(request.iteration).close()
                continue
            task = endpoint.take(request, 0)
            stream = _stream_of(endpoint, request, streams) if reads_stream else None
            result = _make(endpoint, request, task, stream)
            endpoint.answer(task, request.ticket, 0, result)


def _make(
    endpoint: Endpoint, request: Request, task: BatchTask, stream: SyncStream | None
) -> BatchResult:
    maker, cpu = endpoint.maker, processor_time(task.number)
    try:
        endpoint.restore(request)
        with maker.around(task):
            if stream is not None:
                stream.pull(task)
                if task.result is not None:
                    return maker.leave(task, task.result)
            elif maker.reads:
                maker.read(task, time.sleep)
            endpoint.enter(TRANSFORM)
            maker.apply(task)
            endpoint.enter(COLLATE)
            result = maker.collate(task)
            task.cpu = cpu and time.thread_time() - cpu
            return maker.leave(task, result)
    except (KeyboardInterrupt, SystemExit):  # they end a worker, as they do torch's
        raise
    except BaseException as error:  # handed to the consumer
        return BatchResult(error=error)


def _stream_of(
    endpoint: Endpoint, request: Request, streams: dict[int, SyncStream]
) -> SyncStream:
    """Return the stream of the iteration of a request, opened by its first request."""
    stream = streams.get(request.iteration)
    if stream is None:
        state, keys = request.resume or (None, None)
        stream = streams[request.iteration] = SyncStream(
            endpoint.maker, drop_last=endpoint.spec.drop_last, resume=state, keys=keys
        )
    return stream


def _enter_lifespan(endpoint: Endpoint) -> Callable[[], None]:
    """Enter the lifespan of the dataset; return the function that leaves it."""
    lifespan = endpoint.lifespan()
    try:
        lifespan.enter()
    except Exception as error:  # raised by the loader
        endpoint.give_up(error)

    def leave() -> None:
        with endpoint.printing():
            lifespan.leave()

    return leave


def _close_all(streams: dict[int, SyncStream]) -> None:
    for stream in streams.values():
        stream.close()


def _keep_freed_memory() -> None:
    """Have the C library keep the memory of a batch's samples for the next ones.

    By default it hands large blocks back each time, and every batch pays page faults.
    """
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def die_with(parent: int | None) -> None:
    """Have the kernel kill this process when its parent ends; None: no more.

    It is the parent's *thread* that counts, so this is for single-threaded parents.
    """
    number = signal.SIGKILL if parent is not None else 0
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(0)
