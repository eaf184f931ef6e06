"""See that code leaves nothing behind: threads, descriptors, children, tasks.

A release that goes on in the background (a ``break`` drops an iterator; its threads end
a little later) is waited for, bounded, before anything is called a leak.
"""

import asyncio
import contextlib
import gc
import multiprocessing
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PATIENCE = 5.0


@dataclass(frozen=True)
class Resources:
    """What the process holds.

    Attributes:
        threads: Threads that are alive.
        descriptors: Open file descriptors and what they point to; empty where the
            system has no ``/proc``.
        children: Process identifiers of child processes of ``multiprocessing``.
    """

    threads: frozenset[threading.Thread]
    descriptors: frozenset[tuple[int, str]]
    children: frozenset[int | None]

    @classmethod
    def now(cls) -> "Resources":
        """Return what the process holds now."""
        return cls(
            frozenset(threading.enumerate()),
            frozenset(_descriptors()),
            frozenset(child.pid for child in multiprocessing.active_children()),
        )

    def assert_unchanged(self) -> None:
        """Fail if the process holds more than at the time of this snapshot.

        Raises:
            AssertionError: With what is left over.
        """
        gc.collect()
        for thread in threading.enumerate():
            if thread not in self.threads and thread.name.startswith("aioloader"):
                thread.join(_PATIENCE)
        now = Resources.now()
        left = {
            "threads": [thread.name for thread in now.threads - self.threads],
            "descriptors": sorted(now.descriptors - self.descriptors),
            "children": sorted(map(str, now.children - self.children)),
        }
        left = {what: found for what, found in left.items() if found}
        if left:
            raise AssertionError(f"left behind: {left}")


@contextlib.contextmanager
def no_leaks() -> Iterator[None]:
    """Fail if the block leaves threads, descriptors, children or tasks behind.

    Raises:
        AssertionError: With what is left over.
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
        return set()  # no loop runs here


def _descriptors() -> Iterator[tuple[int, str]]:
    folder = Path("/proc/self/fd")
    if not folder.exists():
        return
    for entry in list(folder.iterdir()):
        with contextlib.suppress(OSError):  # the descriptor of this very listing
            yield int(entry.name), os.readlink(entry)  # noqa: PTH115  (pipe:[1] is no path)
