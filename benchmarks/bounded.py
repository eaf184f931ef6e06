"""Bounded: does memory stay within its limit while 20 GB of shards pass?

Two hundred tar shards of 100 MB, samples of 20 KB, from a server in a separate process
that computes the bytes on request (``tars.py``); batches of 64. The figure is the peak
of resident memory above the level at the first request, in units of 2**20 bytes. The
budget of ``max_bytes`` is 64 of them, and 100 more must be enough for everything else:
batches, client and allocator. For comparison, code without a loader: ``tarfile`` over a
streamed response, one shard after the other.
"""

from __future__ import annotations

import contextlib
import gc
import tarfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import Contender, Figures, Limit, Metric, Options, Question, main
from meter import Meter
from tars import BODY_BYTES, SAMPLES, SHARD_BYTES, TarProcess, name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    Read = Callable[[list[str]], Iterable[Sequence[bytes]]]

MB = 2**20
BATCH = 64
SHARDS = 200
QUICK_SHARDS = 10
BUDGET = 64
INTERLEAVE = 4


def ours(urls: list[str], *, budget: int = BUDGET) -> Iterable[Sequence[bytes]]:
    import aioloader  # noqa: PLC0415
    from aioloader.datasets import TarDataset  # noqa: PLC0415

    dataset: Any = TarDataset(
        urls,
        interleave=INTERLEAVE,
        max_bytes=budget * MB,
        store_options={"client_options": {"allow_http": True}},
    )
    return (batch["bin"] for batch in aioloader.DataLoader(dataset, BATCH))


def plain(urls: list[str]) -> Iterator[Sequence[bytes]]:
    """Read with tarfile from a response of urllib3."""
    import urllib3  # noqa: PLC0415

    pool, bodies = urllib3.PoolManager(), []
    for url in urls:
        answer: Any = pool.request("GET", url, preload_content=False)
        with answer, tarfile.open(fileobj=answer, mode="r|") as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None
                bodies.append(file.read())
                tar.members = []  # it would keep them all
                if len(bodies) == BATCH:
                    yield bodies
                    bodies = []
    yield bodies


def memory(name: str) -> float:
    """Return a line of this process's status, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (one for one in lines if one.startswith(f"{name}:"))
    return int(line.split()[1]) / 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def epoch(read: Read, urls: list[str]) -> int:
    """Read all, and check that each sample came once; return the number of samples."""
    count = total = 0
    for bodies in read(urls):
        for body in bodies:
            assert len(body) == BODY_BYTES
            total += int.from_bytes(body[:8], "little")
        count += len(bodies)
    expected = len(urls) * SAMPLES
    if count != expected or total != expected * (expected - 1) // 2:
        raise RuntimeError(f"{count} samples seen, {expected} expected")
    return count


def run(read: Read, options: Options) -> Figures:
    """Read the shards; imports made here count as memory, too."""
    shards = QUICK_SHARDS if options.quick else SHARDS
    urls = [f"{options.url}/{name_of(one)}" for one in range(shards)]
    import torch  # noqa: F401, PLC0415  (everybody who reads batches has it)

    gc.collect()
    forget_peak()
    before = memory("VmRSS")
    with Meter() as meter:
        count = epoch(read, urls)
    return {
        "above_mb": memory("VmHWM") - before,
        "before_mb": before,
        "mb_s": shards * SHARD_BYTES / meter.wall / MB,
        "cpu": meter.cpu / count * 1e6,
        **{f"cpu:{name}": one for name, one in meter.threads.items() if one > 0.01},
    }


@contextlib.contextmanager
def serve() -> Iterator[str]:
    with TarProcess(SHARDS) as server:
        yield server.url


QUESTION = Question(
    name="bounded",
    text="How much memory do 20 GB of tar shards take while they pass?",
    contenders={
        "aioloader": Contender(partial(run, ours), against="tarfile"),
        "aioloader 16 MB": Contender(
            partial(run, partial(ours, budget=16)), against="tarfile", extra=True
        ),
        "tarfile": Contender(partial(run, plain), against="tarfile", max_rounds=1),
    },
    metrics=[
        Metric("above_mb", "MB above start", ",.1f", higher=False),
        Metric("before_mb", "MB at start", higher=False),
        Metric("mb_s", "MB/s"),
        Metric("cpu", "CPU us/sample", ",.1f", higher=False),
    ],
    limits=[Limit("aioloader", "above_mb", BUDGET + 100)],
    rounds=2,
    serve=serve,
)

if __name__ == "__main__":
    main(QUESTION)
