"""Peers with formats of their own, for ``tar.py``: LitData.

Run with the Python of a separate environment that has it and the benchmarks'
dependencies, because it brings many packages. Writes the samples of the shards in the
peer's format, reads it with the peer's loader without workers, in lists of 64, and
prints its figures as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remote import BATCH
from shard_server import SAMPLE_BYTES, SAMPLES, paths
from tar import LOCAL, epoch, fields, timed

if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNK_BYTES = 32 << 20


def samples(folder: str) -> Iterator[bytes]:
    """Read the bodies of the shards; each has one header of 512 bytes."""
    step = 512 + -(-SAMPLE_BYTES // 512) * 512
    for path in paths(folder, LOCAL):
        data = Path(path).read_bytes()
        for at in range(512, SAMPLES * step, step):
            yield data[at : at + SAMPLE_BYTES]


def write_lit(folder: str, out: str) -> None:
    from litdata.streaming.writer import BinaryWriter  # noqa: PLC0415

    writer = BinaryWriter(out, chunk_bytes=CHUNK_BYTES)
    for number, body in enumerate(samples(folder)):
        writer.add_item(number, {"bin": body})
    writer.done()
    writer.merge()


def lit(folder: str, out: str) -> Any:
    from litdata import StreamingDataLoader, StreamingDataset  # noqa: PLC0415

    write_lit(folder, out)
    dataset = StreamingDataset(out, shuffle=False)
    return StreamingDataLoader(dataset, batch_size=BATCH, collate_fn=list)


def main() -> None:
    name, folder, seconds = sys.argv[1:]
    with tempfile.TemporaryDirectory(dir=folder) as out:
        batches = {"LitData": lit}[name](folder, out)
        once = partial(epoch, batches, fields, LOCAL)
        print(json.dumps(timed(once, LOCAL, float(seconds))), flush=True)


if __name__ == "__main__":
    main()
