"""Datasets that crash, exit or hang at chosen samples, and helpers for processes."""

import asyncio
import contextlib
import ctypes
import os
import random
import re
import select
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvloop
from torch.utils.data import IterableDataset

from aioloader import DataLoader
from aioloader._workers.process.portable import PortablePool, ProcessLink
from samples import collect

Act = Callable[[], object]


# -- acts of a sample ---------------------------------------------------------------


def kill_itself() -> None:
    """Die as by the kernel's out-of-memory killer."""
    signal.raise_signal(signal.SIGKILL)


def segfault() -> None:
    """Crash as broken native code does."""
    ctypes.string_at(0)


def leave() -> None:
    """Exit at once, without cleaning up."""
    os._exit(7)


def exit_politely() -> None:
    """Raise SystemExit, as a script may do deep inside a library."""
    sys.exit(9)


def sleep_forever() -> None:
    """Hang in Python."""
    threading.Event().wait()


def spin_in_c() -> None:
    """Hang in native code that holds the GIL."""
    re.match(r"(a+)+$", "a" * 64 + "b")


def stop_itself() -> None:
    """Stop as under a debugger or a shell's job control."""
    signal.raise_signal(signal.SIGSTOP)


def first_time(mark: Path) -> bool:
    """Create the file ``mark``; return whether it did not exist before."""
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


# -- datasets -----------------------------------------------------------------------


class Faulty:
    """Augmented samples; reading some of them calls ``act``.

    Args:
        n: Number of samples.
        at: Indices of the samples that call ``act``.
        act: The function that is called.
        marks: A folder: call ``act`` only once for each sample. None: every time.
    """

    def __init__(
        self,
        n: int = 24,
        at: tuple[int, ...] = (),
        act: Act = kill_itself,
        marks: Path | None = None,
    ) -> None:
        self.n = n
        self.at = at
        self.act = act
        self.marks = marks

    def __len__(self) -> int:
        return self.n

    def happen(self, index: int) -> None:
        """Call ``act`` if ``index`` is one of the chosen samples."""
        if index not in self.at:
            return
        if self.marks is None or first_time(self.marks / str(index)):
            self.act()

    def __getitem__(self, index: int) -> Any:
        self.happen(index)
        return augmented(index)


class AsyncFaulty(Faulty):
    """The same as a coroutine; several batches are in progress at once."""

    async def __getitem__(self, index: int) -> Any:
        await asyncio.sleep(0)
        self.happen(index)
        return torch.full((3,), float(index)), index


class FaultyStream(Faulty, IterableDataset[Any]):
    """Each worker reads its own stream; ``act`` is called in one of them."""

    def __iter__(self) -> Iterator[int]:
        worker: Any = torch.utils.data.get_worker_info()
        for place in range(self.n):
            label = worker.id * 1000 + place
            self.happen(label)
            yield label


class FaultyAsyncStream(FaultyStream):
    __iter__ = None  # type: ignore[assignment]

    async def __aiter__(self) -> AsyncIterator[int]:
        for label in FaultyStream.__iter__(self):
            await asyncio.sleep(0)
            yield label


class Pids:
    """Samples are the pid of the process that reads them."""

    def __init__(self, n: int = 24) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def augmented(index: int) -> Any:
    """Return a sample that depends on all three generators."""
    noise = torch.rand(4) + random.random()
    return noise, torch.from_numpy(np.random.rand(3)), index


# -- consumers ----------------------------------------------------------------------


def in_thread(loader: DataLoader[Any]) -> list[Any]:
    return list(loader)


def on_asyncio(loader: DataLoader[Any]) -> list[Any]:
    return asyncio.run(collect(loader))


def on_uvloop(loader: DataLoader[Any]) -> list[Any]:
    return uvloop.run(collect(loader))


CONSUMERS = [in_thread, on_asyncio, on_uvloop]


def outcomes(loader: DataLoader[Any]) -> list[Any]:
    """Return all batches, and the errors of those that failed."""
    results: list[Any] = []
    iterator = iter(loader)
    while True:
        try:
            results.append(next(iterator))
        except StopIteration:
            return results
        except Exception as error:  # noqa: BLE001  (a result)
            error.__traceback__ = None  # it would keep the iterator
            results.append(error)


async def outcomes_async(loader: DataLoader[Any]) -> list[Any]:
    """Return the same, by ``async for``."""
    results: list[Any] = []
    iterator = aiter(loader)
    while True:
        try:
            results.append(await anext(iterator))
        except StopAsyncIteration:
            return results
        except Exception as error:  # noqa: BLE001  (a result)
            error.__traceback__ = None  # it would keep the iterator
            results.append(error)


