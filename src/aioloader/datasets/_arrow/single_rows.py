"""Single rows of local Arrow files, which are mapped."""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from aioloader._base.cancellation import each, in_thread
from aioloader.datasets._arrow.files import TableFormat
from aioloader.datasets._arrow.rows import Rows
from aioloader.datasets._indexed.local import MAX_OPEN
from aioloader.datasets._stores.failures import Version
from aioloader.datasets._stores.storage import Storage
from aioloader.datasets._streams.edges import Edges
from aioloader.errors import DatasetError


class MappedTable(NamedTuple):
    """A file: what makes rows of some of its columns, and counts by record batch."""

    address: str
    path: str
    version: Version
    names: list[str]
    rows_of: Callable[[pa.RecordBatch], pa.RecordBatch]
    counts: list[int]

    def batches(self) -> list[pa.RecordBatch]:
        """Return all record batches, whose bytes are read when they are used."""
        mapped = pa.memory_map(self.path)
        if mapped.read(6) == b"ARROW1":
            reader = pa.ipc.open_file(mapped)
            count = reader.num_record_batches
            found = [reader.get_batch(number) for number in range(count)]
        else:
            mapped.seek(0)
            found = [*pa.ipc.open_stream(mapped)]
        return [batch.select(self.names) for batch in found]


class SingleRows:
    """Rows of local files; to ``edges`` each record batch is a shard."""

    def __init__(
        self, storage: Storage, files: Sequence[MappedTable], edges: Edges
    ) -> None:
        self._storage, self._files, self._edges = storage, files, edges
        # Of each record batch: the number of its file, and its own in that.
        self._batches = [
            (number, at)
            for number, file in enumerate(files)
            for at in range(len(file.counts))
        ]
        self._opened = lru_cache(MAX_OPEN)(lambda number: files[number].batches())

    def __reduce__(self) -> tuple[Any, ...]:
        return SingleRows, (self._storage, self._files, self._edges)

    def samples(self, indices: Sequence[int]) -> list[Any]:
        """Return rows, as dicts."""
        places = [*map(self._edges.find, indices)]
        used = {self._batches[shard][0] for shard, *_ in places}
        self._check(used)  # to read one that is shorter ends the process
        made = [self._row(*self._batches[shard], row) for shard, row, _ in places]
        self._check(used)
        return made

    def _check(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._storage.check(
                self._files[number].address, self._files[number].version
            )

    def _row(self, number: int, at: int, row: int) -> dict[str, Any]:
        file = self._files[number]
        one = self._opened(number)[at].slice(row, 1)
        try:
            one.validate(full=True)
        except ValueError as error:
            what = f"row {row:,} of record batch {at} of {file.path!r} is damaged"
            text = f"{what}: {error}; write it again, or skip it (on_error='skip')"
            raise DatasetError(text, location=file.path) from error
        return Rows(file.rows_of(one))[0]


async def single_rows(
    made_by: TableFormat, shards: Sequence[Any]
) -> tuple[list[MappedTable], Edges]:
    """Return the files of shards, and where their rows are.

    Raises:
        ValueError: If some are remote, or rows are filtered.
    """
    storage = made_by.storage

    async def file_of(address: str) -> MappedTable:
        end, wanted, rows_of = await made_by.opened(address)
        path, names = storage.path(address), wanted.present(end.schema)
        if path is None:
            raise ValueError(
                f"{end.location!r} is remote, and a row costs all of its record batch: "
                "download the files, or write tars by TarWriter"
            )
        if wanted.filters is not None:
            raise ValueError(
                f"filters= of {end.location!r} would have to read all rows: leave it "
                "out, and take a Subset"
            )
        file = MappedTable(address, path, end.version, names, rows_of, [])
        file.counts.extend(one.num_rows for one in await in_thread(file.batches))
        return file

    files = await each(file_of, list(dict.fromkeys(address for address, *_ in shards)))
    counts = [count for file in files for count in file.counts]
    rows = [np.arange(count + 1, dtype=np.uint32) for count in counts]
    return files, Edges(counts, np.concatenate(rows))
