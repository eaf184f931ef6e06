"""Read your own format: a parser of three methods makes a dataset of shards.

The dataset shuffles, is split among ranks and workers, and resumes at any record. Run
it with ``python examples/own_format.py``.
"""

import struct
import tempfile
from pathlib import Path
from typing import Any

from aioloader import DataLoader
from aioloader.datasets import ByteStream
from aioloader.testing import check_parser


class RecordParser:
    """Parses records: ``feed`` pieces of any size, ``take`` whole records."""

    def __init__(self, url: str, offset: int) -> None:
        self.offset = offset  # offset of the next record in the shard
        self.is_over = False
        self._url = url
        self._rest = b""
        self._has_ended = False

    def feed(self, piece: Any) -> None:
        """Add bytes; the piece is invalid after the next ``take``."""
        self._rest += bytes(piece)

    def end(self) -> None:
        """Note that there are no more bytes."""
        self._has_ended = True

    def take(self, limit: int) -> list[Any]:
        """Return up to ``limit`` records; fewer only if more bytes are needed."""
        records: list[bytes] = []
        at = 0
        while len(records) < limit and at + 4 <= len(self._rest):
            stop = at + 4 + struct.unpack_from("<I", self._rest, at)[0]
            if stop > len(self._rest):
                break
            records.append(self._rest[at + 4 : stop])
            at = stop
        self._rest, self.offset = self._rest[at:], self.offset + at
        if self._has_ended and self._rest and not records:
            raise ValueError(
                f"{self._url!r} ends within a record, byte {self.offset:,}"
            )
        return records


class RecordDataset(ByteStream[bytes]):
    """A stream of records."""

    def __init__(self, addresses: Any, **options: Any) -> None:
        super().__init__(addresses, RecordParser, **options)


def main() -> None:
    """Check the parser, write four shards, and load them, resuming once."""
    data = b"".join(struct.pack("<I", at) + b"x" * at for at in range(100))
    check_parser(RecordParser, data)
    with tempfile.TemporaryDirectory() as folder:
        for shard in range(4):
            (Path(folder) / f"{shard}.rec").write_bytes(data)
        dataset = RecordDataset(f"{folder}/*.rec", shuffle=True, interleave=2)
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
