"""Every way out of a loop releases everything."""

import asyncio
import gc
import random
import threading
from typing import Any

import pytest

from aioloader import DataLoader
from aioloader.testing import Resources
from python_process import python
from samples import AsyncMap, AsyncStream, SyncMap, SyncStream

KINDS = [SyncMap, AsyncMap, SyncStream, AsyncStream]


class LeaveError(Exception):
    """The consumer's own error."""


async def leave(loader: Any, how: str, after: int) -> None:
    """Take ``after`` batches, then leave the loop."""
    iterator = aiter(loader)
    try:
        taken = 0
        async for _ in iterator:
            taken += 1
            if taken < after:
                continue
            if how == "break":
                break
            if how == "raise":
                raise LeaveError
            if how == "close":
                await iterator.aclose()
            if how == "close loader":
                await loader.aclose()
            if how == "cancel":
                asyncio.current_task().cancel()  # type: ignore[union-attr]
    finally:
        del iterator


HOWS = ["end", "break", "raise", "close", "close loader", "cancel"]


@pytest.mark.slow
def test_a_thousand_random_exits_leak_nothing() -> None:
    """Threads, descriptors, tasks and child processes."""
    rng = random.Random(5)
    before = Resources.now()

    async def leave_loaders(number: int) -> None:
        for _ in range(number):
            loop: Any = rng.choice(["thread", "caller"])
            in_order = rng.random() < 0.5
            dataset = rng.choice(KINDS)(12)
            loader = DataLoader(dataset, batch_size=2, loop=loop, in_order=in_order)
            task = asyncio.ensure_future(
                leave(loader, rng.choice(HOWS), rng.randint(1, 6))
            )
            if rng.random() < 0.2:
                for _ in range(rng.randint(0, 12)):
                    await asyncio.sleep(0)
                task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                assert isinstance(task.exception(), (LeaveError, type(None)))

    for _ in range(20):
        asyncio.run(leave_loaders(40))
    for _ in range(200):
        loader = DataLoader(rng.choice(KINDS)(12), batch_size=2, timeout=60)
        after = rng.randint(1, 7)
        for taken, _ in enumerate(loader):
            if taken == after:
                break
    before.assert_unchanged()


def test_an_entered_loader_that_is_dropped_warns() -> None:
    """It is released all the same."""
    loader: Any = DataLoader(AsyncMap(), batch_size=2).__enter__()
    list(loader)
    with pytest.warns(ResourceWarning, match="entered and never closed"):
        del loader
        gc.collect()


IMPORTS = """
import asyncio, sys, threading, time, torch
from aioloader import DataLoader
class A:
    def __len__(self): return 100
    async def __getitem__(self, i):
        await asyncio.sleep(0.001)
        return i
class S:
    def __len__(self): return 100
    def __getitem__(self, i): return i
async def consume(loader):
    async for batch in loader: pass
"""

