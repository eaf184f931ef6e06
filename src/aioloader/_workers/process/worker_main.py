"""The main loop of a worker process: take a request, make its batch, send it.

Plain code runs in the main thread, request by request (here). If a part is ``async``,
the loader's own pipeline runs inside the worker, with several batches in flight
(``serve_async``). The process is one of ``multiprocessing``, which runs its hooks at
start and exit; the supervisor ends one that hangs.
"""

import contextlib
import ctypes
import faulthandler
import os
import signal
from collections.abc import Callable
from functools import partial

import torch

from aioloader._order.retry import last_error
from aioloader._pipeline.stream import SyncStream
from aioloader._transport.channel import Channel
from aioloader._workers.info import WorkerInfo, be_worker_process
from aioloader._workers.process.endpoint import Endpoint, Ends, send_fatal
from aioloader._workers.process.messages import READY, UP, Request, result_head
from aioloader._workers.process.serve_async import serve_async
from aioloader._workers.rng import seed_worker
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
        supervisor: The parent whose death ends this process, or None.
    """
    os.setpgid(0, 0)  # its children end with it
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
    signal.signal(STACK_SIGNAL, partial(_write_last_error, ends.stacks))
    faulthandler.register(STACK_SIGNAL, ends.stacks, chain=True)
    _keep_freed_memory()
    torch.set_num_threads(1)


def _write_last_error(stacks: int, *_: object) -> None:
    """Add to the stack, for a timeout, what reads are being retried after."""
    with contextlib.suppress(OSError):
        os.write(stacks, last_error().encode())


def tell_up(worker: int, ends: Ends) -> bool:
    """Report to the loader that the process runs, before any user code does.

    Returns:
        Whether the loader is still there.
    """
    frame = result_head(UP, worker)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        return Channel.adopt(os.dup(ends.results)).send(frame)
    return False


def run(worker: int, ends: Ends, spec: WorkerSpec) -> None:
    """Serve requests until the loader is gone.

    The loader raises an error before the first batch, which ends the epoch.

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
            seeds_itself = spec.initialise(worker)
        except BaseException as error:  # raised by the loader
            endpoint.give_up(error)
        if seeds_itself or spec.rng == "worker":
            endpoint.maker.leave_generators()
        requests = Channel.adopt(ends.own if spec.is_addressed else ends.requests)
        serve = serve_sync if endpoint.maker.is_plain else serve_async
        serve(endpoint, requests)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the loader is gone
    except Exception as error:
        send_fatal(worker, ends, error)


def serve_sync(endpoint: Endpoint, requests: Channel) -> None:
    """Serve with plain code, one request after another, until the loader is gone.

    Raises:
        EOFError: When the loader is gone.
    """
    maker, enter, streams = endpoint.maker, endpoint.enter, dict[int, SyncStream]()
    read = partial(maker.read, pause=requests.pause) if maker.reads else None
    reads_stream = maker.reads and maker.kind is Kind.ITERABLE
    with contextlib.ExitStack() as stack:
        stack.callback(_enter_lifespan(endpoint))
        endpoint.send(READY, -1, None)
        stack.callback(_close_all, streams)
        while True:
            request = endpoint.receive(requests)
            if request.ticket < 0:
                if request.iteration in streams:
                    streams.pop(request.iteration).close()
                continue
            task = endpoint.take(request, 0)
            stream = _stream_of(endpoint, request, streams) if reads_stream else None
            pull = stream.pull if stream is not None else read
            result = task.result or maker.make(task, pull, enter)
            if isinstance(result.error, (KeyboardInterrupt, SystemExit)):
                raise result.error  # it ends a worker, as in torch
            endpoint.answer(task, request.ticket, 0, maker.leave(task, result))


def _stream_of(
    endpoint: Endpoint, request: Request, streams: dict[int, SyncStream]
) -> SyncStream:
    """Return the stream of a request's iteration, opened by the first request."""
    stream = streams.get(request.iteration)
    if stream is None:
        state, keys = request.resume or (None, None)
        stream = streams[request.iteration] = SyncStream(
            endpoint.maker, resume=state, keys=keys
        )
    return stream


def _enter_lifespan(endpoint: Endpoint) -> Callable[[], None]:
    """Enter the lifespan of the dataset; return the function that leaves it."""
    lifespan = endpoint.lifespan()
    try:
        lifespan.enter()
    except BaseException as error:  # raised by the loader
        endpoint.give_up(error)

    def leave() -> None:
        with endpoint.leaving():
            lifespan.leave()

    return leave


def _close_all(streams: dict[int, SyncStream]) -> None:
    for stream in streams.values():
        stream.close()


def _keep_freed_memory() -> None:
    """Make the C library keep the memory of freed samples for the next batch.

    By default it returns large blocks to the kernel, and every batch has page faults.
    """
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def die_with(parent: int | None) -> None:
    """Make the kernel kill this process when its parent ends; None undoes this.

    The kernel watches the parent's *thread*, so this is for single-threaded parents.
    """
    number = signal.SIGKILL if parent is not None else 0
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(0)
