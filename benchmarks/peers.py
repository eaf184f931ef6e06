"""Peers: who reads a shuffled epoch of 20 KB samples from local shards fastest?

19,968 samples of 20,000 bytes, in the format of each loader (``peer_formats.py``), in
the page cache; shuffled, as uint8 batches of 64, all of which are checked. First every
the page cache; shuffled, as uint8 batches of 64, all of which are checked. First every
setting of ``SWEEP`` runs once; then the best one of each loader, by samples/s, runs in
all rounds. A first epoch gives the time from making the loader to its first batch, with
all

Run by the Python of ``.venv-peers`` (``make .venv-peers/.ready``): the pins of these
packages do not fit the project's own environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import peer_feeds as feeds
from harness import (
    Contender,
    Figures,
    Metric,
    Options,
    Question,
    Rounds,
    choose,
    keep,
    main,
    measure,
    medians,
    parse,
    table,
)
from meter import Meter
from peer_formats import SAMPLES, numbers_of
from remote import check

if TYPE_CHECKING:
    from collections.abc import Iterator

SECONDS = 1.0
Make = Callable[..., Any]
Settings = dict[str, Any]


def grid(**values: list[Any]) -> list[Settings]:
    """Return all combinations."""
    return [
        dict(zip(values, chosen, strict=True))
        for chosen in itertools.product(*values.values())
    ]


OURS = [
    {},
    {"is_async": True},
    {"num_workers": 2, "persistent_workers": True, "fetch": "workers"},
    {"num_workers": 2, "workers": "thread"},
]
WORKERS = [{}, *grid(workers=[1, 2]), {"workers": 2, "ahead": 8}]
SWEEP: dict[str, tuple[Make, list[Settings]]] = {
    "aioloader tar": (partial(feeds.ours_stream, kind="tar"), OURS),
    "aioloader MDS": (partial(feeds.ours_stream, kind="mds"), OURS),
    "aioloader packed": (
        feeds.ours_packed,
        [
            {},
            {"num_workers": 2, "persistent_workers": True},
            {"num_workers": 2, "workers": "thread"},
        ],
    ),
    "torch packed": (feeds.torchs, WORKERS),
    "torchdata stateful packed": (feeds.stateful, grid(workers=[0, 2])),
    "torchdata nodes packed": (
        feeds.nodes,
        [*grid(threads=[1, 2, 4], whole=[True]), {"threads": 2, "whole": False}],
    ),
    "SPDL packed": (feeds.spdl, grid(threads=[1, 2, 4])),
    "WebDataset tar": (feeds.webdataset, WORKERS),
    "LitData": (feeds.litdata, WORKERS),
    "Mosaic Streaming MDS": (
        feeds.mosaics,
        [*WORKERS, {"algorithm": "py1br"}, {"algorithm": "py1s"}],
    ),
    "Grain ArrayRecord": (
        feeds.grains,
        [
            *grid(threads=[0, 1, 2, 4, 16]),
            {"threads": 2, "buffer": 64},
            *grid(workers=[1, 2], threads=[1]),
        ],
    ),
    "tf.data TFRecord": (
        feeds.tensorflow,
        [*grid(by_batch=[True, False]), *grid(calls=[1, 2], threads=[0, 2])],
    ),
    "Ray Data Parquet": (
        feeds.ray_data,
        [*grid(ahead=[1, 4, 16]), {"ahead": 4, "form": "numpy"}],
    ),
}


def words(settings: Settings) -> str:
    """Spell a setting for a name."""
    return ", ".join(f"{key}={value}" for key, value in settings.items()) or "default"


async def adrain(batches: AsyncIterable[Any], seen: list[int]) -> None:
    async for batch in batches:
        seen += numbers_of(batch)


def epoch(batches: Any) -> None:
    """Read an epoch, and check that each sample came once, in no sorted order."""
    seen: list[int] = []
    if isinstance(batches, AsyncIterable):
        asyncio.run(adrain(batches, seen))
    else:
        for batch in batches:
            seen += numbers_of(batch)
    check(seen, SAMPLES)
    if seen == sorted(seen):
        raise RuntimeError("the epoch is not shuffled")


async def afirst(batches: AsyncIterable[Any]) -> None:
    iterator = aiter(batches)
    await anext(iterator)
    if aclose := getattr(iterator, "aclose", None):
        await aclose()


def first(batches: Any) -> Any:
    """Take one batch; return the iterator, which is kept until the clock stops."""
    if isinstance(batches, AsyncIterable):
        return asyncio.run(afirst(batches))
    iterator = iter(batches)
    next(iterator)
    return iterator


def run(name: str, make: Make, settings: Settings, options: Options) -> Figures:
    feeds.import_peer(name)
    gc.collect()
    with contextlib.chdir(options.url):
        start = time.perf_counter()
        batches = make(options.url, **settings)
        iterator = first(batches)
        waited = time.perf_counter() - start
        if iterator is not None:
            deque(iterator, maxlen=0)  # ends the epoch, whose workers live on
        del iterator
        gc.collect()
        epochs, start = 0, time.perf_counter()
        with Meter() as meter:
            while not epochs or time.perf_counter() - start < SECONDS:
                epoch(batches)
                epochs += 1
                if options.quick:
                    break
        getattr(batches, "close", int)()
    count = epochs * SAMPLES
    return {
        "rate": count / meter.wall,
        "cpu": meter.cpu / epochs,
        "first_ms": waited * 1e3,
        "cores": meter.cpu / meter.wall,
    }


@contextlib.contextmanager
def serve() -> Iterator[str]:
    """Write all formats into a folder, in a process whose memory is not inherited."""
    with tempfile.TemporaryDirectory() as folder:
        script = str(Path(__file__).with_name("peer_formats.py"))
        subprocess.run([sys.executable, script, folder], check=True)
        yield folder


def chosen_by(rounds: Rounds) -> list[str]:
    """Return the best setting of each loader."""
    best: dict[str, tuple[float, str]] = {}
    for name, figures in rounds.items():
        loader = name.partition(" (")[0]
        found = (medians(figures)["rate"], name)
        best[loader] = max(best.get(loader, (0.0, "")), found)
    return [name for _, name in best.values()]


METRICS = [
    Metric("rate", "samples/s"),
    Metric("cpu", "CPU s/epoch", ",.2f", higher=False),
    Metric("cores", "cores used", ".2f", higher=False),
    Metric("first_ms", "first batch ms", ",.0f", higher=False),
    Metric("rss_mb", "MB", higher=False),
    Metric("worker_rss_mb", "MB/worker", higher=False),
]
ALL = Question(
    name="peers_sweep",
    text="Which setting of each loader reads a shuffled epoch fastest?",
    contenders={
        f"{name} ({words(one)})": Contender(partial(run, name, make, one), against="")
        for name, (make, settings) in SWEEP.items()
        for one in settings
    },
    metrics=METRICS,
    rounds=3,
    serve=serve,
)


def sweep(
    question: Question, script: Path, names: list[str], args: Any
) -> tuple[Rounds, list[str]]:
    """Run each setting once; return the figures, and the names of failed settings."""
    found: Rounds = {}
    failed = []
    for name in names:
        try:
            found |= measure(question, script, [name], args)
        except (SystemExit, subprocess.TimeoutExpired) as error:
            failed.append(f"{name}: {error}")
    return found, failed


def measure_all() -> None:
    """Sweep, choose, measure; store both."""
    args = parse(ALL)
    names, script = choose(ALL, args), Path(sys.argv[0])
    if args.quick:  # one setting of each
        names = list({name.partition(" (")[0]: name for name in names}.values())
    with serve() as folder:
        served = dataclasses.replace(ALL, serve=lambda: contextlib.nullcontext(folder))
        started, wanted = time.perf_counter(), args.rounds
        args.rounds = 1
        swept, failed = sweep(served, script, names, args)
        print(table(ALL, swept), *failed, sep="\n")
        took, args.rounds = time.perf_counter() - started, wanted
        best = chosen_by(swept)
        started = time.perf_counter()
        rounds = measure(served, script, best, args)
    fair = dataclasses.replace(
        ALL,
        name="peers",
        text="Who reads a shuffled epoch of 20 KB samples from local shards fastest?",
    )
    print(f"\n{fair.text}\n\n{table(fair, rounds)}")
    if not args.quick and not args.only:
        keep(ALL, swept, took, failed=failed)
        keep(fair, rounds, time.perf_counter() - started)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if "--contender" in sys.argv:
        main(ALL)
    else:
        measure_all()
