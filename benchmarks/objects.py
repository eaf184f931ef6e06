"""Objects: what does reading whole objects cost compared with the bare client?

Objects of 4 KB, 100 KB and 8 MB, 16 and 128 in flight, in lists of 64, from a loopback
server that answers after 10 ms. The limit is coroutines around the same client that
pull the next key and keep nothing: whole objects (``get``), or ranges of known length,
which is the cheaper request (``range``); with ``--all`` also with the last 64 kept, as
a batch keeps them (``held``), so memory is not reused at once. The dataset gets only
keys, or a listing with sizes (``listed``; the server itself lists nothing). A warm-up
epoch with an eighth of the objects opens the connections; each epoch checks that every
object came once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import uvloop

from feeds import Window, make_store, name_of, object_dataset
from harness import Contender, Figures, Metric, Options, Question, Target, main
from meter import Meter
from remote import BATCH, check, settle
from server import HEADER_BYTES, ServerProcess

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Iterator

LATENCY = 0.01
# bytes of an object, and objects in the measured epoch
SIZES = {
    "4 KB": (4_096, 16_384),
    "100 KB": (102_400, 4_096),
    "8 MB": (8 << 20, 256),
}
FLIGHTS = (16, 128)
# reads that many objects and returns their numbers
Read = Callable[[int], list[int]]


def number_of(body: Any, size: int) -> int:
    """Read the number of an object, and check that it is whole."""
    view = memoryview(body)
    assert len(view) == size
    return int.from_bytes(view[:HEADER_BYTES], "little")


def timed(read: Read, count: int, *, quick: bool) -> Figures:
    """Read an eighth, and then all."""
    check(read(count // 8), count // 8)
    settle()
    count = max(count // 4, 2 * BATCH) if quick else count
    with Meter() as meter:
        seen = read(count)
    check(seen, count)
    return {
        "objects": count / meter.wall,
        "cpu": meter.cpu / count * 1e6,
        **{f"cpu:{name}": cpu / count * 1e6 for name, cpu in meter.threads.items()},
    }


async def crew(
    store: Any, count: int, size: int, flights: int, *, ranged: bool, held: int
) -> list[int]:
    """Read ``count`` objects with the bare client, and keep the last ones."""
    import obstore  # noqa: PLC0415

    left = iter(range(count))
    seen: list[int] = []
    kept: deque[Any] = deque(maxlen=held)

    async def whole(key: str) -> Any:
        return await (await obstore.get_async(store, key)).bytes_async()

    async def part(key: str) -> Any:
        return await obstore.get_range_async(store, key, start=0, length=size)

    async def member() -> None:
        get = part if ranged else whole
        for index in left:
            body = await get(name_of(index))
            kept.append(body)
            seen.append(number_of(body, size))

    await asyncio.gather(*(member() for _ in range(flights)))
    return seen


def bare(
    label: str, flights: int, *, ranged: bool, held: int = 0, extra: bool = False
) -> Contender:
    size, count = SIZES[label]

    def run(options: Options) -> Figures:
        store = make_store(json.loads(options.url)[label])
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:

            def read(count: int) -> list[int]:
                reading = crew(store, count, size, flights, ranged=ranged, held=held)
                return runner.run(reading)

            return timed(read, count, quick=options.quick)

    return Contender(run, "", extra)


def own(label: str, flights: int, *, listed: bool, asynchronous: bool) -> Contender:
    size, count = SIZES[label]

    def run(options: Options) -> Figures:
        import aioloader  # noqa: PLC0415

        window = Window()
        loader: Any = aioloader.DataLoader(
            object_dataset(json.loads(options.url)[label], size, count, listed=listed),
            BATCH,
            sampler=window,
            collate_fn=list,
            concurrency=flights,
        )

        def read(count: int) -> list[int]:
            window.count = count
            if asynchronous:
                return asyncio.run(gather(loader, size))
            return [number_of(body, size) for batch in loader for body in batch]

        with contextlib.closing(loader):
            return timed(read, count, quick=options.quick)

    return Contender(
        run, f"{label}: bare {kind(listed)} {flights}", extra=not asynchronous
    )


async def gather(batches: AsyncIterable[list[Any]], size: int) -> list[int]:
    return [number_of(body, size) async for batch in batches for body in batch]


def kind(ranged: bool) -> str:  # noqa: FBT001
    return "range" if ranged else "get"


def contenders(label: str, flights: int) -> dict[str, Contender]:
    start, case = f"{label}: ", partial(own, label, flights)
    return {
        f"{start}bare get {flights}": bare(label, flights, ranged=False),
        f"{start}bare range {flights}": bare(label, flights, ranged=True),
        f"{start}bare get held {flights}": bare(
            label, flights, ranged=False, held=BATCH, extra=True
        ),
        f"{start}aioloader {flights}": case(listed=False, asynchronous=True),
        f"{start}aioloader listed {flights}": case(listed=True, asynchronous=True),
        f"{start}aioloader for {flights}": case(listed=False, asynchronous=False),
        f"{start}aioloader listed for {flights}": case(listed=True, asynchronous=False),
    }


def targets(label: str, flights: int) -> list[Target]:
    return [
        Target(
            f"{label}: aioloader{' listed' * listed} {flights}",
            [f"{label}: bare {kind(listed)} {flights}"],
            0.9,
        )
        for listed in (False, True)
    ]


@contextlib.contextmanager
def serve() -> Iterator[str]:
    """Run a server for each size; return their addresses by label, as JSON."""
    with contextlib.ExitStack() as stack:
        servers = {
            label: stack.enter_context(ServerProcess(count, size, LATENCY))
            for label, (size, count) in SIZES.items()
        }
        yield json.dumps({label: server.url for label, server in servers.items()})


CASES = [(label, flights) for label in SIZES for flights in FLIGHTS]

QUESTION = Question(
    name="objects",
    text="What do whole objects of 4 KB to 8 MB cost beside the bare client?",
    contenders={k: v for case in CASES for k, v in contenders(*case).items()},
    metrics=[
        Metric("objects", "objects/s"),
        Metric("cpu", "CPU us/object", higher=False),
        Metric("rss_mb", "MB", higher=False),
    ],
    targets=[target for case in CASES for target in targets(*case)],
    serve=serve,
)

if __name__ == "__main__":
    main(QUESTION)
