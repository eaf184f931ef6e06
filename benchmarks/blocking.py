"""Blocking step: is the next batch ready after a step that blocks its loop?

The objects of ``latency.py``, 100 batches of them, and a consumer that does
``time.sleep(0.02)`` per batch, as a training step on the CPU blocks its event loop. The
share of wall time that the step waited is counted from the first request.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from feeds import GatheredObjects, aioloader_feed, spdl_settings, torch_feed
from harness import Contender, Figures, Limit, Metric, Options, Question, Target, main
from remote import Plan, serve, travel

if TYPE_CHECKING:
    from remote import MakeFeed

OBJECTS = 6_400
STEP = 0.02
REFERENCE = "aioloader listed 256"


def fed(make: MakeFeed, *, extra: bool = False) -> Contender:
    def run(options: Options) -> Figures:
        measured = OBJECTS // 5 if options.quick else OBJECTS
        figures = travel(make, Plan(512, measured, STEP), options.url)
        return figures | {"waited": figures["waited"] * 100}

    return Contender(run, against=REFERENCE, extra=extra)


def own() -> dict[str, Contender]:
    feeds = {
        "128": aioloader_feed(128),
        "256": aioloader_feed(256),
        "for 256": aioloader_feed(256, asynchronous=False),
        "listed 128": aioloader_feed(128, listed=True),
        "listed 256": aioloader_feed(256, listed=True),
    }
    extra = {
        "listed 512": aioloader_feed(512, listed=True),
        "listed 128 ahead 8": aioloader_feed(128, listed=True, prefetch_factor=8),
        "listed 256 ahead 8": aioloader_feed(256, listed=True, prefetch_factor=8),
    }
    return {
        f"aioloader {name}": fed(feed, extra=name in extra)
        for name, feed in (feeds | extra).items()
    }


def rivals() -> dict[str, Contender]:
    gathered = {
        f"torch gather {workers} workers": fed(
            torch_feed(GatheredObjects, workers), extra=workers not in {4, 8}
        )
        for workers in (2, 4, 6, 8)
    }
    shown = {"plain 256", "lean 128 recycled", "lean batches 2 recycled"}
    return gathered | {
        f"SPDL {name}": fed(setting, extra=name not in shown)
        for name, setting in spdl_settings().items()
    }


RIVALS = rivals()

QUESTION = Question(
    name="blocking",
    text="A step of 20 ms blocks its loop for each batch of 64: does it wait for data?",
    contenders=own() | RIVALS,
    metrics=[
        Metric("wall", "wall s", ".2f", higher=False),
        Metric("waited", "waited %", ".1f", higher=False),
        Metric("first_warm", "first batch, latencies", ".2f", higher=False),
        Metric("cpu", "CPU us/object", higher=False),
        Metric("rss_mb", "MB", higher=False),
        Metric("worker_rss_mb", "MB/worker", higher=False),
    ],
    targets=[Target(REFERENCE, [rival], 1.0) for rival in RIVALS],
    limits=[Limit(f"aioloader {n}", "waited", 10) for n in (128, 256)],
    serve=partial(serve, OBJECTS),
)

if __name__ == "__main__":
    main(QUESTION)
