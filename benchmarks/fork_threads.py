"""Does a loader that forks survive alongside threads?

A process with 20 busy threads (they hash, log, allocate, and draw from numpy, torch and
``random``), a uvloop with constant socket traffic, and an obstore client in use,
iterates 200 epochs of a sync dataset with two forked workers, which draw and log, too.
After each epoch the loop's sockets must still work. A lock that a thread holds at the
fork stays locked in the child: torch's own loader hangs there. A watchdog process gives
it 40 seconds per epoch, prints where its children hang, and kills it.
"""

from __future__ import annotations

import asyncio
import faulthandler
import hashlib
import logging
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from feeds import make_store
from harness import Contender, Figures, Limit, Metric, Options, Question, main
from meter import descendants
from server import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Callable

EPOCHS = 200
BATCHES = 8
BATCH = 8
THREADS = 20
PAIRS = 4
SECONDS = 40.0
DUMP = signal.SIGUSR1
LOGGER = logging.getLogger("busy")


# -- the process --------------------------------------------------------------------


class Drawing:
    """A dataset whose workers take the locks that threads take in the parent."""

    def __len__(self) -> int:
        return BATCHES * BATCH

    def __getitem__(self, index: int) -> Any:
        LOGGER.info("sample %d", index)
        hashlib.sha256(bytes(4096)).digest()
        return index, torch.rand(4), np.random.rand(4), random.random()


def hash_() -> None:
    hashlib.sha256(bytes(1 << 16)).digest()


def log() -> None:
    LOGGER.info("busy")


def draw_from_numpy() -> None:
    np.random.rand(2000)


def draw_from_torch() -> None:
    torch.rand(2000)


def draw_from_random() -> None:
    random.gauss(0, 1)


def allocate() -> None:
    blocks = [bytearray(1 << size) for size in range(8, 20)]
    del blocks


ACTS = (hash_, log, draw_from_numpy, draw_from_torch, draw_from_random, allocate)


def keep_busy(act: Callable[[], None]) -> None:
    """Repeat it forever, without a pause."""
    while True:
        act()


class Loop:
    """A uvloop in a thread, with connected sockets, and an obstore client."""

    def __init__(self, url: str) -> None:
        self.talks = self.gets = 0
        self._url = url
        self._is_up = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()
        self._is_up.wait()

    def hears(self) -> bool:
        """Return whether traffic and reads continue."""
        return asyncio.run_coroutine_threadsafe(self._progress(), self.loop).result(30)

    def _run(self) -> None:
        import uvloop  # noqa: PLC0415

        uvloop.run(self._live())

    async def _live(self) -> None:
        self.loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._echo, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        talks = [self._talk(port) for _ in range(PAIRS)]
        self._is_up.set()
        await asyncio.gather(self._read(), *talks)

    @staticmethod
    async def _echo(reader: Any, writer: Any) -> None:
        while line := await reader.readline():
            writer.write(line)

    async def _talk(self, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while True:
            writer.write(b"%d\n" % self.talks)
            await reader.readline()
            self.talks += 1
            await asyncio.sleep(0.001)

    async def _read(self) -> None:
        store = make_store(self._url)
        while True:
            await store.get_range_async("0", start=0, length=1024)
            self.gets += 1

    async def _progress(self) -> bool:
        talks, gets = self.talks, self.gets
        until = time.monotonic() + 20
        while self.talks < talks + PAIRS or self.gets <= gets:
            if time.monotonic() > until:
                return False
            await asyncio.sleep(0.001)
        return True


def end_with_the_watchdog() -> None:
    """Wait until the parent of this process has ended, and exit."""
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)


