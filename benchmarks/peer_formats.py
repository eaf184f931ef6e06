"""The same samples in the format of each peer, for ``peers.py``.

19,968 samples of 20,000 bytes, 400 MB: noise that starts with the sample's number. 24
shards of 832 each, where the format has shards; nothing is compressed. Both numbers are
divisible by the batch size of 64 and by four workers, so no peer drops or repeats any
sample.
"""

from __future__ import annotations

import mmap
import sys
import tarfile
import types
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shard_server import NUMBER_BYTES, SAMPLE_BYTES, sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SHARDS = 24
PER_SHARD = 832
SAMPLES = SHARDS * PER_SHARD


def names(folder: str, ending: str) -> list[str]:
    """Name the shards of a format; the folder of the format is its ending."""
    place = Path(folder) / ending
    place.mkdir(exist_ok=True)
    return [str(place / f"{shard:03}.{ending}") for shard in range(SHARDS)]


def packed(folder: str) -> str:
    """Name the file of all samples, one after the other."""
    return str(Path(folder) / "samples.bin")


def body_of(data: Any, number: int) -> bytes:
    return bytes(data[number * SAMPLE_BYTES : (number + 1) * SAMPLE_BYTES])


def numbers_of(batch: torch.Tensor) -> list[int]:
    """Read the numbers of a batch of shape ``(n, 20_000)``, dtype uint8."""
    assert batch.shape[1] == SAMPLE_BYTES
    found: list[int] = (
        batch[:, :NUMBER_BYTES].contiguous().view(torch.int64).flatten().tolist()
    )
    return found


def stack(bodies: Sequence[Any]) -> torch.Tensor:
    """Copy bytes into the rows of a new uint8 tensor: the collate of all peers."""
    batch = torch.empty((len(bodies), SAMPLE_BYTES), dtype=torch.uint8)
    rows = batch.numpy()
    for row, body in enumerate(bodies):
        rows[row] = np.frombuffer(body, dtype=np.uint8)
    return batch


def bodies_by_shard(folder: str) -> Iterator[tuple[int, list[bytes]]]:
    """Read all samples, a shard at a time."""
    with Path(packed(folder)).open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    for shard in range(SHARDS):
        first = shard * PER_SHARD
        yield shard, [body_of(data, n) for n in range(first, first + PER_SHARD)]


def write_packed(folder: str) -> None:
    with Path(packed(folder)).open("wb") as file:
        file.writelines(sample(number) for number in range(SAMPLES))


def write_tar(folder: str) -> None:
    paths = names(folder, "tar")
    for shard, bodies in bodies_by_shard(folder):
        with tarfile.open(paths[shard], "w", format=tarfile.USTAR_FORMAT) as tar:
            for place, body in enumerate(bodies):
                member = tarfile.TarInfo(f"{shard:03}{place:06}.bin")
                member.size = len(body)
                tar.addfile(member, BytesIO(body))


def mosaic(name: str) -> Any:
    """Import a module of MosaicML Streaming, without its packages' other imports.

    They import torchvision, transformers and the clients of all clouds; local shards
    need none of them, and torchvision's wheel does not fit a CPU build of torch.
    """
    root = next(
        Path(path) / "streaming"
        for path in sys.path
        if (Path(path) / "streaming" / "base").is_dir()
    )
    for package, place in (("streaming", root), ("streaming.base", root / "base")):
        module = types.ModuleType(package)
        module.__path__ = [str(place)]
        sys.modules.setdefault(package, module)
    __import__(name)
    return sys.modules[name]


def write_mds(folder: str) -> None:
    writer = mosaic("streaming.base.format").MDSWriter
    out = str(Path(folder) / "mds")
    limit = PER_SHARD * (SAMPLE_BYTES + 16)
    with writer(out=out, columns={"bin": "bytes"}, size_limit=limit) as mds:
        for _, bodies in bodies_by_shard(folder):
            for body in bodies:
                mds.write({"bin": body})


def write_lit(folder: str) -> None:
    from litdata.streaming.writer import BinaryWriter  # noqa: PLC0415

    writer = BinaryWriter(str(Path(folder) / "lit"), chunk_size=PER_SHARD)
    number = 0
    for _, bodies in bodies_by_shard(folder):
        for body in bodies:
            writer.add_item(number, {"bin": body})
            number += 1
    writer.done()
    writer.merge()


def write_arrayrecord(folder: str) -> None:
    from array_record.python.array_record_module import (  # noqa: PLC0415
        ArrayRecordWriter,
    )

    paths = names(folder, "array_record")
    for shard, bodies in bodies_by_shard(folder):
        writer = ArrayRecordWriter(paths[shard], "group_size:1,uncompressed")
        for body in bodies:
            writer.write(body)
        writer.close()


def write_tfrecord(folder: str) -> None:
    import tensorflow as tf  # noqa: PLC0415

    paths = names(folder, "tfrecord")
    for shard, bodies in bodies_by_shard(folder):
        with tf.io.TFRecordWriter(paths[shard]) as writer:
            for body in bodies:
                writer.write(body)


def write_parquet(folder: str) -> None:
    import pyarrow as pa  # noqa: PLC0415
    from pyarrow import parquet  # noqa: PLC0415

    paths = names(folder, "parquet")
    for shard, bodies in bodies_by_shard(folder):
        table = pa.table({"bin": pa.array(bodies, pa.binary(SAMPLE_BYTES))})
        parquet.write_table(
            table, paths[shard], compression="none", use_dictionary=False
        )


WRITERS: dict[str, Callable[[str], None]] = {
    "packed": write_packed,
    "tar": write_tar,
    "mds": write_mds,
    "lit": write_lit,
    "array_record": write_arrayrecord,
    "tfrecord": write_tfrecord,
    "parquet": write_parquet,
}


if __name__ == "__main__":
    for write in WRITERS.values():
        write(sys.argv[1])
