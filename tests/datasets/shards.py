"""Shards of every format with the same known samples, and ways to read them."""

import contextlib
import functools
import gzip
import io
import itertools
import json
import os
import sqlite3
import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import own_format
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from PIL import Image
from pyarrow import dataset as ds

from aioloader._base.blocks import Block
from aioloader.datasets import (
    ArrowDataset,
    ByteStream,
    CSVDataset,
    JSONLinesDataset,
    ParquetDataset,
    SQLDataset,
    TarDataset,
    TextDataset,
    from_arrow,
    from_async_iterable,
    from_dataset,
    from_iterable,
)
from aioloader.datasets._streams.shards import ShardFormat, ShardReader
from datasets.pg import SHARED, Database, Server
from datasets.tar_archives import Member, archive

# Uneven lengths of shards, one of which is empty.
LENGTHS = (5, 9, 0, 12, 7, 1, 10, 8)
NAMES = [
    f"{shard}-{place}"
    for shard, length in enumerate(LENGTHS)
    for place in range(length)
]

Make = Callable[..., Any]


def rows(shard: int) -> list[str]:
    return [f"{shard}-{place}" for place in range(LENGTHS[shard])]


def write_text(folder: Path, ending: str = "") -> None:
    for shard in range(len(LENGTHS)):
        text = "".join(f"{row}\n" for row in rows(shard)).encode()
        write_packed(folder / f"{shard}.txt{ending}", text)


def write_lines(folder: Path, lengths: Sequence[int], line: str = "{}-{}") -> list[str]:
    """Write shards of these lengths, with shard and line numbers; return paths."""
    paths = [folder / f"{shard:02}.txt" for shard, _ in enumerate(lengths)]
    for shard, (path, length) in enumerate(zip(paths, lengths, strict=True)):
        path.write_text("".join(line.format(shard, n) + "\n" for n in range(length)))
    return [*map(str, paths)]


def write_json(folder: Path) -> None:
    """Write shards of JSON lines, with empty ones in between."""
    for shard in range(len(LENGTHS)):
        lines = [json.dumps({"name": row}) + "\n\n" for row in rows(shard)]
        (folder / f"{shard}.jsonl").write_text("".join(lines))


def write_tar(folder: Path, ending: str = "") -> None:
    for shard in range(len(LENGTHS)):
        members = [
            Member(f"part/{row}.{field}", body)
            for row in rows(shard)
            for field, body in (("txt", row.encode()), ("bin", bytes(700)))
        ]
        write_packed(folder / f"{shard}.tar{ending}", archive(members))


_LATER = itertools.count(1)


def put(path: str | Path, data: bytes | bytearray) -> None:
    """Write a file in place, with a new time even if the clock is coarse."""
    Path(path).write_bytes(data)
    os.utime(path, (10**9 + next(_LATER),) * 2)


def write_packed(path: Path, data: bytes) -> None:
    if path.suffix == ".gz":
        data = gzip.compress(data)
    elif path.suffix == ".zst":
        data = zstandard.compress(data)
    path.write_bytes(data)


def bytes_of(table: pa.Table, ending: str, rows: int = 5000, **options: Any) -> bytes:
    """Return a table as a file in parts of ``rows``, in the format of the ending."""
    out = io.BytesIO()
    if ending.endswith("parquet"):
        pq.write_table(table, out, row_group_size=rows, **options)
    else:
        make = pa.ipc.new_stream if ending.endswith("arrows") else pa.ipc.new_file
        with make(out, table.schema) as writer:
            writer.write_table(table, max_chunksize=rows)
    return out.getvalue()


def write_tables(folder: Path, ending: str) -> None:
    for shard in range(len(LENGTHS)):
        table = pa.table({"name": pa.array(rows(shard), pa.string())})
        (folder / f"{shard}.{ending}").write_bytes(bytes_of(table, ending, 4))


def name_of(sample: Any) -> str:
    if isinstance(sample, dict):
        sample = sample.get("name", sample.get("txt"))
    return sample.decode() if isinstance(sample, bytes) else str(sample)


class Numbered:
    def __iter__(self) -> Any:
        return iter(NAMES)


async def numbered() -> Any:
    for name in NAMES:
        yield name


def text(folder: Path, **options: Any) -> Any:
    write_text(folder)
    return TextDataset(str(folder / "*.txt"), **options)


def text_gzip(folder: Path, **options: Any) -> Any:
    write_text(folder, ".gz")
    return TextDataset(f"{folder}/{{0..7}}.txt.gz", **options)


