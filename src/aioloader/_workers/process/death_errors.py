"""Words for the death of a worker: who, of what, over which batch."""

import signal

from aioloader._pipeline.batch_task import BatchTask, shorten
from aioloader._transport.in_flight_table import InHand
from aioloader._workers.process.messages import STAGES
from aioloader._workers.process.supervisor import UNKNOWN
from aioloader.errors import WorkerDiedError


def cause_of(exitcode: int) -> str:
    """Return an exit status in words."""
    if exitcode == UNKNOWN:
        return "for an unknown reason: the process that watched it is gone too"
    if exitcode >= 0:
        return f"with exit status {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    if -exitcode == signal.SIGKILL:
        return f"by {name}, often the kernel's out-of-memory killer"
    return f"by {name}"


def died_with(
    task: BatchTask,
    held: InHand,
    worker: int,
    pid: int | None,
    exitcode: int,
    stack: str,
) -> WorkerDiedError:
    """Return the error for a batch that is not tried again."""
    message = (
        f"DataLoader worker (pid(s) {pid}) exited unexpectedly, {cause_of(exitcode)}, "
        f"in stage {STAGES[held.stage]!r} of batch {task.number}, sample indices "
        f"{shorten(task.indices)}; it is not the first worker that this batch has cost"
    )
    return WorkerDiedError(
        _with_stack(message, stack),
        worker=worker,
        pid=pid,
        exitcode=exitcode,
        batch=task.number,
    )


def died_with_stream(
    worker: int, pid: int | None, exitcode: int, stack: str
) -> WorkerDiedError:
    """Return the error for the rest of a stream that a worker has read for itself."""
    message = (
        f"DataLoader worker (pid(s) {pid}) exited unexpectedly, {cause_of(exitcode)}; "
        "where it was in its iterable dataset is lost with it, and so is what it had "
        "still to read: iterate again, or use a map-style dataset, which is mended"
    )
    return WorkerDiedError(
        _with_stack(message, stack), worker=worker, pid=pid, exitcode=exitcode
    )


def died_too_early(
    worker: int, pid: int | None, exitcode: int, stack: str, starts: int
) -> WorkerDiedError:
    """Return the error for workers that die without having made a batch."""
    message = (
        f"DataLoader worker (pid(s) {pid}) exited unexpectedly, {cause_of(exitcode)}; "
        f"{starts} processes in a row have died so without making a batch; see what "
        "they printed"
    )
    return WorkerDiedError(
        _with_stack(message, stack), worker=worker, pid=pid, exitcode=exitcode
    )


def _with_stack(message: str, stack: str) -> str:
    return f"{message}\nIts Python stack:\n{stack}" if stack else message
