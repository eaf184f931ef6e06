"""Indexed: what does random access to the samples of shards cost?

All contenders of a question take turns in one process, but for opening. Samples are of
100 KB and of 4 KB, in lists of 64; each epoch checks that every sample came once, and a
first one is not measured. One big block is freed before, as every training process has
freed a batch: glibc keeps freed memory from then on. Without that it returns samples of
100 KB to the kernel, and those that the loader's threads make cost 10 page faults each.

Remote: 16 tars behind a loopback server that answers after 20 to 50 ms and counts its
requests, 256 in flight. ``ObjectDataset`` reads the same bytes as objects: of unknown
size, or ``listed``, which is the cheaper request. The index is a pack. Local: the same
tars in the page cache, shuffled, beside their stream in order and beside peers, which
are left out where they are not installed. Reads: what one of them costs the loop's
thread, from a store in memory, beside the bare client; 64 at a time, each sample in a
shard of its own, so that none are merged. Opening: ten million samples in 1,000 shards,
in fresh processes; memory is that beyond what one opened shard has taken.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import uvloop

from feeds import make_store, object_dataset
from harness import (
    Contender,
    Figures,
    Limit,
    Metric,
    Options,
    Question,
    Target,
    main,
    main_in_one_process,
    measure,
)
from indexed_peers import PEERS, way_of
from indexed_server import (
    SHAPES,
    FileServer,
    body_of,
    names_of,
    number_of,
    paths_of,
    requests_of,
    tar_of,
    write,
)
from meter import Meter
from remote import BATCH, check, settle

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping

    from harness import Rounds

    Way = Callable[[], list[int]]

IN_FLIGHT = 256
DELAYS = 0.02, 0.05
OPEN = 8  # shards that a stream reads side by side
BLOCK, WINDOW = 16, 1_024


def turns(
    title: str,
    ways: Mapping[str, Way],
    count: int,
    rounds: int,
    asked: Callable[[], int] = int,
) -> Rounds:
    """Time all contenders in turn; return the figures of all rounds."""
    bytearray((32 << 20) - (1 << 16))  # freed at once: see the top
    for way in ways.values():
        check(way(), count)
    found: Rounds = {f"{title}: {name}": [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            settle()
            before = asked()
            with Meter() as meter:
                seen = way()
            check(seen, count)
            threads = {
                f"cpu:{thread}": seconds / count * 1e6
                for thread, seconds in meter.threads.items()
                if seconds / count > 1e-6
            }
            figures = {"rate": count / meter.wall, "cpu": meter.cpu / count * 1e6}
            figures["requests"] = (asked() - before) / count
            found[f"{title}: {name}"].append(figures | threads)
    return found


def loader_of(stack: contextlib.ExitStack, *args: Any, **settings: Any) -> Any:
    """Make a loader of lists that is closed with the stack."""
    from aioloader import DataLoader  # noqa: PLC0415

    loader = DataLoader(*args, BATCH, collate_fn=list, **settings)
    return stack.enter_context(contextlib.closing(loader))


def body(sample: Any) -> Any:
    return sample["bin"] if isinstance(sample, dict) else sample


def asynchronous(loader: Any, size: int) -> Way:
    async def read() -> list[int]:
        return [number_of(body(o), size) async for batch in loader for o in batch]

    return lambda: asyncio.run(read())


def synchronous(loader: Any, size: int) -> Way:
    return lambda: [number_of(body(o), size) for batch in loader for o in batch]


# -- remote ---------------------------------------------------------------------------


def remote_ways(stack: contextlib.ExitStack, url: str, label: str) -> dict[str, Way]:
    from aioloader.datasets import IndexedDataset, TarDataset  # noqa: PLC0415

    shape = SHAPES[label]
    store = make_store(f"{url}/{label.replace(' ', '%20')}")
    tars = TarDataset(names_of(shape), store=store)
    pack = tempfile.NamedTemporaryFile(suffix=".pack")  # noqa: SIM115
    path = Path(stack.enter_context(pack).name).as_uri()
    asyncio.run(IndexedDataset(tars, scan=True).save(path))

    def indexed(block: int = 0, window: int = 0) -> Any:
        dataset = IndexedDataset(tars, pack=path)
        order = {"sampler": dataset.shuffled(block, window)} if block else {}
        settings = order or {"shuffle": True}
        return loader_of(stack, dataset, concurrency=IN_FLIGHT, **settings)

    def objects(*, listed: bool) -> Any:
        found = object_dataset(url, shape.size, shape.count, listed=listed, store=store)
        return loader_of(stack, found, shuffle=True, concurrency=IN_FLIGHT)

    loaders = {
        "objects": objects(listed=False),
        "objects, listed": objects(listed=True),
        "indexed, all shuffled": indexed(),
        f"indexed, block={BLOCK}": indexed(BLOCK),
        f"indexed, block={BLOCK}, window={WINDOW}": indexed(BLOCK, WINDOW),
        f"tar stream, {OPEN} open": loader_of(
            stack, TarDataset(names_of(shape), store=store, interleave=OPEN)
        ),
    }
    return {name: asynchronous(one, shape.size) for name, one in loaders.items()}


def remote(rounds: int) -> Rounds:
    found: Rounds = {}
    with tempfile.TemporaryDirectory() as folder:
        write(folder)
        for label, shape in SHAPES.items():
            with FileServer(folder, *DELAYS) as server, contextlib.ExitStack() as stack:
                ways = remote_ways(stack, server.url, label)
                asked = partial(requests_of, server.url)
                found |= turns(label, ways, shape.count, rounds, asked)
    return found


FULL = "100 KB: indexed, all shuffled"
BLOCKS = f"100 KB: indexed, block={BLOCK}, window={WINDOW}"

REMOTE = Question(
    name="indexed_remote",
    text="What do samples of remote shards cost that are read one by one?",
    contenders={
        f"{label}: {name}": Contender(dict, f"{label}: objects")
        for label in SHAPES
        for name in (
            "objects, listed",
            "indexed, all shuffled",
            f"indexed, block={BLOCK}",
            f"indexed, block={BLOCK}, window={WINDOW}",
            f"tar stream, {OPEN} open",
        )
    },
    metrics=[
        Metric("rate", "samples/s"),
        Metric("cpu", "CPU us/sample", higher=False),
        Metric("requests", "requests/sample", ".3f", higher=False),
    ],
    targets=[
        Target(FULL, ["100 KB: objects"], 0.95),
        Target(FULL, ["100 KB: objects"], 1 / 1.15, 1),
        Target(BLOCKS, [FULL], 1.5),
    ],
    limits=[Limit(BLOCKS, "requests", 0.08)],
)


# -- local ----------------------------------------------------------------------------


def local_ways(
    stack: contextlib.ExitStack, folder: str, label: str
) -> Iterator[tuple[str, Way]]:
    from aioloader.datasets import IndexedDataset, TarDataset  # noqa: PLC0415

    tars, size = TarDataset(paths_of(folder, label)), SHAPES[label].size
    dataset = IndexedDataset(tars, scan=True)
    yield "tar stream", synchronous(loader_of(stack, tars), size)
    yield "indexed", synchronous(loader_of(stack, dataset, shuffle=True), size)
    for name in PEERS:
        try:
            yield name, way_of(name, folder, label)
        except (ImportError, StopIteration) as error:
            print(f"{label}: {name}: left out: {error!r}", file=sys.stderr)


def local(rounds: int) -> Rounds:
    found: Rounds = {}
    with tempfile.TemporaryDirectory() as folder:
        write(folder)
        for label, shape in SHAPES.items():
            with contextlib.ExitStack() as stack:
                ways = dict(local_ways(stack, folder, label))
                found |= turns(label, ways, shape.count, rounds)
    return found


LOCAL = Question(
    name="indexed_local",
    text="What do shuffled samples of local shards cost, beside a stream in order?",
    contenders={
        f"{label}: {name}": Contender(dict, f"{label}: tar stream")
        for label in SHAPES
        for name in ("indexed", *PEERS)
    },
    metrics=[
        Metric("cpu", "CPU us/sample", ",.1f", higher=False),
        Metric("rate", "samples/s"),
    ],
    targets=[
        Target("100 KB: indexed", ["100 KB: tar stream"], 2.0),
        Target("4 KB: indexed", ["4 KB: tar stream"], 1.0),
        Target("100 KB: indexed", ["100 KB: wids"], 1.0),
    ],
)


# -- one read -------------------------------------------------------------------------

SINGLES = 1_024


async def loop_us(read: Callable[[int], Awaitable[Any]], size: int) -> Figures:
    """Read all samples in random order, 64 at a time: the time of this thread."""
    order = [*range(SINGLES)] * 4
    Random(1).shuffle(order)
    left = iter(order)

    async def member() -> None:
        for index in left:
            assert number_of(body(await read(index)), size) == index

    settle()
    began = time.thread_time()
    await asyncio.gather(*(member() for _ in range(BATCH)))
    return {"loop": (time.thread_time() - began) / len(order) * 1e6}


def reads_of(size: int) -> dict[str, Callable[[int], Awaitable[Any]]]:
    import obstore  # noqa: PLC0415
    from obstore.store import MemoryStore  # noqa: PLC0415

    from aioloader.datasets import IndexedDataset, TarDataset  # noqa: PLC0415

    objects, shards = MemoryStore(), MemoryStore()
    names = [f"{number:05}" for number in range(SINGLES)]
    for number, name in enumerate(names):
        objects.put(name, body_of(number, size))
        shards.put(f"{name}.tar", tar_of(number, 1, size))
    indexed = IndexedDataset(
        TarDataset([f"{name}.tar" for name in names], store=shards), scan=True
    )
    known = [
        object_dataset("", size, SINGLES, listed=listed, store=objects)
        for listed in (False, True)
    ]

    async def get(index: int) -> Any:
        found = await obstore.get_async(objects, names[index])
        return await found.bytes_async()

    return {
        "bare get": get,
        "bare range": lambda index: obstore.get_range_async(
            objects, names[index], start=0, length=size
        ),
        "objects": known[0].__getitem__,
        "objects, listed": known[1].__getitem__,
        "indexed": indexed.__getitem__,
    }


def reads(rounds: int) -> Rounds:
    found: Rounds = {}

    async def measure_all() -> None:
        for label, shape in SHAPES.items():
            ways = await asyncio.to_thread(reads_of, shape.size)
            for read in ways.values():
                await loop_us(read, shape.size)
            for _ in range(rounds):
                for name, read in ways.items():
                    figures = await loop_us(read, shape.size)
                    found.setdefault(f"{label}: {name}", []).append(figures)

    uvloop.run(measure_all())
    return found


READS = Question(
    name="indexed_reads",
    text="What does a read cost the loop's thread, from a store in memory?",
    contenders={
        f"{label}: {name}": Contender(dict, f"{label}: bare get")
        for label in SHAPES
        for name in ("objects", "objects, listed", "indexed")
    },
    metrics=[Metric("loop", "us/read", ",.1f", higher=False)],
)


# -- opening --------------------------------------------------------------------------

SHARDS, PER_SHARD, STEP = 1_000, 10_000, 10_240
ARRAY_MB = SHARDS * (PER_SHARD + 1) * 4 / 1e6
INDEX_DELAY = 0.03


def tars_of(folder: str, shards: int) -> Any:
    from aioloader.datasets import TarDataset  # noqa: PLC0415

    return TarDataset([f"{folder}/{shard:04}.tar" for shard in range(shards)])


@contextlib.contextmanager
def opening_folder() -> Iterator[str]:
    """Write the indices of shards that are only holes, and packs; run the server."""
    from aioloader.datasets import IndexedDataset  # noqa: PLC0415

    numbers = np.arange(PER_SHARD + 1, dtype="<u8") * STEP
    with tempfile.TemporaryDirectory() as folder:
        for shard in range(SHARDS):
            path = Path(folder, f"{shard:04}.tar")
            with path.open("wb") as file:
                file.truncate(PER_SHARD * STEP + 1_024)
            path.with_name(f"{path.name}.idx").write_bytes(numbers.tobytes())
        for shards in (1, SHARDS):
            dataset = IndexedDataset(tars_of(folder, shards))
            asyncio.run(dataset.save(f"{folder}/{shards}.pack"))
        with FileServer(folder, INDEX_DELAY, INDEX_DELAY) as server:
            yield json.dumps({"folder": folder, "url": server.url})


def of_pack(folder: str, url: str, shards: int) -> Any:  # noqa: ARG001
    from aioloader.datasets import IndexedDataset  # noqa: PLC0415

    return IndexedDataset(tars_of(folder, shards), pack=f"{folder}/{shards}.pack")


def of_indices(folder: str, url: str, shards: int) -> Any:  # noqa: ARG001
    from aioloader.datasets import IndexedDataset  # noqa: PLC0415

    return IndexedDataset(tars_of(url, shards))


def memory(name: str) -> float:
    """Return a line of this process's status, in megabytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1_024 / 1e6


