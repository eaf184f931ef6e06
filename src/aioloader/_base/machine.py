"""The cores and the memory that this process may use, also in a container.

The files read here are the kernel's (/proc, /sys), so reads never wait for a disk.
"""

import contextlib
import functools
import math
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

_GROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # cgroup version 1 writes a number near 2 ** 63 for no limit


def cores(groups: Path = _GROUPS) -> int:
    """Return how many cores this process may use; ranks share a machine equally."""
    count = float(os.cpu_count() or 1)
    if hasattr(os, "sched_getaffinity"):  # Linux
        count = float(len(os.sched_getaffinity(0)))
    # The cgroup's quota and period of processor time, in versions 2 and 1.
    for names in ("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"):
        with contextlib.suppress(OSError, ValueError):  # "max" and -1: no quota
            texts = [_read(groups / name) for name in names]
            quota, period = map(int, " ".join(texts).split())
            count = min(count, quota / period) if quota > 0 else count
    with contextlib.suppress(ValueError):  # set by torchrun
        count /= max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, math.floor(count))


@functools.cache
def lack_of_linux() -> str:
    """Return what worker processes need but this machine lacks; "" if nothing."""
    if not sys.platform.startswith("linux"):
        return "Linux"
    for name, argument in (("memfd_create", "aioloader"), ("pidfd_open", os.getpid())):
        try:
            os.close(getattr(os, name)(argument))
        except (AttributeError, OSError) as error:  # old glibc, gVisor, RHEL 8
            return f"os.{name} ({error})"
    return ""


def memory_left(groups: Path = _GROUPS) -> int:
    """Return how many bytes this process can still allocate, memfd files included."""
    left = _UNLIMITED
    with contextlib.suppress(OSError, ValueError):  # only Linux has it
        words = _read(Path("/proc/meminfo")).replace(":", "").split()
        left = int(words[words.index("MemAvailable") + 1]) * 1024
    for limit, used, group in (
        ("memory.max", "memory.current", groups),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", groups / "memory"),
    ):
        with contextlib.suppress(OSError, ValueError, KeyError):  # "max" is no limit
            most = int(_read(group / limit))
            if most < _UNLIMITED:
                left = min(left, most - int(_read(group / used)) + _cached(group))
    return max(0, left)


class RunTimes(NamedTuple):
    """A thread's times in seconds, as the kernel counts them; 0 where unknown."""

    cpu: float = 0.0  # its processor time
    delayed: float = 0.0  # the time it was ready to run and waited for a processor

    def __sub__(self, before: "RunTimes") -> "RunTimes":
        return RunTimes(self.cpu - before.cpu, self.delayed - before.delayed)


def run_times(thread: int | None = None) -> RunTimes:
    """Return a thread's times; ``thread``: its native id, by default the caller's."""
    cpu = delayed = 0.0
    with contextlib.suppress(OSError, ValueError):  # only Linux has it
        if thread is None:
            # One call: a Ctrl-C after opening would leave a descriptor open.
            path = "/proc/thread-self/schedstat"
            times = np.fromfile(path, np.int64, sep=" ").tolist()
        else:  # if the thread ends meanwhile, `fromfile` leaves a file open
            words = _read(Path(f"/proc/self/task/{thread}/schedstat")).split()
            times = list(map(int, words))
        cpu, delayed, _ = times
    return RunTimes(time.thread_time() if thread is None else cpu / 1e9, delayed / 1e9)


def _cached(group: Path) -> int:
    """Return the bytes of a cgroup's cached files, which the kernel evicts first."""
    words = _read(group / "memory.stat").split()
    stat = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    return stat["active_file"] + stat["inactive_file"]


def _read(path: Path) -> str:
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        return os.read(descriptor, 1 << 16).decode()
    finally:
        os.close(descriptor)
