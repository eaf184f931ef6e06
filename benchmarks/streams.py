"""Streams: what do samples cost compared with the bytes they are made of?

All contenders of one question take turns in one process, so that a ratio is of the same
machine; a row shows the median time and the median of the ratios within a round.

Tar, local: four shards of 32 MB in the page cache, samples of 20 KB in lists of 64,
against reading the same bytes in pieces of 64 samples. Tar, HTTP: 24 shards of 5 MB
from a server in a separate process that answers after 20 or 50 ms, with default
settings, against torch's loader with two workers, each with ``tarfile`` on a response.
JSON lines: against ``orjson.loads`` of each line of an open file, with lines of three
kinds. Steps and tables are measured by ``stream_steps.py`` and ``stream_tables.py``.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import io
import json
import mmap
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import orjson
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset, get_worker_info

from aioloader import DataLoader
from aioloader.datasets import JSONLinesDataset, TarDataset
from harness import Metric, Question, in_one_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from harness import Rounds

warnings.filterwarnings("ignore", message="This DataLoader will create")

BATCH, BODY = 64, 20_000
MEMBER = 512 + -(-BODY // 512) * 512
LOCAL = (4, 1_536)  # shards, samples of each
REMOTE = (24, 240)
LATENCIES = (0.02, 0.05)


QUESTION = Question(
    name="streams",
    text="What do samples of streams cost beside the bytes that they are made of?",
    contenders={},
    metrics=[
        Metric("us", "us/sample", ",.2f", higher=False),
        Metric("ms", f"ms/{BATCH} samples", ",.2f", higher=False),
    ],
)


def compare(
    title: str, ways: Mapping[str, Callable[[], int]], count: int, rounds: int
) -> Rounds:
    """Time all contenders in turn; return the figures of all rounds."""
    for way in ways.values():
        assert way() >= count, title  # once without a clock: threads, connections
    found: Rounds = {f"{title}: {name}": [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            gc.collect()
            began = time.perf_counter()
            way()
            took = (time.perf_counter() - began) / count
            found[f"{title}: {name}"].append(
                {"us": took * 1e6, "ms": took * 1e3 * BATCH}
            )
    return found


def drained(batches: Iterable[list[Any]]) -> int:
    """Read all batches; return how many samples they have."""
    return sum(map(len, batches))


async def adrained(loader: DataLoader[Any]) -> int:
    return sum([len(batch) async for batch in loader])


def batched(samples: Iterator[Any]) -> int:
    """Put samples into lists of 64, and drop them."""
    count, batch = 0, []
    for sample in samples:
        batch.append(sample)
        count += 1
        if len(batch) == BATCH:
            batch = []
    return count


# -- tar ------------------------------------------------------------------------------


def write_tars(folder: str, shards: int, samples: int) -> list[str]:
    paths = [f"{folder}/{shard:03}.tar" for shard in range(shards)]
    for shard, path in enumerate(paths):
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
            for place in range(samples):
                member = tarfile.TarInfo(f"{shard:03}{place:06}.bin")
                member.size = BODY
                tar.addfile(member, io.BytesIO(os.urandom(BODY)))
    return paths


def pieces(paths: list[str]) -> int:
    """Read the bytes of 64 samples at a time."""
    count = 0
    for path in paths:
        with Path(path).open("rb", buffering=0) as file:
            while piece := file.read(BATCH * MEMBER):
                count += len(piece) // MEMBER
    return count


def by_hand(paths: list[str]) -> Iterator[bytes]:
    for path in paths:
        with tarfile.open(path) as tar:
            for member in tar:
                body = tar.extractfile(member)
                assert body is not None
                yield body.read()


def local_tar(folder: str, rounds: int) -> Rounds:
    paths = write_tars(folder, *LOCAL)
    loader: Any = DataLoader(TarDataset(paths), BATCH, collate_fn=list)
    ways = {
        "the bytes, 64 samples at a time": lambda: pieces(paths),
        "aioloader, for": lambda: drained(loader),
        "aioloader, async for": lambda: asyncio.run(adrained(loader)),
        "tarfile by hand": lambda: batched(by_hand(paths)),
    }
    with loader:
        return compare("tar, local", ways, LOCAL[0] * LOCAL[1], rounds)


class Responses(IterableDataset[dict[str, Any]]):
    """Code without a loader: a response per shard, and ``tarfile`` on it."""

    def __init__(self, urls: list[str]) -> None:
        self._urls = urls

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        at, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for url in self._urls[at::step]:
            with (
                urllib.request.urlopen(url) as response,
                tarfile.open(fileobj=response, mode="r|") as tar,
            ):
                for member in tar:
                    body = tar.extractfile(member)
                    assert body is not None
                    yield {"__key__": member.name, "bin": body.read()}


class Server:
    """The shards, from a separate process."""

    def __init__(self, folder: str, latency: float) -> None:
        self._command = [sys.executable, __file__, "--serve", folder, str(latency)]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        return self

    def __exit__(self, *_error: object) -> None:
        # Not by closing its stdin: torch's forked workers hold it, too.
        self._process.terminate()
        self._process.communicate()


def serve(folder: str, latency: float) -> None:
    from served import ObjectServer  # noqa: PLC0415

    objects = {}
    for path in Path(folder).glob("*.tar"):
        with path.open("rb") as file:
            objects[path.name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with ObjectServer(objects, latency=latency) as server:
        print(server.url, flush=True)
        sys.stdin.read()


def http_tar(folder: str, rounds: int) -> Rounds:
    write_tars(folder, *REMOTE)
    found: Rounds = {}
    for latency in LATENCIES:
        with Server(folder, latency) as server:
            urls = [f"{server.url}/{shard:03}.tar" for shard in range(REMOTE[0])]
            hand: Any = TorchLoader(
                Responses(urls),
                BATCH,
                collate_fn=list,
                num_workers=2,
                persistent_workers=True,
            )
            plain: Any = DataLoader(TarDataset(urls), BATCH, collate_fn=list)
            woven = DataLoader(TarDataset(urls, interleave=8), BATCH, collate_fn=list)
            ways: dict[str, Callable[[], int]] = {
                "torch, tarfile, 2 workers": lambda hand=hand: drained(hand),  # type: ignore[misc]
                "aioloader": lambda plain=plain: asyncio.run(adrained(plain)),  # type: ignore[misc]
                "aioloader, interleave=8": lambda woven=woven: asyncio.run(  # type: ignore[misc]
                    adrained(woven)
                ),
            }
            title = f"tar, 5 MB over HTTP, {latency * 1e3:.0f} ms"
            found |= compare(title, ways, REMOTE[0] * REMOTE[1], rounds)
            del hand
    return found


# -- JSON lines -----------------------------------------------------------------------

WORDS = [
    "alpha",
    "beta",
    "gamma",
    "of",
    "the",
    "and",
    "data",
    "loader",
    "stream",
    "sample",
]
KINDS: dict[str, tuple[int, Callable[[int], dict[str, Any]]]] = {
    "60 words": (60_000, lambda k: {"id": k, "text": _words(k, 60)}),
    "350 words": (20_000, lambda k: {"id": k, "text": _words(k, 350)}),
    "20 floats": (40_000, lambda k: {"id": k, "x": _floats(k)}),
}


def _words(seed: int, count: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def _floats(seed: int) -> list[float]:
    rng = random.Random(seed)
    return [rng.random() for _ in range(20)]


def lines(path: str) -> Iterator[Any]:
    with Path(path).open("rb") as file:
        for line in file:
            yield orjson.loads(line)


async def pulled(dataset: JSONLinesDataset, size: int) -> int:
    """Read a stream without a loader, by the block."""
    count = 0
    async with aiter(dataset) as blocks:
        while block := await blocks.pull(size):
            count += len(block)
    return count


def json_lines(folder: str, rounds: int) -> Rounds:
    found: Rounds = {}
    for kind, (count, make) in KINDS.items():
        path = f"{folder}/{kind}.jsonl"
        text = "".join(json.dumps(make(k)) + "\n" for k in range(count))
        Path(path).write_text(text)
        dataset = JSONLinesDataset(path)
        loader: Any = DataLoader(dataset, BATCH, collate_fn=list)
        ways: dict[str, Callable[[], int]] = {
            "orjson alone": lambda path=path: batched(lines(path)),  # type: ignore[misc]
            "aioloader, blocks": lambda one=dataset: asyncio.run(pulled(one, 1024)),  # type: ignore[misc]
            "aioloader, batches of 64": lambda one=loader: drained(one),  # type: ignore[misc]
        }
        with loader:
            found |= compare(f"JSON lines of {kind}", ways, count, rounds)
    return found


def measure(rounds: int) -> Rounds:
    """Measure tar and lines."""
    found: Rounds = {}
    for question in (local_tar, http_tar, json_lines):
        with tempfile.TemporaryDirectory() as folder:
            found |= question(folder, rounds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", nargs=2, metavar=("FOLDER", "LATENCY"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--all", action="store_true", help="no more than without")
    args = parser.parse_args()
    if args.serve:
        serve(args.serve[0], float(args.serve[1]))
    else:
        in_one_process({QUESTION: measure}, args.rounds, is_quick=args.quick)


if __name__ == "__main__":
    main()
