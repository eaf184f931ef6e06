"""A pytest plugin: all worker processes are the portable ones, started quickly.

They are forks of the test process instead of new interpreters. Tests with the mark
``linux`` are about Linux's own workers, and are left out.
"""

import contextlib
import os
import signal
import subprocess
import sys
import traceback
from types import SimpleNamespace
from typing import Any

import pytest
from blockbuster import blockbuster as detection

from aioloader._base import machine
from aioloader._loader import options
from aioloader._workers.process import portable, portable_worker

_MOST_DESCRIPTORS = 4096


class Forked:
    """The part of ``subprocess.Popen`` that ``Link`` uses."""

    def __init__(
        self, command: list[str], *, pass_fds: list[int], env: dict[str, str], **_: Any
    ) -> None:
        life, ours = os.pipe()
        call = command[-1].rpartition("\n")[2]
        self.returncode: int | None = None
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            try:
                os.setsid()
                no_loop: Any = SimpleNamespace(get_running_loop=_no_loop)
                vars(detection)["asyncio"] = no_loop
                os.dup2(life, 0)
                _close_all_but({0, 1, 2, *pass_fds})
                os.environ.clear()
                os.environ.update(env)
                eval(call, {"portable_worker": portable_worker})
            except BaseException:  # noqa: BLE001  (printed)
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(life)
        self.stdin = os.fdopen(ours, "wb", buffering=0)

    def poll(self) -> int | None:
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):  # a copy in a child process
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _no_loop() -> None:
    """Tell blockbuster that no loop runs: user code in a worker may block it."""
    raise RuntimeError


def _close_all_but(kept: set[int]) -> None:
    ends = sorted(kept)
    for end, following in zip(ends, [*ends[1:], _MOST_DESCRIPTORS], strict=True):
        if end + 1 < following:  # else all would be closed
            os.closerange(end + 1, following)


def pytest_configure() -> None:
    machine.lack_of_linux.cache_clear()
    vars(options)["lack_of_linux"] = lambda: "what Linux has"
    started: Any = SimpleNamespace(Popen=Forked, PIPE=subprocess.PIPE)
    vars(portable)["subprocess"] = started


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Deselect tests of Linux's own workers."""
    left = [
        item
        for item in items
        if item.get_closest_marker("linux")
        or "fork_is_default" in getattr(item, "fixturenames", ())
    ]
    if left:
        items[:] = [item for item in items if item not in left]
        config.hook.pytest_deselected(items=left)
