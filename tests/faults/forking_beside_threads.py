"""A process that forks while its threads iterate, save and close loaders.

Each child uses loaders of its parent and new ones; one that hangs prints where and ends
with status 1. As a program: the number of forks is its argument.
"""

import asyncio
import faulthandler
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Sampler

from aioloader import DataLoader
from aioloader._workers import threads

# A wait for a thread that a child does not have would end by itself, and be missed.
threads._GRACE = threading.TIMEOUT_MAX
# Seconds that a child may take.
PATIENCE = 20.0
BATCHES = 8


class Numbers:
    """A map-style dataset that costs nothing."""

    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, index: int) -> int:
        return index


class AsyncNumbers(Numbers):
    """The same, read by coroutines."""

    async def __getitem__(self, index: int) -> int:  # type: ignore[override]
        await asyncio.sleep(0)
        return index


class Stuck(Sampler[int]):
    """A sampler that never returns: its loader's locks stay held."""

    def __init__(self) -> None:
        self.is_asked = threading.Event()

    def __len__(self) -> int:
        return 4 * BATCHES

    def __iter__(self) -> Iterator[int]:
        self.is_asked.set()
        threading.Event().wait()
        return iter(())


def iterate(loader: DataLoader[Any]) -> None:
    """Iterate and save without end."""
    while True:
        for _ in loader:
            loader.state_dict()


def iterate_async(loader: DataLoader[Any]) -> None:
    """Iterate and save without end, in a loop of this thread."""

    async def run() -> None:
        while True:
            async for _ in loader:
                loader.state_dict()

    asyncio.run(run())


def close(loader: DataLoader[Any]) -> None:
    """Begin and close without end."""
    while True:
        next(iter(loader))
        loader.close()


def use(loaders: list[DataLoader[Any]]) -> None:
    """Use what the parent's threads use as well, and loaders of our own."""
    for loader in loaders:
        loader.state_dict()
        loader.close()
    assert len(list(loaders[0])) == BATCHES
    assert len(asyncio.run(collect(loaders[1]))) == BATCHES
    assert len(list(DataLoader(Numbers(), 4))) == BATCHES
    loaders.clear()
    gc.collect()


async def collect(loader: DataLoader[Any]) -> list[Any]:
    return [batch async for batch in loader]


def forked(run: Callable[[], object]) -> int:
    """Return the exit status of a child that calls ``run``."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    try:
        run()
        os._exit(0)
    finally:
        traceback.print_exc()
        os._exit(2)


def main(forks: int) -> None:
    """Fork beside threads; write the children's statuses that are not 0."""
    torch.set_num_threads(1)
    # Import everything: a fork in the middle of an import leaves a child half of it.
    use([DataLoader(Numbers(), 4), DataLoader(AsyncNumbers(), 4)])
    stuck = Stuck()
    jobs: list[tuple[Callable[[DataLoader[Any]], None], DataLoader[Any]]] = [
        (iterate, DataLoader(Numbers(), 4, shuffle=True)),
        (iterate_async, DataLoader(AsyncNumbers(), 4, shuffle=True)),
        (iterate_async, DataLoader(Numbers(), 4)),
        (iterate, DataLoader(Numbers(), 4, num_workers=2, workers="thread")),
        (close, DataLoader(AsyncNumbers(), 4)),
        (iterate, DataLoader(Numbers(), 4, num_workers=1, persistent_workers=True)),
        (iterate, DataLoader(Numbers(), 4, sampler=stuck, num_workers=1)),
    ]
    for job, loader in jobs:
        threading.Thread(target=job, args=(loader,), daemon=True).start()
    assert stuck.is_asked.wait(PATIENCE)
    statuses = []
    for number in range(forks):
        time.sleep(number % 7 / 1000)  # threads are somewhere else each time
        statuses.append(forked(lambda: use([loader for _, loader in jobs])))
    sys.stdout.write(f"{[status for status in statuses if status]}\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
