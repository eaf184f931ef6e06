"""What a worker process does: take a request, make its batch, pass it on, until told.

Plain code runs in the main thread, request by request. Where a part is ``async``, the
pipeline of the loader itself is hosted in here, with a loop of its own, and several
batches are in hand at once. The process is one of ``multiprocessing``, which runs its
hooks at the beginning and at the end; the supervisor ends one that does not end.
"""

import contextlib
import ctypes
import faulthandler
import os
import signal

import torch

from aioloader._transport.channel import Channel
from aioloader._workers.info import WorkerInfo, be_worker_process
from aioloader._workers.process.endpoint import Endpoint, Ends, send_fatal
from aioloader._workers.process.messages import RESULT_HEAD, Kind
from aioloader._workers.process.serve_async import serve_hosted
from aioloader._workers.process.serve_sync import serve_plainly
from aioloader._workers.rng import seed_worker
from aioloader._workers.rng_streams import initialise
from aioloader._workers.worker_spec import WorkerSpec

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
    os.setpgid(0, 0)  # what it starts ends with it
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
    frame = RESULT_HEAD.pack(Kind.UP, worker, -1)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        return Channel.adopt(os.dup(ends.results)).send(frame)
    return False


def run(worker: int, ends: Ends, spec: WorkerSpec) -> None:
    """Serve requests until the loader is gone.

    An error before the first batch ends the epoch: the loader raises it.

    Args:
        worker: Number of the worker.
        ends: Its descriptors.
        spec: What it is to do.
    """
    seed = seed_worker(spec.base_seed, worker)
    info = WorkerInfo(worker, spec.num_workers, seed, spec.dataset)
    be_worker_process(info, tell_torch=True)
    endpoint = None
    try:
        endpoint = Endpoint(worker, ends, spec)
        _serve(worker, ends, spec, endpoint)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the loader is gone
    except Exception as error:
        send_fatal(worker, ends, error)


def _keep_freed_memory() -> None:
    """Have the C library keep what a batch's samples leave, for those of the next.

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


def _serve(worker: int, ends: Ends, spec: WorkerSpec, endpoint: Endpoint) -> None:
    try:
        is_in_charge = initialise(spec, worker)
    except Exception as error:  # raised by the loader
        endpoint.give_up(error)
    if is_in_charge or spec.rng == "worker":
        endpoint.maker.leave_generators()
    requests = Channel.adopt(ends.own if spec.is_addressed() else ends.requests)
    serve = serve_plainly if endpoint.maker.is_plain() else serve_hosted
    serve(endpoint, requests)
