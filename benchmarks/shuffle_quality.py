"""Shuffle quality: how well are samples of shards mixed, for the memory used?

64 tars of 500 samples, read by one reader in batches of 64. All settings hold the same
number of samples: our two windows of half the size, WebDataset's one buffer, and
Mosaic's block (whose shards lie on its local disk); read-ahead of open shards is added
to that (ours: ``max_bytes`` in all). With random access to the shards, an order is that
of a sampler: of all samples, or of blocks within a window, which are held then.
Distinct shards in a batch: all random would be 40.6. The variance of a batch's mean
place, by that of 64 places drawn at random: that would be 1; the same of eight batches
in a row, which also shows whether they are alike. Correlation of the places
in the dataset of samples that are one sample, and one batch, apart in the epoch: all
random would be 0. Mosaic's orders are made by its own functions; if it is not
installed, it is left out.
"""

from __future__ import annotations

import asyncio
import importlib
import io
import sys
import tarfile
import tempfile
import time
import types
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aioloader import ShuffledIndices
from aioloader.datasets import IndexedDataset, TarDataset
from harness import (
    Limit,
    Metric,
    Question,
    keep,
    limits,
    show_verdicts,
    table,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from harness import Figures, Rounds

SHARDS, LENGTH, BATCH = 64, 500, 64
PLACES = SHARDS * LENGTH
RUN = 8
HELD = (1_000, 4_000)
BLOCK, WINDOWS = 16, (0, 1_024, 4_096)
WINDOWED = "4,096 held: aioloader indexed, block=16, window=4096"


def write(folder: Path) -> list[str]:
    """Write the shards; keys are the places of samples in the dataset."""
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard:03}.tar", "w") as tar:
            for place in range(shard * LENGTH, (shard + 1) * LENGTH):
                member = tarfile.TarInfo(f"{place:06}.bin")
                member.size = 4
                tar.addfile(member, io.BytesIO(b"data"))
    return sorted(map(str, folder.glob("*.tar")))


def of_ours(stream: Any) -> list[int]:
    async def read() -> list[int]:
        return [int(sample["__key__"]) async for sample in stream]

    return asyncio.run(read())


def of_webdataset(paths: list[str], held: int) -> list[int]:
    import webdataset as wds  # noqa: PLC0415  (a peer, which may be missing)

    dataset = wds.WebDataset(paths, shardshuffle=SHARDS, seed=0, empty_check=False)
    return [int(s["__key__"]) for s in dataset.shuffle(held, initial=held, seed=0)]


def of_mosaic(algorithm: str, held: int) -> list[int]:
    """Return the order of one canonical node with one worker."""
    roots = [Path(path) / "streaming" for path in sys.path]
    root = next((path for path in roots if (path / "base" / "shuffle").is_dir()), None)
    if root is None:
        raise ModuleNotFoundError("No module named 'streaming'")
    for name, path in (("streaming", root), ("streaming.base", root / "base")):
        # Its package imports everything it can read; the orders need only numpy.
        package = types.ModuleType(name)
        package.__path__ = [str(path)]
        sys.modules.setdefault(name, package)
    module = importlib.import_module(f"streaming.base.shuffle.{algorithm}")
    sizes = np.full(SHARDS, LENGTH)
    options = {} if algorithm == "py1s" else {"block_size": held}
    order = getattr(module, f"get_shuffle_{algorithm}")(sizes, 1, 0, 0, **options)
    return list(order.tolist())


def contenders(paths: list[str]) -> Iterator[tuple[str, int, Any]]:
    """Yield the name of each setting, what it holds, and the function of its order."""

    def tar(**options: Any) -> TarDataset:
        return TarDataset(paths, seed=1, **options)

    yield "aioloader in order", 0, lambda: of_ours(tar())
    yield (
        "aioloader interleave=8",
        0,
        lambda: of_ours(tar(shuffle=True, interleave=8)),
    )
    yield "aioloader indexed, all shuffled", 0, lambda: [*ShuffledIndices(PLACES)]
    indexed = IndexedDataset(TarDataset(paths), scan=True)
    for window in WINDOWS:
        sampler = indexed.shuffled(BLOCK, window)
        name = f"aioloader indexed, block={BLOCK}, window={window}"
        yield name, window, partial(list, sampler)
    for held in HELD:
        for lanes in (1, 8, 32):
            name = f"aioloader interleave={lanes}, .shuffle({held // 2})"
            stream = tar(shuffle=True, interleave=lanes).shuffle(held // 2)
            yield name, held, partial(of_ours, stream)
        name = f"webdataset shardshuffle, .shuffle({held})"
        yield name, held, partial(of_webdataset, paths, held)
        for algorithm in ("py1e", "py1br"):
            name = f"mosaic {algorithm}, block {held}"
            yield name, held, partial(of_mosaic, algorithm, held)


def figures(places: list[int]) -> Figures:
    found = np.asarray(places)
    assert sorted(places) == list(range(PLACES))
    batches = in_runs(found, BATCH)
    shards = [len(np.unique(batch)) for batch in batches // LENGTH]
    return {
        "distinct": float(np.mean(shards)),
        "missed": SHARDS - float(np.mean(shards)),
        "variance": _variance(found, BATCH),
        "run": _variance(found, RUN * BATCH),
        "near": _correlation(found, 1),
        "far": _correlation(found, BATCH),
    }


def in_runs(found: Any, length: int) -> Any:
    return found[: len(found) // length * length].reshape(-1, length)


def _variance(found: Any, length: int) -> float:
    """Return the variance of the mean of so many places, by that of random ones."""
    means = in_runs(found, length).mean(1)
    return float(means.var() * length / found.var())


def _correlation(found: Any, distance: int) -> float:
    return float(np.corrcoef(found[:-distance], found[distance:])[0, 1])


QUESTION = Question(
    name="shuffle_quality",
    text=f"How well are samples of {SHARDS} shards mixed, for what is held in memory?",
    contenders={},
    metrics=[
        Metric("distinct", "shards per batch", ".1f"),
        Metric("variance", "variance of a mean", ".2f", higher=False),
        Metric("run", f"of {RUN} batches", ".2f", higher=False),
        Metric("near", "correlation, 1 apart", ".3f", higher=False),
        Metric("far", f"correlation, {BATCH} apart", ".3f", higher=False),
    ],
    limits=[
        Limit(WINDOWED, "missed", SHARDS - 38),
        Limit(WINDOWED, "variance", 1.3),
    ],
)


def measure(settings: list[tuple[str, int, Any]]) -> tuple[Rounds, list[str]]:
    """Return the figures of each setting, and the names of those that are missing."""
    found: Rounds = {}
    missing = []
    for name, held, order in settings:
        try:
            mixed = figures(order())
        except ModuleNotFoundError as error:
            missing.append(f"{name}: {error}")
            continue
        case = f"{held:,} held" if held else "nothing held"
        found[f"{case}: {name}"] = [mixed]
    return found, missing


def main() -> None:
    """Measure once, because nothing is random; store it if no peer is missing."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        found, missing = measure(list(contenders(write(Path(folder)))))
    print(f"{QUESTION.text}\n\n{table(QUESTION, found)}", *missing, sep="\n")
    targets = limits(QUESTION, found)
    show_verdicts(targets)
    if not missing and "--quick" not in sys.argv:
        keep(QUESTION, found, time.perf_counter() - started, targets=targets)


if __name__ == "__main__":
    main()
