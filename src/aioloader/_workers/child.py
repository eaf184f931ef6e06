"""What a worker process does: take a request, make its batch, pass it on, until told.

Plain code runs in the main thread, request by request. Where a part is ``async``, the
pipeline of the loader itself is hosted in here, with a loop of its own, and several
batches are in hand at once. A worker ends by ``os._exit``: no thread of the user's code
can hold it back.
"""

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys

import torch

from aioloader._transport.channel import Channel
from aioloader._workers.desk import Desk, Ends
from aioloader._workers.hosted import serve_hosted
from aioloader._workers.info import WorkerInfo, be_worker_process
from aioloader._workers.keyed import initialise
from aioloader._workers.messages import Kind
from aioloader._workers.plain import serve_plainly
from aioloader._workers.remote import RemoteError
from aioloader._workers.seeds import seed_worker
from aioloader._workers.shipment import Shipment, Surroundings

STACK_SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR2) + 7
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _MAPPED_BYTES = 1 << 26, 1 << 25
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def run(
    worker: int,
    ends: Ends,
    shipment: Shipment,
    surroundings: Surroundings,
    *,
    parent: int | None,
) -> None:
    """Be worker number ``worker``; never return.

    Args:
        worker: Number of the worker.
        ends: Its descriptors.
        shipment: What it is to do, unpickled.
        surroundings: Of the loader's process.
        parent: The process whose death ends this one, if the kernel can see to it.
    """
    status = 1
    try:
        _settle(worker, ends, surroundings, parent)
        status = _live(worker, ends, shipment)
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _settle(
    worker: int, ends: Ends, surroundings: Surroundings, parent: int | None
) -> None:
    """Make the process a worker: signals, name, standard input, threads."""
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    name_process(f"aioloader-{worker}".encode())
    if parent is not None:
        _die_with(parent)
    os.set_blocking(ends.stacks, False)
    faulthandler.enable(ends.stacks)
    faulthandler.register(STACK_SIGNAL, ends.stacks)
    _keep_freed_memory()
    surroundings.enter_environment()
    torch.set_num_threads(1)


def name_process(name: bytes) -> None:
    """Set the name of this process, at most 15 bytes, where the system can."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name, 0, 0, 0)


def _keep_freed_memory() -> None:
    """Have the C library keep what a batch's samples leave, for those of the next.

    By default it hands large blocks back each time, and every batch pays page faults.
    """
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def _die_with(parent: int) -> None:
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def _live(worker: int, ends: Ends, shipment: Shipment) -> int:
    """Serve requests until the loader is gone; return the exit status."""
    seed = seed_worker(shipment.base_seed, worker)
    info = WorkerInfo(worker, shipment.num_workers, seed, shipment.dataset)
    be_worker_process(info, tell_torch=True)
    desk = Desk(worker, ends, shipment)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        return _serve(worker, ends, shipment, desk)
    return 0  # the loader is gone


def _serve(worker: int, ends: Ends, shipment: Shipment, desk: Desk) -> int:
    try:
        is_in_charge = initialise(shipment, worker)
    except Exception as error:  # of the user's init function: the loader raises it
        desk.send(Kind.FATAL, -1, RemoteError.of(error, worker))
        return 1
    desk.send(Kind.READY, -1, is_in_charge)
    if is_in_charge or shipment.rng == "worker":
        desk.recipe.leave_generators()
    is_own = is_in_charge or shipment.is_addressed()
    requests = Channel.adopt(ends.own if is_own else ends.requests)
    serve = serve_plainly if desk.recipe.is_plain() else serve_hosted
    serve(desk, requests)
    return 0
