"""Check that code leaks no threads, file descriptors, processes or tasks.

Some resources are released in the background (after a ``break``), so the check waits up
to 20 s. The fork server and ``multiprocessing``'s servers do not count as leaks.
"""

import asyncio
import contextlib
import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

from aioloader._workers.process.fork_server import fork_server_in_use

_PATIENCE, _PAUSES = 20.0, (0.002, 0.05)
# A finalizer may release objects that have finalizers.
_COLLECTIONS = 4
_PROCESSES = Path("/proc")


@dataclass(frozen=True)
class Resources:
    """A snapshot of this process's resources; all but threads need ``/proc``.

    Attributes:
        threads: Threads that are alive.
        descriptors: Open file descriptors, except to shared servers, and their targets.
        children: Identifiers of all descendant processes except shared servers.
    """

    threads: frozenset[threading.Thread]
    descriptors: frozenset[tuple[int, str]]
    children: frozenset[int]

    @classmethod
    def now(cls) -> "Resources":
        """Return a snapshot of the resources held now."""
        return cls(
            frozenset(threading.enumerate()),
            frozenset(_descriptors()),
            frozenset(_children()),
        )

    def assert_unchanged(self) -> None:
        """Fail if the process holds more than at the time of this snapshot.

        Raises:
            AssertionError: If it still does after 20 s; the message lists the leaks.
        """
        for _ in range(_COLLECTIONS):
            gc.collect()
            if not self._left_over():
                return
        until, pause = time.monotonic() + _PATIENCE, _PAUSES[0]
        while (left := self._left_over()) and time.monotonic() < until:
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])
        if left:
            raise AssertionError(f"left behind: {left}")

    def _left_over(self) -> dict[str, list[object]]:
        now = Resources.now()
        left: dict[str, list[object]] = {
            "threads": [thread.name for thread in now.threads - self.threads],
            "descriptors": [*sorted(now.descriptors - self.descriptors)],
            "children": [_started_by(pid)[0] for pid in now.children - self.children],
        }
        return {kind: leaks for kind, leaks in left.items() if leaks}


@contextlib.contextmanager
def no_leaks() -> Iterator[None]:
    """Fail if the ``with`` block leaks tasks or any of the ``Resources``.

    Raises:
        AssertionError: If anything leaks; the message lists the leaks.
    """
    before, tasks = Resources.now(), _tasks()
    yield
    before.assert_unchanged()
    left = _tasks() - tasks
    if left:
        raise AssertionError(f"tasks left behind: {left}")


def _tasks() -> set["asyncio.Task[object]"]:
    try:
        return asyncio.all_tasks()
    except RuntimeError:
        return set()  # no running loop


def _descriptors() -> Iterator[tuple[int, str]]:
    folder = _PROCESSES / "self" / "fd"
    if not folder.exists():
        return
    server = fork_server_in_use()
    shared = {
        server and server.channel.fileno(),
        getattr(resource_tracker._resource_tracker, "_fd", None),  # noqa: SLF001
        getattr(forkserver._forkserver, "_forkserver_alive_fd", None),  # noqa: SLF001
    }
    for entry in list(folder.iterdir()):
        with contextlib.suppress(OSError):  # the listing's own descriptor
            target = os.readlink(entry)  # noqa: PTH115  (pipe:[1] is no path)
            if int(entry.name) not in shared:
                yield int(entry.name), target


def _children() -> Iterator[int]:
    """Yield the ids of all descendants, except servers of the whole process."""
    multiprocessing.active_children()  # reaps ended children
    below: dict[int, list[int]] = {}
    every = os.listdir(_PROCESSES) if _PROCESSES.exists() else []  # noqa: PTH208  (of many, often)
    for pid in map(int, filter(str.isdecimal, every)):
        if parent := _started_by(pid)[1]:
            below.setdefault(parent, []).append(pid)
    server = fork_server_in_use()
    shared = {
        server and server.pid,
        getattr(resource_tracker._resource_tracker, "_pid", None),  # noqa: SLF001
        getattr(forkserver._forkserver, "_forkserver_pid", None),  # noqa: SLF001
    }
    to_visit = [os.getpid()]
    while to_visit:
        children = below.get(to_visit.pop(), [])
        to_visit += children
        yield from (pid for pid in children if pid not in shared)


def _started_by(pid: int) -> tuple[str, int]:
    """Return a process's id, name and state as text, and its parent's id (0: ended)."""
    try:
        with open(f"{_PROCESSES}/{pid}/stat", "rb", buffering=0) as file:  # noqa: PTH123  (of many, often)
            text = file.read()
    except OSError:
        return f"{pid} (ended)", 0
    end = text.rindex(b")") + 3  # after the name and the state, a letter
    return text[:end].decode(errors="replace"), int(text[end:].split(None, 1)[0])
