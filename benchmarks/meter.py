"""What a contender costs: CPU seconds and memory of its process and its workers.

Read from /proc (Linux), where living workers and those already reaped both count.
``Meter`` also splits the CPU time by thread, to say where a loader spends it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Self

_TICKS = os.sysconf("SC_CLK_TCK")


def _stat(path: Path) -> tuple[str, list[str]]:
    """Split a stat line into its command and the fields after it."""
    before, _, after = path.read_text().rpartition(")")
    return before.partition("(")[2], after.split()


def descendants(pid: int) -> list[int]:
    """List the living children of a process, and theirs."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it ended meanwhile
            for child in (task / "children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and of the children it has reaped."""
    _, fields = _stat(Path(f"/proc/{pid}/stat"))
    return sum(map(int, fields[11:15])) / _TICKS


def uncharged() -> float:
    """Return the CPU time of living processes that a fork server started.

    It ignores their end, so that the kernel adds it to nobody's.
    """
    seconds = 0.0
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if _ignores_children(pid):
                seconds += sum(map(cpu_seconds, descendants(pid)))
    return seconds


def _ignores_children(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
    return bool(ignored >> (signal.SIGCHLD - 1) & 1)


def thread_seconds() -> dict[str, float]:
    """Return the CPU time of this process's living threads, added up by name."""
    seconds: dict[str, float] = defaultdict(float)
    python = {str(one.native_id): one.name for one in threading.enumerate()}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it ended meanwhile
            name, _ = _stat(task / "stat")
            nanoseconds = int((task / "schedstat").read_text().split()[0])
            seconds[python.get(task.name, name)] += nanoseconds / 1e9
    return seconds


class Meter:
    """Measure a ``with`` block: wall and CPU seconds, then peak memory.

    ``cpu`` counts this process and all its workers; threads that end inside the
    block are in ``cpu`` but not in ``threads``.
    """

    wall: float
    cpu: float
    threads: dict[str, float]

    def __enter__(self) -> Self:
        self._threads = thread_seconds()
        self._cpu = self._cpu_now()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        self.wall = time.perf_counter() - self._start
        self.cpu = self._cpu_now() - self._cpu
        self.threads = {
            name: seconds - self._threads.get(name, 0.0)
            for name, seconds in thread_seconds().items()
        }

    @staticmethod
    def _cpu_now() -> float:
        own = time.process_time()
        reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
        living = sum(cpu_seconds(pid) for pid in descendants(os.getpid()))
        return own + reaped.ru_utime + reaped.ru_stime + living


class MachineMeter:
    """Measure the load of the rest of the machine while children of this one run."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._busy = self._busy_now()
        self._reaped = self._reaped_now()

    def others(self, uncharged: float = 0.0) -> float:
        """Return the cores that other processes used, including the object server.

        Args:
            uncharged: CPU seconds of children's workers, if known: see ``uncharged``.
        """
        busy = self._busy_now() - self._busy - uncharged
        reaped = self._reaped_now() - self._reaped
        return max(0.0, busy - reaped) / (time.perf_counter() - self._start)

    @staticmethod
    def _busy_now() -> float:
        user, nice, system, _, _, *rest = map(
            int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
        )
        return (user + nice + system + sum(rest)) / _TICKS

    @staticmethod
    def _reaped_now() -> float:
        reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
        return reaped.ru_utime + reaped.ru_stime


def peak_megabytes() -> dict[str, float]:
    """Return the peak resident size of this process and of its largest worker."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return {"rss_mb": own / 1024, "worker_rss_mb": largest / 1024}
