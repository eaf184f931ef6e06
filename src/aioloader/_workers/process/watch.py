"""Descriptors that become readable when a process ends.

They are pidfds or, with a kernel or a Python without those, pipes whose other end
closes with the process.
"""

import functools
import os
import threading
from typing import Any

from aioloader._order.forks import close_in_children, fork_safe


@functools.cache
def has_pidfds() -> bool:
    """Tell whether this kernel, and this Python, have pidfds."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # RHEL 8, gVisor, an old glibc
        return False
    return True


class Life:
    """The life of a child, for its parent, which makes this before the child."""

    def __init__(self, *, is_forked: bool = True) -> None:
        has_pipe = is_forked and not has_pidfds()
        self._ends: tuple[int, ...] = os.pipe() if has_pipe else ()

    def watch(self, process: Any) -> int:
        """Return the descriptor, now the caller's, in the parent."""
        if has_pidfds():
            return os.pidfd_open(process.pid)
        if not self._ends:  # ``multiprocessing`` has such a pipe to a spawned child
            return os.dup(process.sentinel)
        os.close(self._ends[1])
        return self._ends[0]

    def live(self) -> None:
        """Hold the other end in the child; its own children do not."""
        if self._ends:
            os.close(self._ends[0])
            _held.append(self)
            close_in_children(self._leave)

    def _leave(self) -> None:
        os.close(self._ends[1])
        _held.remove(self)


_held: list[Life] = []


class _Own:
    """The life of this process, for others."""

    ends: tuple[int, ...] = ()

    def close(self) -> None:
        """Close it in a forked child, which makes another."""
        for end in self.ends:
            os.close(end)
        self.ends = ()


_OWN, _LOCK = _Own(), fork_safe(threading.Lock())


def watch_this() -> int:
    """Return a new descriptor that becomes readable when this process ends."""
    if has_pidfds():
        return os.pidfd_open(os.getpid())
    with _LOCK:
        if not _OWN.ends:
            _OWN.ends = os.pipe()
            close_in_children(_OWN.close)
        return os.dup(_OWN.ends[0])
