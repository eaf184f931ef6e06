"""Latency: how many small remote objects a second, and how soon the first batch?

2,000 objects of 100 KB from a loopback server that adds 30 ms to every GET, stacked
in batches of 64. The limit is the bare client with the same number of GETs in flight.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import uvloop

from feeds import (
    GatheredObjects,
    PooledObjects,
    aioloader_feed,
    make_store,
    spdl_settings,
    torch_feed,
)
from harness import Contender, Figures, Limit, Metric, Options, Question, Target, main
from meter import Meter
from remote import BATCH, OBJECT_BYTES, Plan, check, rates, serve, settle, travel

if TYPE_CHECKING:
    from remote import MakeFeed

OBJECTS = 2_000
FULL = Plan(opening=512, measured=OBJECTS)


class Crew:
    """The limit: coroutines that pull the next key, on uvloop, and no batches."""

    def __init__(self, url: str, concurrency: int, *, ranged: bool) -> None:
        import obstore  # noqa: PLC0415

        self._obstore = obstore
        self._store = make_store(url)
        self._concurrency = concurrency
        self._get = self._get_range if ranged else self._get_whole

    async def _get_whole(self, key: str) -> Any:
        found = await self._obstore.get_async(self._store, key)
        return await found.bytes_async()

    async def _get_range(self, key: str) -> Any:
        return await self._obstore.get_range_async(
            self._store, key, start=0, length=OBJECT_BYTES
        )

    async def epoch(self, count: int) -> float:
        """Read ``count`` objects; return the seconds until the first 64 were here."""
        start = time.perf_counter()
        left = iter(range(count))
        seen: list[int] = []
        first = 0.0

        async def member() -> None:
            nonlocal first
            for index in left:
                body = await self._get(str(index))
                assert len(body) == OBJECT_BYTES
                seen.append(int.from_bytes(memoryview(body)[:8], "little"))
                if len(seen) == BATCH:
                    first = time.perf_counter() - start

        await asyncio.gather(*(member() for _ in range(self._concurrency)))
        check(seen, count)
        return first


async def travel_bare(crew: Crew) -> Figures:
    await crew.epoch(1)
    settle()
    opening = await crew.epoch(FULL.opening)
    settle()
    with Meter() as meter:
        warm = await crew.epoch(FULL.measured)
    return rates(FULL.measured, meter, opening, warm)


def bare(concurrency: int, *, ranged: bool = False, extra: bool = False) -> Contender:
    def run(options: Options) -> Figures:
        return uvloop.run(travel_bare(Crew(options.url, concurrency, ranged=ranged)))

    kind = "range" if ranged else "get"
    against = f"bare {kind} {concurrency}"
    return Contender(run, against=against, extra=extra)


def fed(
    make: MakeFeed,
    against: str = "bare range 256",
    *,
    plan: Plan = FULL,
    extra: bool = False,
) -> Contender:
    def run(options: Options) -> Figures:
        measured = max(BATCH, plan.measured // 5) if options.quick else plan.measured
        return travel(make, replace(plan, measured=measured), options.url)

    return Contender(run, against=against, extra=extra)


def bare_contenders() -> dict[str, Contender]:
    shown = {("get", 64), *((kind, n) for kind in ("get", "range") for n in (128, 256))}
    return {
        f"bare {kind} {n}": bare(
            n, ranged=kind == "range", extra=(kind, n) not in shown
        )
        for kind in ("get", "range")
        for n in (64, 128, 256, 512)
    }


def own_contenders() -> dict[str, Contender]:
    whole = {
        f"aioloader {n}": fed(aioloader_feed(n), f"bare get {n}", extra=n == 512)
        for n in (64, 128, 256, 512)
    }
    sync = {
        f"aioloader for {n}": fed(
            aioloader_feed(n, asynchronous=False), f"bare get {n}", extra=n != 256
        )
        for n in (64, 128, 256)
    }
    listed = {
        f"aioloader listed {n}": fed(
            aioloader_feed(n, listed=True), f"bare range {n}", extra=n in {64, 512}
        )
        for n in (64, 128, 256, 512)
    }
    return whole | sync | listed


def torch_contenders() -> dict[str, Contender]:
    # one GET at a time takes minutes: fewer workers get fewer objects
    counts = {0: 128, 2: 256, 8: 1_024, 32: OBJECTS}
    pooled = {
        f"torch {workers} workers": fed(
            torch_feed(PooledObjects, workers),
            plan=Plan(opening=min(64 * max(workers, 1), 512), measured=count),
        )
        for workers, count in counts.items()
    }
    gathered = {
        f"torch gather {workers} workers": fed(
            torch_feed(GatheredObjects, workers),
            plan=Plan(opening=max(512, 64 * workers), measured=OBJECTS),
            extra=workers not in {4, 8},
        )
        for workers in (2, 4, 6, 8, 16)
    }
    return pooled | gathered


def spdl_contenders() -> dict[str, Contender]:
    shown = {
        "plain 256",
        "lean 256 recycled",
        "lean batches 4 recycled",
        "lean batches ordered 3 recycled",
        "lean batches ordered 4 recycled",
    }
    return {
        f"SPDL {name}": fed(setting, "bare range 256", extra=name not in shown)
        for name, setting in spdl_settings().items()
    }


CONTENDERS = (
    bare_contenders() | own_contenders() | torch_contenders() | spdl_contenders()
)


def targets() -> list[Target]:
    best = "aioloader listed 256"
    spdl = [name for name in CONTENDERS if name.startswith("SPDL")]
    rivals = (
        [name for name in CONTENDERS if name.startswith("torch gather")],
        [name for name in spdl if "batches" not in name],
        [name for name in spdl if "batches" in name],
    )
    return [
        *(Target(f"aioloader {n}", [f"bare get {n}"], 0.85) for n in (128, 256)),
        *(
            Target(f"aioloader listed {n}", [f"bare range {n}"], 0.85)
            for n in (128, 256)
        ),
        Target("aioloader 256", ["torch 8 workers"], 15),
        *(Target(best, names, 2) for names in rivals),
    ]


QUESTION = Question(
    name="latency",
    text="How fast are 2,000 remote objects of 100 KB, at 30 ms per GET?",
    contenders=CONTENDERS,
    metrics=[
        Metric("objects", "objects/s"),
        Metric("first", "first batch, latencies", ".2f", higher=False),
        Metric("first_warm", "connections open", ".2f", higher=False),
        Metric("cpu", "CPU us/object", higher=False),
        Metric("rss_mb", "MB", higher=False),
        Metric("worker_rss_mb", "MB/worker", higher=False),
    ],
    targets=targets(),
    limits=[Limit(f"aioloader {n}", "first", 3) for n in (64, 128, 256)],
    serve=partial(serve, OBJECTS),
)

if __name__ == "__main__":
    main(QUESTION)
