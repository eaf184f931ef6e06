"""Read your own format: a generator of four lines makes a dataset of shards.

The dataset shuffles, is split among ranks and workers, and resumes at any record, from
disk, a store or the web. Run it with ``python examples/own_format.py``.
"""

import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aioloader import DataLoader
from aioloader.datasets import ByteStream, ShardFile


def records(file: ShardFile) -> Iterator[bytes]:
    """Yield records, each preceded by its length; the file may start at any record."""
    while file.peek(1):
        (length,) = struct.unpack("<I", file.readexactly(4))
        yield file.readexactly(length)


def main() -> None:
    """Write four shards and load them, resuming once."""
    data = b"".join(struct.pack("<I", at) + b"x" * at for at in range(100))
    with tempfile.TemporaryDirectory() as folder:
        for shard in range(4):
            (Path(folder) / f"{shard}.rec").write_bytes(data)
        dataset = ByteStream[bytes](
            f"{folder}/*.rec", records, shuffle=True, interleave=2
        )
        with DataLoader[Any](dataset, batch_size=32, collate_fn=list) as loader:
            for number, _batch in enumerate(loader, 1):
                if number == 3:
                    state = loader.state_dict()
                    break
            loader.load_state_dict(state)
            rest = sum(map(len, loader))
    print(f"{3 * 32} records, and {rest} after a restart")


if __name__ == "__main__":
    main()
