"""Runs of batches: what does a batch cost where samples are quick?

Each case is a loader with its defaults, and its limit: the same samples without any
loader. Both take turns in one process, a fresh one per case and round. The figure is
how many times the limit's seconds a batch takes; for the cases that compare the paces
of two loops, what share of the other's pace it has.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import io
import json
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import pyarrow as pa
import torch
from pyarrow import dataset as ds
from pyarrow import parquet as pq
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset, default_collate

from aioloader import DataLoader
from aioloader.datasets import JSONLinesDataset, ParquetDataset, TarDataset
from environment import compile_package, describe
from harness import RESULTS, Options, render, run_fresh, show

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator

SECONDS = 0.6  # of each turn, about
TURNS = 5
INTS = 1 << 30
Timed = tuple[float, float]  # seconds and batches


def timed(batches: Iterable[Any], seconds: float = SECONDS) -> Timed:
    """Iterate for so long; the start does not count."""
    iterator = iter(batches)
    for _ in range(8):
        next(iterator)
    began, count = time.perf_counter(), 0
    for _ in iterator:
        count += 1
        if not count % 16 and time.perf_counter() - began > seconds:
            break
    return time.perf_counter() - began, count


async def timed_async(batches: Any, seconds: float = SECONDS) -> Timed:
    """Do the same with ``async for``."""
    iterator, count = aiter(batches), 0
    for _ in range(8):
        await anext(iterator)
    began = time.perf_counter()
    async for _ in iterator:
        count += 1
        if not count % 16 and time.perf_counter() - began > seconds:
            break
    return time.perf_counter() - began, count


def in_loop(batches: Iterable[Any]) -> Timed:
    return asyncio.run(timed_async(batches))


# -- lines, archives, tables -----------------------------------------------------------


def written_lines(folder: Path) -> str:
    path = folder / "rows.jsonl"
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        for number, score in enumerate(rng.random(400_000).tolist()):
            row = {"id": number, "text": "a few words of text", "score": score}
            file.write(orjson.dumps(row) + b"\n")
    return str(path)


def bare_lines(path: str, size: int) -> Iterator[list[Any]]:
    with Path(path).open("rb") as file:
        rows: list[Any] = []
        for line in file:
            rows.append(orjson.loads(line))
            if len(rows) == size:
                yield rows
                rows = []


def lines(folder: Path, size: int) -> tuple[Any, Any]:
    path = written_lines(folder)
    stream = JSONLinesDataset(path)
    return partial(bare_lines, path, size), partial(
        DataLoader, stream, size, collate_fn=as_they_are
    )


def as_they_are(samples: Any) -> Any:
    return samples


def written_tar(folder: Path, nbytes: int) -> str:
    path = folder / "shard.tar"
    body = np.random.default_rng(0).bytes(nbytes)
    with tarfile.open(path, "w") as archive:
        for number in range((256 << 20) // (nbytes + 1024)):
            member = tarfile.TarInfo(f"{number:08d}.bin")
            member.size = nbytes
            archive.addfile(member, io.BytesIO(body))
    return str(path)


def bare_tar(path: str, nbytes: int) -> Iterator[list[Any]]:
    """Read a piece, and copy each body out of it; headers are not even looked at."""
    stride = 512 + -(-nbytes // 512) * 512
    with Path(path).open("rb", buffering=0) as file:
        while len(piece := file.read(64 * stride)) == 64 * stride:
            yield [
                piece[at + 512 : at + 512 + nbytes]
                for at in range(0, len(piece), stride)
            ]


def tar(folder: Path, nbytes: int) -> tuple[Any, Any]:
    path = written_tar(folder, nbytes)
    stream = TarDataset(path)
    return partial(bare_tar, path, nbytes), partial(
        DataLoader, stream, 64, collate_fn=as_they_are
    )


def written_table(folder: Path, columns: int, *, has_text: bool) -> str:
    path, rows, rng = folder / "rows.parquet", 1_000_000, np.random.default_rng(0)
    table: dict[str, Any] = {f"c{k}": rng.random(rows) for k in range(columns)}
    if has_text:
        table["text"] = [f"some words, {number}" for number in range(rows)]
    pq.write_table(pa.table(table), path, row_group_size=131_072)
    return str(path)


def bare_table(path: str) -> Iterator[dict[str, Any]]:
    made = ds.dataset(path)
    for batch in made.to_batches(batch_size=1_024, use_threads=False):
        yield {
            name: column.to_pylist()
            if pa.types.is_string(column.type)
            else torch.from_numpy(np.array(column.to_numpy()))
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
        }


def table(folder: Path, columns: int, *, has_text: bool = False) -> tuple[Any, Any]:
    path = written_table(folder, columns, has_text=has_text)
    stream = ParquetDataset(path)
    return partial(bare_table, path), partial(DataLoader, stream, 1_024)


# -- the user's own --------------------------------------------------------------------


class Ints(IterableDataset[int]):
    """Reads numbers, as quickly as Python can."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(INTS))


