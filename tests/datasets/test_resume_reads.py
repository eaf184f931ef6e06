"""What a resumed stream reads again, as ``docs/guides/shards.md`` has it."""

import gzip
import struct
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import own_format
import pyarrow as pa
import pytest

from aioloader import DataLoader
from aioloader.datasets import (
    ArrowDataset,
    ByteStream,
    ParquetDataset,
    TarDataset,
    TextDataset,
)
from datasets.shards import bytes_of
from datasets.tar_archives import Member, archive
from object_server import ObjectServer

MB = 1 << 20
# A shard that several requests read, and one that a single request does.
LARGE, SMALL = 2_400, 100
SAMPLE = 10_000


def lines(count: int) -> bytes:
    return (b"x" * (SAMPLE - 1) + b"\n") * count


def records(count: int) -> bytes:
    return (struct.pack("<I", SAMPLE) + b"x" * SAMPLE) * count


def tar(count: int) -> bytes:
    return archive(Member(f"{n:05}.bin", b"x" * SAMPLE) for n in range(count))


def packed(count: int) -> bytes:
    """Lines that do not compress."""
    noise = np.random.default_rng(0)
    rows = (noise.bytes(SAMPLE // 2).hex().encode() + b"\n" for _ in range(count))
    return gzip.compress(b"".join(rows), 1)


def arrow(count: int, ending: str = "arrow") -> bytes:
    return bytes_of(pa.table({"body": [b"x" * SAMPLE] * count}), ending, 10)


def parquet(count: int) -> bytes:
    """Four row groups."""
    table, plain = pa.table({"body": [b"x" * SAMPLE] * count}), {"compression": "none"}
    return bytes_of(table, "parquet", count // 4, use_dictionary=False, **plain)


def read_after_resuming(
    make: Callable[[str], Any], data: bytes, share: float, ending: str = ""
) -> tuple[int, int]:
    """Resume in the second of two shards; return bytes read of each."""
    names = [f"0{ending}", f"1{ending}"]
    objects = dict.fromkeys(names, data)

    def loader(server: ObjectServer) -> DataLoader[Any]:
        stream = make(f"{server.url}/{{0,1}}{ending}")
        return DataLoader(stream, 25, collate_fn=list)

    with ObjectServer(objects) as server, loader(server) as whole:
        batches = len([*whole])
    with ObjectServer(objects) as server, loader(server) as first:
        iterator = iter(first)
        for _ in islice(iterator, int(batches * (1 + share) / 2)):
            pass
        state = first.state_dict()
        iterator.close()
    with ObjectServer(objects) as server, loader(server) as resumed:
        resumed.load_state_dict(state)
        assert len([*resumed]) == batches - int(batches * (1 + share) / 2)
        return server.counts(names[0]).bytes, server.counts(names[1]).bytes


OWN: Any = partial(ByteStream, make=own_format.records)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.3, 0.65, 0.95])
@pytest.mark.parametrize(
    ("stream", "make"),
    [
        (TextDataset, lines),
        (TarDataset, tar),
        (ArrowDataset, arrow),
        (OWN, records),
    ],
)
def test_up_to_eight_megabytes(
    stream: Any, make: Callable[[int], bytes], share: float
) -> None:
    data = make(LARGE)
    before, open_one = read_after_resuming(stream, data, share)
    assert before < MB  # of Arrow files the footers
    assert open_one <= (1 - share) * len(data) + 8 * MB + 4 * SAMPLE


@pytest.mark.slow
def test_the_row_group() -> None:
    data = parquet(LARGE)
    before, open_one = read_after_resuming(ParquetDataset, data, 0.6)
    assert before < MB
    assert len(data) / 2 < open_one < len(data) * 0.55


@pytest.mark.parametrize(
    ("stream", "make", "ending"),
    [
        (TextDataset, packed, ".gz"),
        (ArrowDataset, partial(arrow, ending="arrows"), ""),
    ],
    ids=["gzip", "arrow stream"],
)
def test_the_shard_from_its_start(
    stream: Any, make: Callable[[int], bytes], ending: str
) -> None:
    data = make(SMALL)
    _, open_one = read_after_resuming(stream, data, 0.8, ending)
    assert open_one >= len(data)


@pytest.mark.slow
def test_the_window() -> None:
    """Of 2,000 samples: 2,400 of 4,800 are before it, and 600 were delivered of it."""

    def stream(address: str) -> Any:
        return TextDataset(address).shuffle(2_000)

    _, unshuffled = read_after_resuming(TextDataset, lines(LARGE), 0.6)
    before, open_one = read_after_resuming(stream, lines(LARGE), 0.6)
    again = before + open_one - unshuffled
    assert 0 < again <= 2_000 * SAMPLE + 8 * MB
