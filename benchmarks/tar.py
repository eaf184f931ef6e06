"""Tar: how fast are samples of 20 KB in tar shards?

Raw bytes, in lists of 64. Three cases: shards of 32 MB on disk (in the page cache),
read in one process; eight of them over HTTP with 20 ms per request and 30 MB/s per
connection; four, interleaved, with 100 ms. The limits read the same bytes without
parsing: ``readinto``, and the bare client, which knows all sizes, with some ranges of 8
MB in flight. The bytes of 16 such are the budget of a stream here, cut into smaller and
more ranges where several shards share it. Every epoch checks that each sample came
once. The first epoch, which starts workers and opens connections, does not count.

LitData reads the same samples in its own format, on disk, if ``AIOLOADER_PEERS`` names
the Python of an environment that has it (``tar_peers.py``). Other loaders with their
own formats are in ``peers.py``.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import tarfile
import time
import warnings
from collections.abc import AsyncIterable, Callable, Iterable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import uvloop
from torch.utils.data import DataLoader

from feeds import Asynchronous, make_store
from harness import Contender, Figures, Metric, Options, Question, Target, main
from meter import Meter
from remote import BATCH, check, settle
from shard_server import number_of, numbers, paths, serve, urls

if TYPE_CHECKING:
    from collections.abc import Iterator

# torch advises against more workers than cores; the workers here mostly wait
warnings.filterwarnings("ignore", message="This DataLoader will create")

LOCAL, REMOTE, FAR = 4, 8, 4  # shards
SECONDS = 3.0  # of epochs from disk
PIECE = 8 << 20
PEERS = os.environ.get("AIOLOADER_PEERS", "")
Batches = Iterable[list[Any]] | AsyncIterable[list[Any]]
# maps the folder to an object that gives one epoch per iteration
Make = Callable[[str], Batches]


# -- the clock ------------------------------------------------------------------------


def plain(batch: list[Any]) -> list[int]:
    return [number_of(body) for body in batch]


def fields(batch: list[Any]) -> list[int]:
    return [number_of(one["bin"]) for one in batch]


async def adrain(batches: AsyncIterable[list[Any]], read: Any) -> list[int]:
    return [number async for batch in batches for number in read(batch)]


def epoch(
    batches: Batches, read: Callable[[list[Any]], list[int]], shards: int
) -> None:
    """Read all, and check that each sample came once."""
    if isinstance(batches, AsyncIterable):
        seen = asyncio.run(adrain(batches, read))
    else:
        seen = [number for batch in batches for number in read(batch)]
    check(seen, numbers(shards))


def timed(once: Callable[[], None], shards: int, seconds: float) -> Figures:
    """Run one epoch, and then more until the time is over, at least one."""
    once()
    settle()
    epochs, start = 0, time.perf_counter()
    with Meter() as meter:
        while not epochs or time.perf_counter() - start < seconds:
            once()
            epochs += 1
    count = epochs * numbers(shards)
    return {"rate": count / meter.wall, "cpu": meter.cpu / count * 1e6} | {
        f"cpu:{name}": cpu / count * 1e6
        for name, cpu in meter.threads.items()
        if cpu / count > 1e-7
    }


def fed(  # noqa: PLR0913  (keywords, each of one thing)
    make: Make,
    against: str,
    shards: int,
    *,
    seconds: float = 0.0,
    read: Callable[[list[Any]], list[int]] = fields,
    extra: bool = False,
    max_rounds: int = 100,
) -> Contender:
    def run(options: Options) -> Figures:
        batches = make(options.url)
        once = partial(epoch, batches, read, shards)
        try:
            return timed(once, shards, seconds / (6 if options.quick else 1))
        finally:
            getattr(batches, "close", int)()

    return Contender(run, against, extra, max_rounds)


# -- this package ---------------------------------------------------------------------


class Closing(Asynchronous):
    """An asynchronous interface that can be closed."""

    def close(self) -> None:
        """Close the loader."""
        self._loader.close()


def own(
    folder: str,
    addresses: Callable[[str], list[str]],
    interleave: int = 1,
    *,
    asynchronous: bool = True,
) -> Any:
    from aioloader import DataLoader as Loader  # noqa: PLC0415
    from aioloader.datasets import TarDataset  # noqa: PLC0415

    stream = TarDataset(addresses(folder), interleave=interleave)
    loader = Loader(stream, BATCH, collate_fn=list)
    return Closing(loader) if asynchronous else loader


class OwnStream:
    """The stream without a loader, making the batches itself."""

    def __init__(self, folder: str) -> None:
        from aioloader.datasets import TarDataset  # noqa: PLC0415

        self._stream = TarDataset(paths(folder, LOCAL)).batch(BATCH)

    def __aiter__(self) -> Any:
        """Start an epoch."""
        return aiter(self._stream)


# -- peers ----------------------------------------------------------------------------


class Epochs:
    """The results of a generator function, in lists of 64, called for each epoch."""

    def __init__(self, generate: Callable[[], Iterator[Any]]) -> None:
        self._generate = generate

    def __iter__(self) -> Iterator[list[Any]]:
        """Start an epoch."""
        samples = self._generate()
        return iter(lambda: list(islice(samples, BATCH)), [])


def tarfile_loop(folder: str, mode: Any) -> Epochs:
    """Read with the standard library, like most code."""

    def samples() -> Iterator[bytes]:
        for path in paths(folder, LOCAL):
            with tarfile.open(path, mode) as tar:
                for member in tar:
                    file = tar.extractfile(member)
                    assert file is not None
                    yield file.read()

    return Epochs(samples)


def spdl(folder: str, *, whole: bool) -> Epochs:
    """Walk with SPDL's parser, a file or its whole contents; no loader around it."""
    from spdl.io import iter_tarfile  # noqa: PLC0415

    def samples() -> Iterator[Any]:
        for path in paths(folder, LOCAL):
            with Path(path).open("rb") as file:
                for _, body in iter_tarfile(file.read() if whole else file):
                    yield bytes(body)

    return Epochs(samples)