class AsyncInts:
    """Does the same, asynchronously."""

    async def __aiter__(self) -> AsyncIterator[int]:
        for number in range(INTS):
            yield number


class Numbers:
    """A map-style dataset of ints."""

    def __len__(self) -> int:
        return 4_000_000

    def __getitem__(self, index: int) -> int:
        return index


class Rows(list[tuple[torch.Tensor, int]]):
    """A Python list of small tensors and ints."""

    def __init__(self, rows: int) -> None:
        super().__init__(zip(torch.randn(rows, 16), range(rows), strict=True))


def batches_of(samples: Iterable[Any], size: int, change: Any = None) -> Iterator[Any]:
    """Collate samples without any loader."""
    batch = []
    for sample in samples:
        batch.append(sample if change is None else change(sample))
        if len(batch) == size:
            yield default_collate(batch)
            batch = []


def numbers(number: int) -> int:
    return number + 1


def ints(_: Path, dataset: Any) -> tuple[Any, Any]:
    return partial(batches_of, range(INTS), 32), partial(DataLoader, dataset(), 32)


def workers(_: Path, size: int) -> tuple[Any, Any]:
    ours = partial(DataLoader, Numbers(), size, num_workers=2)
    return partial(batches_of, range(INTS), size), ours


def transformed(_: Path) -> tuple[Any, Any]:
    rows = list(range(1_000_000))
    ours = partial(DataLoader, rows, 32, transform=numbers)
    return partial(batches_of, rows, 32, numbers), ours


def listed(_: Path) -> tuple[Any, Any]:
    rows = Rows(400_000)
    return partial(batches_of, rows, 64), partial(DataLoader, rows, 64)


# -- first batches and short epochs ----------------------------------------------------

FIRST = """
import sys, time, importlib
began = time.perf_counter()
import torch
class Numbers:
    def __len__(self): return 64
    def __getitem__(self, index): return torch.tensor([index])
own = sys.argv[1] == "aioloader"
context = {} if own else {"multiprocessing_context": "fork"}
module = importlib.import_module(sys.argv[1])
next(iter(module.DataLoader(Numbers(), 8, num_workers=2, **context)))
print(time.perf_counter() - began)
"""


def first(module: str) -> Timed:
    """Return the seconds of a fresh process, imports included, to its first batch."""
    command = [sys.executable, "-c", FIRST, module]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return float(printed), 1


def short(make: Callable[[], Iterable[Any]], counter: Callable[..., Timed]) -> Timed:
    """Return the seconds of an epoch of ten batches, its start and end included."""
    loader = make()
    counter(loader)
    return counter(loader)


def all_of(loader: Iterable[Any]) -> Timed:
    began = time.perf_counter()
    epochs = 100
    for _ in range(epochs):
        for _ in loader:
            pass
    return time.perf_counter() - began, epochs


def all_in_loop(loader: Any) -> Timed:
    async def run() -> Timed:
        began, epochs = time.perf_counter(), 100
        for _ in range(epochs):
            async for _ in loader:
                pass
        return time.perf_counter() - began, epochs

    return asyncio.run(run())


