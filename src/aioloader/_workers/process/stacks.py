"""The Python stack of a worker that is stuck, or even stopped."""

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

from aioloader._workers.process.worker_main import STACK_SIGNAL

# Seconds to wait for a worker to write its stack, and for more of it to come.
_FIRST, _MORE = 1.0, 0.05


def stack_of(pid: int, read: Callable[[float], str]) -> str:
    """Return the stack of worker ``pid`` in words; takes about a second at most.

    A stopped worker is continued for the moment that it takes, and stopped again.

    Args:
        pid: A worker, alive or not yet reaped.
        read: Returns what workers wrote, having waited so many seconds for it.
    """
    is_stopped = _state(pid) == "T"
    read(0)  # old stacks
    try:
        os.kill(pid, STACK_SIGNAL)
        if is_stopped:
            os.kill(pid, signal.SIGCONT)
        text = read(_FIRST)
        while text and (more := read(_MORE)):
            text += more
    except ProcessLookupError:
        return "it is gone"
    finally:
        if is_stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
    stopped = "it is stopped (SIGSTOP); " if is_stopped else ""
    return (
        f"{stopped}its Python stack:\n{text}"
        if text
        else f"{stopped}it does not answer"
    )


def _state(pid: int) -> str:
    """Return the state of a process as ``/proc`` has it: R, S, D, T, Z."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        return text.rpartition(")")[2].split()[0]
    return ""
