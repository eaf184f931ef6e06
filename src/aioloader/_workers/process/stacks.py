"""The Python stack of a stuck or stopped worker."""

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

from aioloader._workers.process.worker_main import STACK_SIGNAL

# Seconds to wait for a worker's stack, and then for more of it.
_FIRST, _MORE = 1.0, 0.05


def stack_of(pid: int, read: Callable[[float], str]) -> str:
    """Return the stack of worker ``pid`` as text; takes about a second at most.

    A stopped worker is continued for this moment and stopped again.

    Args:
        pid: A worker, alive or not yet reaped.
        read: Returns what workers wrote within the given seconds.
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
        return "it has ended"
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
    """Return the state of a process from ``/proc``: R, S, D, T, Z."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        return text.rpartition(")")[2].split()[0]
    return ""