def opened(make: Callable[[str, str, int], Any], options: Options) -> Figures:
    places = json.loads(options.url)
    assert len(make(**places, shards=1)) == PER_SHARD  # imports, the client
    settle()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    resident, private = memory("VmRSS"), memory("RssAnon")
    start = time.perf_counter()
    with Meter() as meter:
        dataset = make(**places, shards=SHARDS)
    seconds = time.perf_counter() - start
    assert len(dataset) == SHARDS * PER_SHARD
    return {
        "seconds": seconds,
        "cpu": meter.cpu,
        "private": memory("RssAnon") - private,
        "peak": memory("VmHWM") - resident,
    }


OPENING = Question(
    name="indexed_opening",
    text="What does it take to open ten million samples in 1,000 shards?",
    contenders={
        "a pack": Contender(partial(opened, of_pack), ""),
        "loose .idx over HTTP": Contender(partial(opened, of_indices), "a pack"),
    },
    metrics=[
        Metric("seconds", "s", ",.3f", higher=False),
        Metric("cpu", "CPU s", ",.3f", higher=False),
        Metric("private", "MB private", ",.1f", higher=False),
        Metric("peak", "MB at most", ",.1f", higher=False),
    ],
    limits=[
        Limit("a pack", "seconds", 0.1),
        Limit("a pack", "private", 5),
        Limit("loose .idx over HTTP", "seconds", 3),
        Limit("loose .idx over HTTP", "peak", 2 * ARRAY_MB),
    ],
    serve=opening_folder,
)


def opening(rounds: int) -> Rounds:
    args = argparse.Namespace(rounds=rounds, quick=False)
    return measure(OPENING, Path(__file__), [*OPENING.contenders], args)


if __name__ == "__main__":
    if "--contender" in sys.argv:
        main(OPENING)
    else:
        main_in_one_process(
            {REMOTE: remote, LOCAL: local, READS: reads, OPENING: opening}
        )