@dataclass(frozen=True)
class Case:
    """A gate.

    Attributes:
        make: Makes what is timed: the limit, and ours.
        gate: The most times the limit; or with ``is_share``, the least share of it.
        counter: Times ours; and the limit, unless ``plainly``.
        is_share: Whether the figure is the limit's seconds as a share of ours.
    """

    make: Callable[[Path], tuple[Any, Any]]
    gate: float
    counter: Callable[[Any], Timed] = timed
    is_share: bool = False
    plainly: Callable[[Any], Timed] = timed


def ten(_: Path) -> tuple[Any, Any]:
    rows = Rows(80)
    return partial(TorchLoader, rows, 8), partial(DataLoader, rows, 8)


def processes(_: Path) -> tuple[Any, Any]:
    return lambda: "torch.utils.data", lambda: "aioloader"


CASES = {
    "JSON lines, 32": Case(partial(lines, size=32), 2.5),
    "JSON lines, 512": Case(partial(lines, size=512), 1.5),
    "tar, 64 x 4 KB": Case(partial(tar, nbytes=4_096), 3.0),
    "tar, 64 x 20 KB": Case(partial(tar, nbytes=20_480), 1.8),
    "Parquet, two columns": Case(partial(table, columns=2), 0.9),
    "Parquet, eight columns": Case(partial(table, columns=8), 1.0),
    "Parquet, with text": Case(partial(table, columns=2, has_text=True), 1.1),
    "iterable of ints, 32": Case(partial(ints, dataset=Ints), 1.6),
    "async iterable of ints, 32": Case(partial(ints, dataset=AsyncInts), 2.5),
    "two workers, ints, 8": Case(partial(workers, size=8), 10.0),
    "two workers, ints, 64": Case(partial(workers, size=64), 7.0),
    "async for, list with a transform, 32": Case(transformed, 1.6, in_loop),
    "async for, list, 64": Case(listed, 0.85, in_loop, is_share=True),
    "first batch, two workers, of torch's fork": Case(
        processes, 0.95, first, is_share=True, plainly=first
    ),
    "async for, ten batches, by torch's for": Case(
        ten, 2.5, all_in_loop, plainly=all_of
    ),
}


def run(case: Case) -> dict[str, float]:
    """Time the limit and ours in turns; return the medians, in us per batch."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        limit, ours = case.make(folder)
        theirs_took, ours_took = list[float](), list[float]()
        for _ in range(TURNS):
            for made, counter, took in (
                (limit, case.plainly, theirs_took),
                (ours, case.counter, ours_took),
            ):
                gc.collect()
                seconds, batches = counter(made())
                took.append(1e6 * seconds / batches)
    least, most = statistics.median(theirs_took), statistics.median(ours_took)
    figure = least / most if case.is_share else most / least
    return {"limit": least, "ours": most, "figure": figure}


def main() -> None:
    """Run all cases in turns; print the table, store the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contender", help="run this case once; print its figures")
    parser.add_argument("--only", default="", help="cases whose names have this")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--all", action="store_true", help="no more than without")
    parser.add_argument("--url", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contender:
        print(json.dumps(run(CASES[args.contender])), flush=True)
        return
    compile_package()
    names = [name for name in CASES if args.only in name]
    rounds: dict[str, list[Any]] = {name: [] for name in names}
    for number in range(1 if args.quick else args.rounds):
        for name in names:
            show(f"round {number + 1}: {name}")
            rounds[name].append(run_fresh(Path(__file__), name, Options()))
    show("")
    rows = [["us per batch", "limit", "ours", "figure", "gate", ""]]
    for name, figures in rounds.items():
        middle = {
            key: statistics.median(each[key] for each in figures)
            for key in ("limit", "ours", "figure")
        }
        case, figure = CASES[name], middle["figure"]
        is_met = figure >= case.gate if case.is_share else figure <= case.gate
        cells = [f"{middle['limit']:.1f}", f"{middle['ours']:.1f}", f"{figure:.2f}"]
        rows.append([name, *cells, f"{case.gate}", "met" if is_met else "MISSED"])
    print(render(rows))
    if not (args.quick or args.only):
        kept = {"environment": describe(), "rounds": rounds}
        (RESULTS / "runs-all.json").write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