OPEN_AT_EXIT = {
    "held by a global": "it = iter(DataLoader(A(), 4)); next(it)",
    "sync, held": "it = iter(DataLoader(S(), 4, timeout=9)); next(it)",
    "loop of the caller": (
        "it = aiter(DataLoader(A(), 4, loop='caller'))\n"
        "async def step(): await anext(it)\n"
        "asyncio.run(step())"
    ),
    "a daemon thread": (
        "begun, loader = threading.Event(), DataLoader(range(10**6), num_workers=1)\n"
        "def work():\n"
        "    for _ in loader: begun.set()\n"
        "    print('this epoch is complete')\n"
        "threading.Thread(target=work, daemon=True).start(); begun.wait()"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPEN_AT_EXIT)
def test_an_iterator_left_open_does_not_delay_the_exit(name: str) -> None:
    """The process ends quietly, but for a ResourceWarning."""
    done = python("-W", "default", "-c", IMPORTS + OPEN_AT_EXIT[name])
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "left open until the interpreter's exit" in done.stderr or (
        name == "loop of the caller" and done.stderr == ""
    )
    for noise in ("Task was destroyed", "never awaited", "Traceback", "Fatal"):
        assert noise not in done.stderr


@pytest.mark.linux
@pytest.mark.slow
def test_a_supervisor_that_is_ended_in_a_fork_prints_nothing() -> None:
    """``multiprocessing`` ends it so if a program ends soon after ``iter()``."""
    code = IMPORTS + (
        "import multiprocessing as m, os\n"
        "def end(): 'super' in m.current_process().name and os.kill(os.getpid(), 15)\n"
        "os.register_at_fork(after_in_parent=end)\n"
        "try: list(DataLoader(S(), num_workers=1))\n"
        "except RuntimeError as e: print(str(e)[:14])\n"
    )
    done = python("-c", code)
    assert (done.stdout, done.stderr) == ("the supervisor\n", "")


@pytest.mark.slow
def test_only_the_users_uncaught_exception_is_printed() -> None:
    code = IMPORTS + "for batch in DataLoader(A(), 4): raise KeyError('mine')"
    done = python("-W", "default", "-c", code)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("KeyError: 'mine'")
    assert "Warning" not in done.stderr


@pytest.mark.slow
def test_the_exit_waits_for_a_thread_in_torchs_code() -> None:
    """Otherwise the thread would abort the process."""
    code = IMPORTS + (
        "torch.set_num_threads(1)\n"
        "started, big = threading.Event(), torch.rand(1500, 1500)\n"
        "class Long(S):\n"
        "    def __getitem__(self, i):\n"
        "        if i > 1: started.set(); return big.mm(big)\n"
        "        return i\n"
        "loader = DataLoader(Long(), 1, prefetch_factor=2, collate_fn=len)\n"
        "class Last:\n"  # the interpreter's end takes longer than the call
        "    def __del__(self, wait=threading.Event().wait): wait(2)\n"
        "last = Last()\n"
        "for batch in loader:\n"
        "    if started.wait(0.01): sys.exit(3)\n"
    )
    done = python("-W", "ignore", "-c", code)
    assert (done.returncode, done.stderr) == (3, "")


# Thread-local objects are freed as the thread ends.
MINE = """
import os
class Mine(threading.local):
    def __init__(self): self.tensors = Tensors()
class Tensors:
    def __del__(self, wait=threading.Event().wait):
        wait(0.2)
        os.write(1, b"freed\\n")  # whole, also of two threads at once
mine = Mine()
"""
ENDING = {
    "workers": "for batch in DataLoader(S(), 4, num_workers=2, workers='thread',\n"
    "                        worker_init_fn=lambda worker: mine.tensors): break\n",
    "loop of the caller": "async def go():\n"
    "    def touch(batch): mine.tensors; return batch\n"
    "    loader = DataLoader(A(), 4, loop='caller', transform=touch)\n"
    "    async with loader:\n"
    "        async for batch in loader: break\n"
    "asyncio.run(go())\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDING)
def test_the_exit_waits_for_threads_that_are_ending(name: str) -> None:
    """One may be freeing a dataset's tensors, which torch does without the GIL."""
    done = python("-W", "ignore", "-c", IMPORTS + MINE + ENDING[name])
    assert (done.returncode, done.stderr, {*done.stdout.split()}) == (0, "", {"freed"})


@pytest.mark.slow
def test_a_stuck_read_does_not_block_the_exit() -> None:
    """A thread that never returns cannot be joined."""
    code = IMPORTS + (
        "import aioloader._pipeline.ahead_feed as it; it.GRACE = 0.1\n"
        "class Stuck(S):\n"
        "    def __getitem__(self, i): threading.Event().wait()\n"
        "it = iter(DataLoader(Stuck(), timeout=0.05))\n"
        "try: next(it)\n"
        "except TimeoutError: print('gave up')\n"
    )
    done = python("-c", code)
    assert (done.returncode, done.stdout) == (0, "gave up\n")


async def test_a_close_waits_once_for_stuck_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For that of the next iteration, once more."""
    monkeypatch.setattr("aioloader._pipeline.runner.GRACE", 0.1)
    begun, go_on = threading.Event(), threading.Event()

    def stuck(_samples: object) -> None:
        begun.set()
        go_on.wait()

    loader: Any = DataLoader(SyncMap(4), prefetch_factor=2, collate_fn=stuck)
    with pytest.warns(ResourceWarning, match="still running") as said:
        async with loader:
            for _ in range(2):
                step = asyncio.ensure_future(anext(iterator := aiter(loader)))
                await asyncio.to_thread(begun.wait)
                await iterator.aclose()
                go_on.set()
                await asyncio.wait([step])
                assert isinstance(step.exception(), StopAsyncIteration)
                begun.clear()
                go_on.clear()
    assert len(said) == 2


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["thread", "process"])
def test_a_forked_child_with_an_open_iterator_ends_at_once(workers: str) -> None:
    """It does not wait for its parent's threads and processes."""
    code = IMPORTS + (
        "import os\n"
        "from aioloader._pipeline import ahead_feed\n"
        "ahead_feed.GRACE = threading.TIMEOUT_MAX\n"
        f"it = iter(DataLoader(S(), 4, num_workers=2, workers={workers!r}))\n"
        "next(it)\n"
        "if not (pid := os.fork()): sys.exit(3)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)\n"
        "os._exit(0)\n"
    )
    assert python("-c", code).stdout == "3\n"


@pytest.mark.slow
def test_reads_of_an_abandoned_loop_are_released_at_exit() -> None:
    """The loop's thread ends first."""
    code = IMPORTS + (
        "class Held(A):\n"
        "    async def __getitem__(self, index):\n"
        "        if index < 2: return index\n"
        "        try: await asyncio.sleep(3600)\n"
        "        finally:\n"
        "            time.sleep(0.3)\n"
        "            print('released', flush=True)\n"
        "async def main():\n"
        "    async for _ in DataLoader(Held(), 2, prefetch_factor=2, concurrency=3):\n"
        "        break\n"
        "asyncio.run(main())\n"
    )
    done = python("-c", code)
    assert (done.returncode, {*done.stdout.split()}) == (0, {"released"})


@pytest.mark.slow
def test_a_thread_may_iterate_after_the_main_thread_ends() -> None:
    """Python waits for it."""
    code = IMPORTS + (
        "def work():\n"
        "    threading.main_thread().join()\n"
        "    print(sum(len(b) for b in DataLoader(A(), 4)))\n"
        "threading.Thread(target=work).start()\n"
    )
    done = python("-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "100\n", "")
