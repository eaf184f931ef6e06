"""Ctrl-C: all workers end, and nothing hangs."""

import os
import signal
import subprocess
import sys
from itertools import product
from typing import Any

import pytest

from aioloader import DataLoader
from aioloader._workers.process.fork_server import ForkServer
from aioloader.errors import LoaderClosedError
from faulty import await_gone, session

KINDS: list[Any] = ["process", "forkserver", "thread"]
FLAGS = [True, False]
NOISE = ("Task was destroyed", "never awaited", "Exception ignored")

SCRIPT = """
import asyncio, os, signal, sys, time, torch
from aioloader import DataLoader
class D:
    def __len__(self): return 100
    def __getitem__(self, i):
        if i >= 12: time.sleep(0.2 if sys.argv[1] == 'thread' else 60)
        return i
by = {'workers': sys.argv[1]}
if sys.argv[1] == 'forkserver': by = {'multiprocessing_context': sys.argv[1]}
def begun(worker): os.write(1, b'begun\\n')
def loaders():
    for in_order in (True, False):
        for kept in (True, False):
            yield DataLoader(D(), 4, num_workers=2, in_order=in_order,
                             persistent_workers=kept, worker_init_fn=begun, **by)
def sync():
    iterators = [iter(loader) for loader in loaders()]
    for iterator in iterators: next(iterator)
    os.write(1, b'ready\\n')
    for batch in iterators[0]: pass
async def main():
    iterators = [aiter(loader) for loader in loaders()]
    for iterator in iterators: await anext(iterator)
    os.write(1, b'ready\\n')
    async for batch in iterators[0]: pass
if sys.argv[2] == 'for': sync()
else: asyncio.run(main())
"""


def started(*arguments: str, code: str = SCRIPT) -> "subprocess.Popen[str]":
    """Start a script in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def await_ready(process: "subprocess.Popen[str]") -> None:
    """Wait until the script's workers have started, and each loader has a batch."""
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(8 + 1)]
    assert sorted(lines) == ["begun\n"] * 8 + ["ready\n"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("statement", ["for", "async for"])
def test_ctrl_c_ends_loops_with_stuck_workers(statement: str, kind: str) -> None:
    """One KeyboardInterrupt; no process is left."""
    process = started(kind, statement)
    await_ready(process)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=40)
    assert process.returncode in {1, 130, -signal.SIGINT}
    assert await_gone(session(process.pid)) == []
    assert errors.count("Traceback") <= 3
    assert "KeyboardInterrupt" in errors
    for noise in NOISE:
        assert noise not in errors


class Interrupting:
    """An index, or a sample, whose unpickling is interrupted."""

    def __reduce__(self) -> Any:
        return interrupt, (os.getpid(),)


def interrupt(pid: int) -> None:
    """Raise KeyboardInterrupt, unless in the process that pickled this."""
    if os.getpid() != pid:
        raise KeyboardInterrupt


class InterruptedInPickling(Interrupting):
    """An index whose pickling is interrupted, once."""

    def __init__(self) -> None:
        self.is_over = False

    def __reduce__(self) -> Any:
        if not self.is_over:
            self.is_over = True
            raise KeyboardInterrupt
        return int, (2,)


class Crossing:
    """A dataset of its indices; unpickling sample -1 is interrupted."""

    def __getitem__(self, index: Any) -> Any:
        return Interrupting() if index == -1 else index


@pytest.mark.slow
@pytest.mark.parametrize("is_kept", FLAGS)
@pytest.mark.parametrize("where", ["out", "in"])
def test_an_interrupt_in_pickling_is_raised_at_once(where: str, is_kept: bool) -> None:
    """Later steps raise as well, and the next iteration is complete."""
    third: Any = InterruptedInPickling() if where == "out" else -1
    indices = [0, 1, third, 3, 4, 5]
    loader: Any = DataLoader(
        Crossing(),
        batch_size=None,
        sampler=indices,
        num_workers=1,
        collate_fn=lambda sample: sample,
        persistent_workers=is_kept,
    )
    with loader:
        iterator = iter(loader)
        with pytest.raises(KeyboardInterrupt):
            list(iterator)
        with pytest.raises(LoaderClosedError):
            list(iterator)
        indices[2] = 2  # for the next iteration
        assert list(loader) == [0, 1, 2, 3, 4, 5]


UNNOTICED = """
import asyncio, signal, sys, threading, time, torch
from aioloader import DataLoader
def handled_elsewhere():
    time.sleep(0.2)  # the main thread waits by now; otherwise it sees the signal anyway
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
class Plain:
    def __len__(self): return 9
    def __getitem__(self, i):
        if i: time.sleep(60)
        return i
class Async(Plain):
    async def __getitem__(self, i):
        if i: await asyncio.sleep(60)
        return i
class Returning(Plain):
    def __getitem__(self, i):
        return Async().__getitem__(i)
class Slow:
    def __len__(self): return 9
    def __iter__(self):
        over.wait(60)
        yield 0
ways = {
    'sampler': lambda: DataLoader(Async(), sampler=Slow()),
    'returned': lambda: DataLoader(Returning()),
    'coroutines': lambda: DataLoader(Async()),
    'timed': lambda: DataLoader(Async(), timeout=50),
    'caller': lambda: DataLoader(Async(), loop='caller'),
    'workers': lambda: DataLoader(Plain(), num_workers=1),
    'device': lambda: DataLoader(Async(), device='cpu'),
}
async def main(loader):
    batches = aiter(loader)
    if sys.argv[1] != 'sampler':
        await anext(batches)
    threading.Thread(target=handled_elsewhere).start()
    try:
        await anext(batches)
    finally:
        over.set()
over = threading.Event()
loader = ways[sys.argv[1]]()
if sys.argv[2] == 'async for':
    asyncio.run(main(loader))
batches = iter(loader)
next(batches)
threading.Thread(target=handled_elsewhere).start()
next(batches)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "statement"),
    [
        *product(
            ["coroutines", "timed", "workers", "device", "returned"],
            ["for", "async for"],
        ),
        ("sampler", "async for"),
        ("caller", "async for"),
    ],
)
def test_an_interrupt_that_wakes_no_thread_is_raised(way: str, statement: str) -> None:
    """Another thread handled the signal, or it came just before the main one waited."""
    process = started(way, statement, code=UNNOTICED)
    _, errors = process.communicate(timeout=40)
    assert process.returncode == -signal.SIGINT, errors
    assert "KeyboardInterrupt" in errors
    for noise in NOISE if way in {"coroutines", "timed", "caller"} else ():
        assert noise not in errors
    assert await_gone(session(process.pid)) == []


@pytest.mark.linux
@pytest.mark.slow
def test_an_interrupt_does_not_end_a_starting_fork_server() -> None:
    """A terminal sends it to all processes."""
    server = ForkServer()
    try:
        os.kill(server.pid, signal.SIGINT)
        server.wait()
        os.kill(server.pid, signal.SIGINT)
        assert server.is_alive()
    finally:
        server.channel.close()
        os.waitpid(server.pid, 0)