def json_lines(folder: Path, **options: Any) -> Any:
    write_json(folder)
    return JSONLinesDataset(sorted(map(str, folder.glob("*.jsonl"))), **options)


def tar(folder: Path, **options: Any) -> Any:
    write_tar(folder)
    return TarDataset("*.tar", store=folder, **options)


def tar_zstd(folder: Path, **options: Any) -> Any:
    write_tar(folder, ".zst")
    return TarDataset(f"file://{folder}/{{0..7}}.tar.zst", **options)


def iterable(_folder: Path, **_options: Any) -> Any:
    return from_iterable(Numbered())


def async_iterable(_folder: Path, **_options: Any) -> Any:
    return from_async_iterable(numbered)


def map_style(_folder: Path, **options: Any) -> Any:
    return from_dataset(NAMES, shuffle=options.get("shuffle", False))


def own(folder: Path, **options: Any) -> Any:
    for shard in range(len(LENGTHS)):
        rec = [struct.pack("<I", len(row)) + row.encode() for row in rows(shard)]
        (folder / f"{shard}.rec").write_bytes(b"".join(rec))
    return ByteStream("*.rec", own_format.records, **{"store": folder, **options})


def parquet(folder: Path, **options: Any) -> Any:
    write_tables(folder, "parquet")
    return ParquetDataset("*.parquet", store=folder, **options)


def arrow(folder: Path, **options: Any) -> Any:
    write_tables(folder, "arrow")
    return ArrowDataset(f"{folder}/{{0..7}}.arrow", **options)


def arrow_streams(folder: Path, **options: Any) -> Any:
    write_tables(folder, "arrows")
    return ArrowDataset(f"{folder}/{{0..7}}.arrows", **options)


def csv(folder: Path, **options: Any) -> Any:
    for shard in range(len(LENGTHS)):
        (folder / f"{shard}.csv").write_text("\n".join(["name", *rows(shard), ""]))
    return CSVDataset("*.csv", store=folder, **options)


def fragments(folder: Path, **options: Any) -> Any:
    write_tables(folder, "feather")
    files = [f"{folder}/{shard}.feather" for shard in range(len(LENGTHS))]
    return from_arrow(ds.dataset(files, format="feather"), **options)


def sqlite(folder: Path, **options: Any) -> Any:
    with contextlib.closing(sqlite3.connect(folder / "a.db")) as database:
        database.execute("DROP TABLE IF EXISTS part")
        database.execute("CREATE TABLE part (number INTEGER PRIMARY KEY, name TEXT)")
        database.executemany("INSERT INTO part VALUES (?, ?)", enumerate(NAMES))
        database.commit()
    url = f"sqlite:///{folder}/a.db"
    return SQLDataset(url, "part", key="number", partitions=9, **options)


@functools.cache
def filled(server: Server) -> str:
    """Make a table of all samples, once in a server's life, and return its URL."""
    database = Database(server)
    values = ", ".join(f"({number}, '{name}')" for number, name in enumerate(NAMES))
    database.run(
        "CREATE TABLE part (number INT PRIMARY KEY, name TEXT)",
        f"INSERT INTO part VALUES {values}",
    )
    return database.url


def postgresql(_folder: Path, **options: Any) -> Any:
    """Return ranges of a table on the server that a fixture has started."""
    url = filled(SHARED[0])
    return SQLDataset(url, "part", **{"key": "number", "partitions": 9, **options})


SHARDED: list[Make] = [text, text_gzip, json_lines, tar, tar_zstd, own]
FILES_OF_TABLES: list[Make] = [parquet, arrow]
MORE_TABLES: list[Make] = [arrow_streams, csv, fragments]
DATABASES: list[Make] = [sqlite, postgresql]
OTHERS: list[Make] = [iterable, async_iterable, map_style]
EVERY: list[Make] = [*SHARDED, *FILES_OF_TABLES, *DATABASES, *OTHERS]


async def read(
    stream: Any, count: int | None = None, state: Any = None, *, errors: Any = ()
) -> tuple[list[Any], Any]:
    """Return ``count`` samples, or all, with ``errors`` among them, and the state."""
    if state is not None:
        stream.load_state_dict(state)
    samples: list[Any] = []
    async with aiter(stream) as iterator:
        while count is None or len(samples) < count:
            try:
                samples.append(await anext(iterator))
            except StopAsyncIteration:
                break
            except errors as error:
                samples.append(error)
        return samples, json.loads(json.dumps(iterator.state_dict()))


async def items(stream: Any) -> list[Any]:
    return (await read(stream))[0]