def outcomes_on_asyncio(loader: DataLoader[Any]) -> list[Any]:
    return asyncio.run(outcomes_async(loader))


def outcomes_on_uvloop(loader: DataLoader[Any]) -> list[Any]:
    return uvloop.run(outcomes_async(loader))


ALL_OUTCOMES = [outcomes, outcomes_on_asyncio, outcomes_on_uvloop]


# -- processes ----------------------------------------------------------------------


def workers_of(loader: DataLoader[Any]) -> dict[int, int]:
    """Return the pids of the loader's kept workers, by number."""
    return pids_of(loader._live.pools._kept[0])


def pids_of(pool: Any) -> dict[int, int]:
    """Return the pids of a pool's workers, by number, once all have started."""
    while True:
        pool.collect()
        pids = {worker.number: worker.pid for worker in pool._dispatcher.workers}
        if None not in pids.values():
            return pids
        poll = select.poll()
        for descriptor in pool.descriptors():
            poll.register(descriptor, select.POLLIN)
        assert poll.poll(20_000), "no worker started"


def await_news(loader: DataLoader[Any]) -> None:
    """Wait until the launcher of the kept workers has reported a death."""
    pool: Any = loader._live.pools._kept[0]
    if isinstance(pool, PortablePool):  # a thread, which has replaced the worker
        with pool._gone:
            are_there = pool._gone.wait_for(
                lambda: all(map(ProcessLink.look, pool._all)), 20
            )
        assert are_there, "no death was reported"
        return
    poll = select.poll()
    poll.register(pool._launcher.control, select.POLLIN)
    assert poll.poll(20_000), "no death was reported"


def await_ready(pool: Any) -> None:
    """Wait until all workers of a pool take requests."""
    while not all(worker.is_ready for worker in pool._dispatcher.workers):
        poll = select.poll()
        if isinstance(pool, PortablePool):  # its threads collect
            poll.poll(10)
            continue
        for descriptor in pool.descriptors():
            poll.register(descriptor, select.POLLIN)
        poll.poll()
        pool.collect()


def start_workers(loader: DataLoader[Any]) -> None:
    """Start workers that persist, and wait for them: ``timeout`` counts that too."""
    iterator = aiter(loader)  # sends no requests yet
    await_ready(pools_of(iterator))
    iterator.close()


def pools_of(iterator: Any) -> Any:
    """Return the pool that an iterator takes batches from, started or not."""
    steps = iterator._core
    return (steps.feed or steps.prepared).pipeline.pool._pool


def parent_of(pid: int) -> int:
    """Return the parent of a process."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    return int(text.rpartition(")")[2].split()[1])


def kill_and_wait(pid: int, number: int = signal.SIGKILL) -> None:
    """Kill a process and wait until it has ended."""
    process = os.pidfd_open(pid)
    try:
        os.kill(pid, number)
        await_end(process)
    finally:
        os.close(process)


def await_end(process: int, seconds: float = 20) -> None:
    """Wait for the end of the process of a pidfd."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    assert poll.poll(seconds * 1000), "a process did not end"


def is_alive(pid: int) -> bool:
    """Return whether a process runs, and is no zombie."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
        return text.rpartition(")")[2].split()[0] not in {"Z", "X"}
    return False


def await_gone(pids: list[int], seconds: float = 20) -> list[int]:
    """Wait until these processes have ended; return those that have not in time."""
    until = time.monotonic() + seconds
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            process = os.pidfd_open(pid)
            poll = select.poll()
            poll.register(process, select.POLLIN)
            poll.poll(max(0.0, until - time.monotonic()) * 1000)
            os.close(process)
    return [pid for pid in pids if is_alive(pid)]


def workers_by(kind: str) -> dict[str, Any]:
    """Return the loader's arguments for a kind of worker, or a start method."""
    if kind in {"process", "thread"}:
        return {"workers": kind}
    return {"multiprocessing_context": kind}


def session(leader: int) -> list[int]:
    """Return the processes of a session, and of the sessions that its workers lead.

    Orphaned workers count, too: their supervisor was in some session.
    """
    stats = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            text = (entry / "stat").read_text("ascii", "replace")
            name, _, rest = text.partition("(")[2].rpartition(")")
            _, parent, _, session_id = rest.split()[:4]
            stats[int(entry.name)] = name, int(parent), int(session_id)
    led = {leader} | {
        pid
        for pid, (name, parent, _) in stats.items()
        if name.startswith("aioloader-")
        and (parent == 1 or (parent in stats and stats[parent][2] == leader))
    }
    return [pid for pid, (_, _, session_id) in stats.items() if session_id in led]
