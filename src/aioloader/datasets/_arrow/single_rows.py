"""Random access to single rows of memory-mapped local Arrow files."""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from aioloader._base.cancellation import each, in_thread
from aioloader.datasets._arrow.ipc import ArrowFormat, stream_batches
from aioloader.datasets._arrow.rows import Rows
from aioloader.datasets._indexed.local import MAX_OPEN
from aioloader.datasets._stores.failures import Version, file_failure
from aioloader.datasets._stores.storage import Storage
from aioloader.datasets._streams.edges import Edges
from aioloader.datasets._streams.shards import MissingEnd
from aioloader.errors import DatasetError


class MappedTable(NamedTuple):
    """A local Arrow file, with its columns to read and its record batches' lengths."""

    address: str
    path: str
    version: Version
    names: list[str]
    rows_of: Callable[[pa.RecordBatch], pa.RecordBatch]
    missing_end: MissingEnd
    counts: list[int]

    def batches(self) -> list[pa.RecordBatch]:
        """Map the file, and return its record batches; bytes are read on first use."""
        try:
            mapped = pa.memory_map(self.path)
            if mapped.read(6) == b"ARROW1":
                reader = pa.ipc.open_file(mapped)
                count = reader.num_record_batches
                batches = [reader.get_batch(number) for number in range(count)]
            else:
                mapped.seek(0)
                batches = [*stream_batches(mapped, None, self.path, self.missing_end)]
        except (OSError, ValueError) as error:
            raise file_failure(self.path, error) from error
        return [batch.select(self.names) for batch in batches]


class SingleRows:
    """Looks up rows of local files by index; in ``edges``, each batch is a shard."""

    def __init__(
        self, storage: Storage, files: Sequence[MappedTable], edges: Edges
    ) -> None:
        self._storage, self._files, self._edges = storage, files, edges
        # For each record batch: the file's index, and the batch's index in the file.
        self._batches = [
            (number, batch)
            for number, file in enumerate(files)
            for batch in range(len(file.counts))
        ]
        self._opened = lru_cache(MAX_OPEN)(lambda number: files[number].batches())

    def __reduce__(self) -> tuple[Any, ...]:
        return SingleRows, (self._storage, self._files, self._edges)

    def samples(self, indices: Sequence[int]) -> list[Any]:
        """Return the rows at ``indices`` as dicts. Blocks."""
        places = [*map(self._edges.find, indices)]
        used = {self._batches[shard][0] for shard, *_ in places}
        self._check(used)  # reading a mapped file that has shrunk kills the process
        rows = [self._row(*self._batches[shard], row) for shard, row, _ in places]
        self._check(used)
        return rows

    def _check(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._storage.check(
                self._files[number].address, self._files[number].version
            )

    def _row(self, number: int, place: int, row: int) -> dict[str, Any]:
        file = self._files[number]
        batch = self._opened(number)[place].slice(row, 1)
        try:
            batch.validate(full=True)
        except ValueError as error:
            raise DatasetError(
                f"row {row:,} of record batch {place} of {file.path!r} is damaged: "
                f"{error}; write it again, or skip it (on_error='skip')",
                location=file.path,
            ) from error
        return Rows(file.rows_of(batch))[0]


async def single_rows(
    table_format: ArrowFormat, shards: Sequence[Any]
) -> tuple[list[MappedTable], Edges]:
    """Return the shards' files and ``Edges``; raise if a file is remote or filtered."""
    storage = table_format.storage

    async def file_of(address: str) -> MappedTable:
        meta, projection, rows_of = await table_format.opened(address)
        path, names = storage.path(address), projection.present(meta.schema)
        if path is None:
            raise ValueError(
                f"{meta.location!r} is remote, and a row costs all of its record "
                "batch: download the files, or write tars by TarWriter"
            )
        if projection.filters is not None:
            raise ValueError(
                f"filters= of {meta.location!r} would have to read all rows: leave it "
                "out, and take a Subset"
            )
        end = table_format.missing_end
        file = MappedTable(address, path, meta.version, names, rows_of, end, [])
        file.counts.extend(batch.num_rows for batch in await in_thread(file.batches))
        return file

    files = await each(file_of, list(dict.fromkeys(address for address, *_ in shards)))
    counts = [count for file in files for count in file.counts]
    rows = [np.arange(count + 1, dtype=np.uint32) for count in counts]
    return files, Edges(counts, np.concatenate([np.zeros(0, np.uint32), *rows]))
