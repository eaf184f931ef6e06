"""The loader and its workers on systems that lack what Linux has."""

import os
import socket
import time
from pathlib import Path

import pytest

from aioloader import DataLoader
from python_process import python

# Removed before the package is imported, after what it depends on, and but for what
# the event loop of this machine needs.
MACOS = """
os: memfd_create MFD_CLOEXEC eventfd eventfd_read eventfd_write EFD_NONBLOCK
os: EFD_CLOEXEC EFD_SEMAPHORE pidfd_open sched_getaffinity sched_setaffinity P_PIDFD
os: sched_getscheduler sched_setscheduler posix_fadvise posix_fallocate O_TMPFILE
os: waitid splice copy_file_range getrandom setns unshare
signal: SIGRTMIN SIGRTMAX SIGPWR SIGPOLL SIGSTKFLT pidfd_send_signal sigtimedwait
signal: sigwaitinfo
socket: MSG_CMSG_CLOEXEC SOCK_CLOEXEC SOCK_NONBLOCK MSG_NOSIGNAL AF_NETLINK
"""
WINDOWS = """
os: fork forkpty register_at_fork posix_spawn posix_spawnp killpg getpgid setpgid
os: setsid getpgrp wait waitpid WNOHANG getuid geteuid getgid getgroups setuid pipe2
os: mkfifo nice getpriority setpriority sysconf statvfs pread pwrite preadv O_NONBLOCK
os: O_CLOEXEC O_NOFOLLOW O_DIRECTORY sendfile fchmod chown fork_exec confstr uname
signal: SIGKILL SIGSTOP SIGCONT SIGUSR1 SIGUSR2 SIGCHLD SIGALRM SIGHUP SIGPIPE
signal: setitimer pthread_sigmask sigwait pause alarm pthread_kill siginterrupt
select: poll POLLIN POLLOUT POLLHUP
socket: SCM_RIGHTS CMSG_LEN CMSG_SPACE MSG_DONTWAIT send_fds recv_fds
socket: SOCK_SEQPACKET
mmap: MAP_PRIVATE MAP_SHARED MAP_ANONYMOUS MAP_ANON PROT_READ PROT_WRITE
"""
GONE = {"macos": MACOS, "windows": MACOS + WINDOWS}
BLOCKED = {
    "macos": [],
    "windows": ["fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "uvloop"],
}
# In another file than the one that is run: `__main__` is sent by value.
REMOVAL = """
import asyncio, importlib, sys, tempfile
import numpy.random, torch.utils.data, torch.multiprocessing
import anyio._backends._asyncio, cloudpickle, concurrent.futures.thread

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name in {blocked}:
            raise ModuleNotFoundError(f"no module {{name}} here", name=name)

sys.meta_path.insert(0, Refused())
for name in {blocked}:
    sys.modules.pop(name, None)
for line in {gone!r}.split("\\n"):
    module, _, names = line.partition(":")
    for name in names.split():
        vars(importlib.import_module(module)).pop(name, None)
tempfile._O_TMPFILE_WORKS = False  # as found when it is imported
import socket
if {windows}:
    for name in ("recvmsg", "sendmsg", "recvmsg_into"):
        setattr(socket.socket, name, property())  # slots of C stay
"""
SCRIPT = """
import aioloader, aioloader.datasets, aioloader.testing

for module in (aioloader, aioloader.datasets, aioloader.testing):
    for name in module.__all__:
        getattr(module, name)

class Rows(list):
    pass

class Coroutines:
    def __len__(self):
        return 8

    async def __getitem__(self, index):
        await asyncio.sleep(0)
        return index

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(8))

async def collect(loader):
    async with loader:
        return [batch.tolist() async for batch in loader]

expected = [[0, 1], [2, 3], [4, 5], [6, 7]]
for make in (lambda: Rows(range(8)), Coroutines, Stream):
    for options in (
        dict(),
        dict(prefetch_factor=2),
        dict(timeout=60),
        dict(num_workers=1, workers="thread"),
        dict(num_workers=2, workers="thread"),
        dict(num_workers=2, workers=concurrent.futures.ThreadPoolExecutor(2)),
    ):
        if make is Stream and options.get("num_workers") == 2:
            continue  # as in torch, every worker has all of it
        loader = aioloader.DataLoader(make(), batch_size=2, **options)
        batches = [batch.tolist() for batch in loader]
        assert batches == expected, (make, options, batches)
        assert asyncio.run(collect(loader)) == expected, (make, options)
        state = loader.state_dict()
        loader.load_state_dict(state)

big = torch.arange(1 << 18).view(64, -1)
batch = next(iter(aioloader.DataLoader(Rows(big), batch_size=32)))  # memory of a slot
assert torch.equal(batch, big[:32])

print("works")
"""


@pytest.mark.slow
@pytest.mark.parametrize("system", GONE)
def test_coroutines_and_threads_read_on_other_systems(system: str) -> None:
    result = python("-W", "error", "-c", removal(system) + SCRIPT)
    assert result.stdout == "works\n", result.stderr


def removal(system: str) -> str:
    """Return the text of a module that removes what a system does not have."""
    return REMOVAL.format(
        blocked=BLOCKED[system], gone=GONE[system], windows=system == "windows"
    )


WORKERS = """
import asyncio, os, sys
import torch
from torch.utils.data import IterableDataset, get_worker_info

class Rows:
    def __len__(self): return 9
    def __getitem__(self, index): return torch.rand(3000) + index

class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        return iter(range(info.id, 9, info.num_workers))

class Coroutines(Rows):
    async def __getitem__(self, index): return super().__getitem__(index)

async def collect(loader):
    async with loader:
        return [batch.sum().item() async for batch in loader]

options = dict(batch_size=2, num_workers=2)
if sys.argv[1] == "torch":
    if __name__ == "__main__":
        for kind in Rows, Stream:
            torch.manual_seed(7)
            loader = torch.utils.data.DataLoader(
                kind(), multiprocessing_context="spawn", **options
            )
            print([batch.sum().item() for batch in loader])
else:
    from aioloader import DataLoader
    for kind in Rows, Stream, Coroutines:
        for is_async in False, True:
            torch.manual_seed(7)
            loader = DataLoader(kind(), rng="worker", **options)
            if is_async:
                print(asyncio.run(collect(loader)))
            else:
                print([batch.sum().item() for batch in loader])
"""


@pytest.mark.slow
@pytest.mark.parametrize("system", GONE)
def test_worker_processes_read_on_other_systems(system: str, tmp_path: Path) -> None:
    """The same batches as torch's spawned workers, without a ``__main__`` guard."""
    script = tmp_path / "script.py"
    script.write_text(WORKERS, encoding="utf-8")
    rows, stream = python(script, "torch", check=True).stdout.splitlines()
    (tmp_path / "sitecustomize.py").write_text(removal(system), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = python(script, "ours", env=environment)
    assert result.stdout.splitlines() == [rows] * 2 + [stream] * 2 + [rows] * 2, (
        result.stderr
    )


# Gone from loader and workers alike, as from a Python that was built long ago, or by a
# kernel that does not know the call.
OLD = {
    "attribute": "import os; [vars(os).pop(name) for name in {names}]",
    "kernel": """
import errno, os
def refused(*_args, **_options):
    raise OSError(errno.ENOSYS, "Function not implemented")
vars(os).update(dict.fromkeys({names}, refused))
""",
}
KILLED = """
import asyncio, os, signal, sys, time
import multiprocessing
from aioloader import DataLoader

class Rows:
    def __init__(self, kills): self.kills = kills
    def __len__(self): return 8
    def __getitem__(self, index):
        if index == 5 and self.kills:
            if os.fork() == 0:  # a child that outlives the worker
                time.sleep(60)
            try:
                os.close(os.open(self.kills, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        assert multiprocessing.parent_process().is_alive()
        return index

class AsyncRows(Rows):
    async def __getitem__(self, index): return super().__getitem__(index)

def main():
    for method in (None, "fork"):
        for kind in (Rows, AsyncRows):
            loader = DataLoader(
                kind(f"{sys.argv[1]}-{method}-{kind.__name__}"), 2, num_workers=2,
                multiprocessing_context=method,
            )
            print(sorted(n for batch in loader for n in batch.tolist()))
            print(loader.stats().worker_restarts)
            loader.close()
    if len(sys.argv) > 2:
        iterator = iter(DataLoader(Rows(""), num_workers=2, persistent_workers=True))
        next(iterator)
        os.kill(os.getpid(), signal.SIGKILL)
main()
"""


def without(names: str, how: str, folder: Path) -> dict[str, str]:
    """Return the environment of a Python, and of its children, without ``names``."""
    text = OLD[how].format(names=names.split())
    (folder / "sitecustomize.py").write_text(text, encoding="utf-8")
    return {**os.environ, "PYTHONPATH": str(folder)}


@pytest.mark.slow
@pytest.mark.parametrize("how", OLD)
@pytest.mark.parametrize("name", ["memfd_create", "pidfd_open"])
def test_an_old_linux_starts_workers_as_new_interpreters(
    name: str, how: str, tmp_path: Path
) -> None:
    """One warning; deaths of workers and of the loader are noticed."""
    script = tmp_path / "script.py"
    script.write_text(KILLED, encoding="utf-8")
    # It returns when no process has this one's output open.
    environment = without(name, how, tmp_path)
    result = python(script, tmp_path / "mark", "killed", env=environment)
    assert result.stdout == "[0, 1, 2, 3, 4, 5, 6, 7]\n1\n" * 4, result.stderr
    assert result.stderr.count(f"those of Linux need os.{name}") == 1
    assert result.returncode == -9


def test_setdefaulttimeout_does_not_affect_workers() -> None:
    """``socket.setdefaulttimeout`` is about the user's sockets."""
    socket.setdefaulttimeout(0.001)
    try:
        batches = list(DataLoader(range(8), num_workers=1, transform=late))
    finally:
        socket.setdefaulttimeout(None)
    assert [int(batch) for batch in batches] == [*range(8)]


def late(sample: int) -> int:
    """Return a sample after more than the timeout."""
    time.sleep(0.01)
    return sample