def webdataset(
    folder: str,
    addresses: Callable[[str], list[str]],
    workers: int = 0,
    *,
    mixed: bool = False,
    batched: bool = False,
) -> Any:
    """Make WebDataset's loader; over HTTP it reads through ``curl`` by itself.

    Args:
        folder: Where the shards and the servers' addresses are.
        addresses: Gives those of the shards.
        workers: Processes that the shards are dealt to.
        mixed: Interleave all shards in one process, each by a ``curl`` of its own.
        batched: Make batches in the stream and not in torch's loader.
    """
    import webdataset  # type: ignore[import-untyped]  # noqa: PLC0415

    found = addresses(folder)
    make = partial(webdataset.WebDataset, shardshuffle=False)
    stream = webdataset.RoundRobin([*map(make, found)]) if mixed else make(found)
    if batched:
        stream = stream.batched(BATCH, collation_fn=list)
    return DataLoader(
        stream,
        batch_size=None if batched else BATCH,
        collate_fn=None if batched else list,
        num_workers=workers,
        persistent_workers=workers > 0,
    )


def peer(name: str) -> Contender:
    """Run a peer with the Python that has it; its own format is written first."""

    def run(options: Options) -> Figures:
        seconds = SECONDS / (6 if options.quick else 1)
        script = str(Path(__file__).with_name("tar_peers.py"))
        command = [PEERS, script, name, options.url, str(seconds)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        figures: Figures = json.loads(done.stdout.splitlines()[-1])
        return figures

    return Contender(run, "local: readinto")


# -- the limits -----------------------------------------------------------------------


def read_files(folder: str, buffer: memoryview) -> None:
    for path in paths(folder, LOCAL):
        with Path(path).open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def run_readinto(options: Options) -> Figures:
    seconds = SECONDS / (6 if options.quick else 1)
    buffer = memoryview(bytearray(2 << 20))
    return timed(partial(read_files, options.url, buffer), LOCAL, seconds)


async def read_ranges(found: list[str], size: int, in_flight: int) -> None:
    """Read pieces of all objects in order, several at a time; keep none."""
    import obstore  # noqa: PLC0415

    parts = [urlsplit(url) for url in found]
    store = make_store(f"{parts[0].scheme}://{parts[0].netloc}")
    left = iter([(p.path[1:], at) for p in parts for at in range(0, size, PIECE)])

    async def member() -> None:
        for key, at in left:
            length = min(PIECE, size - at)
            body = await obstore.get_range_async(store, key, start=at, length=length)
            assert len(body) == length

    await asyncio.gather(*(member() for _ in range(in_flight)))


def bare(addresses: Callable[[str], list[str]], shards: int, flights: int) -> Contender:
    def run(options: Options) -> Figures:
        size = Path(paths(options.url)[0]).stat().st_size
        found = addresses(options.url)

        def once() -> None:
            uvloop.run(read_ranges(found, size, flights))

        return timed(once, shards, 0)

    return Contender(run, "")


# -- the cases ------------------------------------------------------------------------


def local_contenders() -> dict[str, Contender]:
    def case(make: Callable[..., Batches], **options: Any) -> Contender:
        return fed(make, "local: readinto", LOCAL, seconds=SECONDS, **options)

    files = partial(paths, shards=LOCAL)
    web = partial(webdataset, addresses=files)
    return {
        "local: readinto": Contender(run_readinto, ""),
        "local: aioloader": case(partial(own, addresses=files)),
        "local: aioloader for": case(partial(own, addresses=files, asynchronous=False)),
        "local: aioloader stream": case(OwnStream, extra=True),
        "local: WebDataset": case(web),
        "local: WebDataset batched": case(partial(web, batched=True)),
        "local: tarfile r": case(partial(tarfile_loop, mode="r:"), read=plain),
        "local: tarfile r|": case(partial(tarfile_loop, mode="r|"), read=plain),
        "local: SPDL": case(partial(spdl, whole=False), read=plain),
        "local: SPDL whole": case(partial(spdl, whole=True), read=plain, extra=True),
    } | ({"local: LitData": peer("LitData")} if PEERS else {})


def http_contenders() -> dict[str, Contender]:
    near = partial(urls, which="near", shards=REMOTE)
    case = partial(fed, shards=REMOTE)
    return {
        **{f"HTTP: bare {n}": bare(near, REMOTE, n) for n in (4, 8, 16, 32)},
        "HTTP: aioloader": case(partial(own, addresses=near), "HTTP: bare 4"),
        "HTTP: aioloader 4": case(
            partial(own, addresses=near, interleave=4), "HTTP: bare 16"
        ),
        **{
            f"HTTP: WebDataset {n} workers": case(
                partial(webdataset, addresses=near, workers=n),
                "HTTP: bare 16",
                max_rounds=2 if n < 4 else 100,
            )
            for n in (0, 2, 4, 8)
        },
    }


def far_contenders() -> dict[str, Contender]:
    far = partial(urls, which="far", shards=FAR)
    case = partial(fed, against="100 ms: bare 16", shards=FAR)
    web = partial(webdataset, addresses=far)
    return {
        "100 ms: bare 16": bare(far, FAR, 16),
        "100 ms: aioloader 4": case(partial(own, addresses=far, interleave=4)),
        "100 ms: WebDataset mixed": case(partial(web, mixed=True)),
        "100 ms: WebDataset 4 workers": case(partial(web, workers=4)),
    }


CONTENDERS = local_contenders() | http_contenders() | far_contenders()


def rivals(start: str) -> list[str]:
    return [name for name in CONTENDERS if name.startswith(start)]


QUESTION = Question(
    name="tar",
    text="How fast are samples of 20 KB in tar shards: on disk, over HTTP, far away?",
    contenders=CONTENDERS,
    metrics=[
        Metric("rate", "samples/s"),
        Metric("cpu", "CPU us/sample", ",.1f", higher=False),
        Metric("rss_mb", "MB", higher=False),
        Metric("worker_rss_mb", "MB/worker", higher=False),
    ],
    targets=[
        Target("local: aioloader", rivals("local: WebDataset"), 3),
        Target("local: aioloader", rivals("local: tarfile"), 2.5),
        Target("HTTP: aioloader", ["HTTP: bare 4"], 0.9),
        Target("HTTP: aioloader 4", ["HTTP: bare 16"], 0.9),
        Target("HTTP: aioloader 4", rivals("HTTP: WebDataset"), 1.4),
        Target("100 ms: aioloader 4", rivals("100 ms: WebDataset"), 3),
    ],
    serve=serve,
)

if __name__ == "__main__":
    main(QUESTION)
