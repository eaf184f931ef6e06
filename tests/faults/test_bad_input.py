"""Bad input to workers, and user code that misuses its process: no hang, no leak."""

import errno
import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aioloader import DataLoader
from aioloader.errors import BatchTooLargeError
from faulty import Faulty, outcomes
from python_process import python

HUGE = 1 << 50


def broadcast() -> Any:
    """Return a petabyte that is stored as one byte."""
    return np.broadcast_to(np.zeros(1, np.uint8), (HUGE,))


def expanded() -> Any:
    return torch.zeros(1, dtype=torch.uint8).expand(HUGE)


class Strange(Faulty):
    """All samples are the strange value."""

    def __init__(self, value: Any, n: int) -> None:
        super().__init__(n)
        self.value = value

    def __getitem__(self, index: int) -> Any:
        return self.value()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "collate_fn"), [(broadcast, None), (broadcast, list), (expanded, None)]
)
def test_a_batch_too_large_for_memory_is_an_error(value: Any, collate_fn: Any) -> None:
    """No worker dies."""
    loader = DataLoader(Strange(value, 8), 4, num_workers=2, collate_fn=collate_fn)
    errors = outcomes(loader)
    wanted = (BatchTooLargeError, MemoryError, RuntimeError)
    assert [isinstance(error, wanted) for error in errors] == [True, True]
    assert not any("exited unexpectedly" in str(error) for error in errors)


class Manners(Faulty):
    """Forks, starts threads and processes, and changes the directory."""

    def __getitem__(self, index: int) -> Any:
        case = index % 5
        if case == 0:
            child = os.fork()
            if child == 0:
                os._exit(3)
            os.waitpid(child, 0)
        elif case == 1:
            threading.Thread(target=threading.Event().wait).start()
        elif case == 2:
            os.chdir("/")
        elif case == 3:
            subprocess.run([sys.executable, "-S", "-c", ""], check=True)
        else:
            context = multiprocessing.get_context("fork")
            child_process = context.Process(target=os.getpid)
            child_process.start()
            child_process.join()
        return torch.full((1 << 15,), float(index)), index


@pytest.mark.slow
@pytest.mark.parametrize("is_kept", [True, False])
def test_workers_may_fork_start_threads_and_processes(is_kept: bool) -> None:
    """Batches arrive, and everything ends."""
    where = Path.cwd()
    with DataLoader(Manners(), 4, num_workers=2, persistent_workers=is_kept) as loader:
        for _ in range(2):
            labels = [i for _, batch in loader for i in batch.tolist()]
            assert labels == list(range(24))
    assert Path.cwd() == where


class Orphans(Faulty):
    """Forks a process that outlives the worker, and holds all its descriptors."""

    def __init__(self, pids: Path) -> None:
        super().__init__(8)
        self.pids = pids

    def __getitem__(self, index: int) -> Any:
        child = os.fork()
        if child == 0:
            threading.Event().wait()
        with self.pids.open("a") as file:
            file.write(f"{child}\n")
        return index


@pytest.mark.slow
def test_orphans_of_a_worker_do_not_keep_the_loader_open(tmp_path: Path) -> None:
    """The user has to end them."""
    labels = [
        i
        for batch in DataLoader(Orphans(tmp_path / "pids"), 4, num_workers=2)
        for i in batch.tolist()
    ]
    for line in (tmp_path / "pids").read_text().split():
        os.kill(int(line), 9)
    assert labels == list(range(8))


LIMITED = f"""
import resource, sys
sys.path[:] = {sys.path!r}
import torch
from aioloader import DataLoader
from aioloader.testing import no_leaks
from faulty import Faulty
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
for limit in map(int, sys.argv[1:]):
    with no_leaks():
        loader = DataLoader(Faulty(24), 4, num_workers=2)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
        try:
            print(len(list(loader)))
        except OSError as error:
            print(error.errno)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
"""


@pytest.mark.slow
def test_64_descriptors_are_enough_for_every_epoch() -> None:
    """With too few a start fails and leaves none open."""
    ended = python("-c", LIMITED, *[64] * 20, *range(4, 19))
    assert ended.stdout == "6\n" * 20 + f"{errno.EMFILE}\n" * 15, ended.stderr


def number_of_descriptors() -> int:
    """Return how many descriptors this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def test_descriptors_do_not_grow_with_batches() -> None:
    """Nor with the batches that a consumer keeps."""
    iterator = iter(DataLoader(Large(), 4, num_workers=2))
    kept = [next(iterator) for _ in range(4)]
    before = number_of_descriptors()
    kept += iterator
    assert len(kept) == 40
    assert number_of_descriptors() <= before


class Large(Faulty):
    """Batches of 1 MB."""

    def __init__(self) -> None:
        super().__init__(160)

    def __getitem__(self, index: int) -> Any:
        return torch.full((1 << 16,), float(index))


SERVERLESS = f"""
import multiprocessing, os, sys
sys.path[:] = {sys.path!r}
from aioloader import warm_up
from aioloader.errors import WorkerStartError
multiprocessing.set_executable("/bin/false")  # it ends at once
try:
    warm_up()
except WorkerStartError as error:
    print(error)
os.waitpid(-1, os.WNOHANG)
"""


@pytest.mark.linux
@pytest.mark.slow
def test_a_fork_server_that_ends_while_it_starts_is_reaped() -> None:
    """The error comes at once, and no zombie stays."""
    done = python("-c", SERVERLESS)
    assert "the fork server of the worker processes has ended" in done.stdout
    assert "ChildProcessError: [Errno 10] No child processes" in done.stderr