async def pulled(
    stream: Any,
    sizes: Iterable[int] = (64,),
    count: int | None = None,
    state: Any = None,
    *,
    show: Callable[[Any], Any] = lambda sample: sample,
) -> tuple[list[Any], Any]:
    """Return the first samples mapped by ``show``, pulled in these sizes."""
    if state is not None:
        stream.load_state_dict(state)
    samples: list[Any] = []
    async with aiter(stream) as iterator:
        for size in itertools.cycle(sizes):
            limit = size if count is None else min(size, count - len(samples))
            try:
                block = await iterator.pull(limit) if limit else []
            except StopAsyncIteration:
                break
            assert len(block) <= limit
            if not limit or (iterator.fills and not len(block)):
                break
            samples += map(show, block)
        return samples, json.loads(json.dumps(iterator.state_dict()))


def source_state(state: Any) -> Any:
    """Return the part of a state that is the first reader's, which may be changed."""
    return state["streams"]["0"]["state"]


async def check_resumes(stream: Any, whole: list[Any], stops: Iterable[int]) -> None:
    """Check that a stream resumes after each of these counts of its first epoch."""
    for count in stops:
        stream.set_epoch(0)
        head, state = await read(stream, count)
        rest, _ = await read(stream, state=state)
        assert head + rest == whole, count


async def names(stream: Any) -> list[str]:
    return [name_of(sample) for sample in (await read(stream))[0]]


# -- small pictures of every kind ------------------------------------------------------

SIDE = 6


def pixels(seed: int, *shape: int) -> Any:
    """Return values of uint8, ``(SIDE, SIDE, *shape)``."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (SIDE, SIDE, *shape), dtype=np.uint8)


def encoded(values: Any, name: str = "PNG") -> bytes:
    data = io.BytesIO()
    image = values if isinstance(values, Image.Image) else Image.fromarray(values)
    image.save(data, name)
    return data.getvalue()


# As users have them: nested folders, a name that is the beginning of another, dots,
# upper case, and files that are no images.
TREE = {
    "cat/b.png": 0,
    "cat/z.v2.PNG": 1,
    "cat/more/a.png": 2,
    "cat-b/1.png": 3,
    "dog/10.png": 4,
    "dog/2.jpeg": 5,
    "dog/moving.gif": None,
    "dog/notes.txt": None,
    "readme.md": None,
}


def write_tree(root: Path) -> Path:
    """Write ``TREE``; the values of an image are 40 times its number."""
    for name, number in TREE.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if number is None:
            path.write_text("no picture")
            continue
        values = np.full((SIDE, SIDE, 3), 40 * number, np.uint8)
        path.write_bytes(encoded(values, "JPEG" if "jpeg" in name else "PNG"))
    return root


# -- shards in memory -----------------------------------------------------------------


class Reader(ShardReader):
    """A shard in memory, in blocks of at most ``most`` samples."""

    def __init__(
        self, numbers: list[int], start: int, most: int, make: Callable[..., Block]
    ) -> None:
        self._numbers = numbers
        self._at = start
        self._most = most
        self._make = make

    async def pull(self, limit: int) -> Block:
        """Return the next samples; fail at a negative one."""
        numbers = self._numbers[self._at : self._at + min(limit, self._most)]
        if numbers and numbers[0] < 0:
            raise OSError(f"sample {numbers[0]}")
        numbers = list(itertools.takewhile(lambda number: number >= 0, numbers))
        self._at += len(numbers)
        return self._make(numbers) if numbers else []

    def position(self) -> dict[str, Any]:
        """Return the position of the next sample."""
        return {"at": self._at}

    def is_draining(self) -> bool:
        """Tell whether all was pulled."""
        return self._at >= len(self._numbers)


class Memory(ShardFormat):
    """Shards in memory: sample ``k`` of shard ``s`` is ``100 * s + k``."""

    def __init__(
        self, make: Callable[[list[int]], Block], most: int = 5, made: Any = None
    ) -> None:
        every = [[100 * s + k for k in range(n)] for s, n in enumerate(LENGTHS)]
        self.made: list[list[int]] = every if made is None else made
        self._make = make
        self._most = most

    async def shards(
        self, stack: AsyncExitStack, _known: Any = None, /
    ) -> list[list[int]]:
        """Return the shards, which are lists of their samples."""
        return self.made

    def summary(self, shards: Any) -> dict[str, Any]:
        return {"count": len(shards)}

    def open(self, shard: Any, position: dict[str, Any], budget: int) -> Reader:
        """Return a reader from a position on."""
        return Reader(shard, position.get("at", 0), self._most, self._make)