def live(kind: str, epochs: int, url: str) -> None:
    """Run the process: print a line per epoch, its milliseconds."""
    threading.Thread(target=end_with_the_watchdog, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(os.environ["DUMP_FILE"]).open("a")  # noqa: SIM115  (for life)
        faulthandler.register(DUMP, dump)  # forked children inherit it
        LOGGER.setLevel(logging.INFO)
        LOGGER.propagate = False
        LOGGER.addHandler(logging.FileHandler(Path(folder, "log")))
        loop = Loop(url)
        for number in range(THREADS):
            act = ACTS[number % len(ACTS)]
            threading.Thread(target=keep_busy, args=(act,), daemon=True).start()
        loader = make(kind)
        for _ in range(epochs):
            start = time.perf_counter()
            found = [i for batch in loader for i in batch[0].tolist()]
            took = (time.perf_counter() - start) * 1e3
            if found != list(range(BATCHES * BATCH)):
                raise RuntimeError(f"wrong samples: {found}")
            print(took if loop.hears() else "deaf", flush=True)
        os._exit(0)  # the threads never end


def make(kind: str) -> Any:
    """Make the loader, as everyone writes it."""
    if kind == "torch":
        return torch.utils.data.DataLoader(Drawing(), BATCH, num_workers=2)  # type: ignore[arg-type]
    import aioloader  # noqa: PLC0415

    return aioloader.DataLoader(
        Drawing(), BATCH, num_workers=2, multiprocessing_context="fork"
    )


# -- the watchdog ---------------------------------------------------------------


def watch(kind: str, epochs: int) -> Figures:
    """Run the process; if an epoch takes too long, kill it and print where it hangs."""
    took: list[float] = []
    deaf = 0
    with (
        ServerProcess(4, 4096, 0.002) as server,
        tempfile.NamedTemporaryFile("r") as dump,
    ):
        process = subprocess.Popen(
            [sys.executable, __file__, "--live", kind, str(epochs), server.url],
            stdin=subprocess.PIPE,  # its end is the end of the process
            stdout=subprocess.PIPE,
            bufsize=0,  # what has been read is what select does not see
            start_new_session=True,
            env=os.environ | {"DUMP_FILE": dump.name},
        )
        output = process.stdout
        if output is None:
            raise RuntimeError("no pipe")
        while select.select([output], [], [], SECONDS)[0]:
            line = output.readline().decode().strip()
            if not line:
                break
            deaf += line == "deaf"
            took += [] if line == "deaf" else [float(line)]
        has_hung = process.poll() is None and len(took) + deaf < epochs
        if has_hung:
            report(kind, len(took), process.pid, dump.name)
            os.killpg(process.pid, signal.SIGKILL)
        if process.wait() and not has_hung:
            raise RuntimeError(f"it ended with {process.returncode}")
        output.close()
        if process.stdin is not None:
            process.stdin.close()
    return {
        "epochs": len(took) + deaf,
        "hung": has_hung,
        "deaf": deaf,
        "ms": statistics.median(took or [0.0]),
    }


def report(kind: str, epochs: int, pid: int, dump: str) -> None:
    """Print where the children of a hung process are."""
    children = descendants(pid)
    for child in children:
        os.kill(child, DUMP)
    time.sleep(1)
    print(f"{kind} hangs after {epochs} epochs; its children are at", file=sys.stderr)
    lines = Path(dump).read_text().splitlines()
    shown = [lines[k + 1] for k, line in enumerate(lines[:-1]) if line[:7] == "Current"]
    for line in dict.fromkeys(shown):
        print(line, file=sys.stderr)


def run(kind: str, options: Options) -> Figures:
    return watch(kind, 15 if options.quick else EPOCHS)


QUESTION = Question(
    name="fork_threads",
    text=f"Does a loader that forks survive beside threads? {EPOCHS} epochs",
    contenders={
        kind: Contender(partial(run, kind), against="aioloader")
        for kind in ("aioloader", "torch")
    },
    metrics=[
        Metric("epochs", "epochs"),
        Metric("hung", "hung", ".0f", higher=False),
        Metric("deaf", "loop deaf", ".0f", higher=False),
        Metric("ms", "ms per epoch", ",.1f", higher=False),
    ],
    limits=[Limit("aioloader", "hung", 0), Limit("aioloader", "deaf", 0)],
    rounds=1,
    seconds=1800.0,
)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--live"]:
        live(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        main(QUESTION)
