"""Peers with random access to local samples, for ``indexed.py``.

Each has the samples of the tars in its own format, and gives them to torch's loader by
number, without workers, shuffled, in lists of 64: uncompressed, and by the batch where
it can. wids reads the tars themselves.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, Dataset

from indexed_server import SHAPES, number_of, paths_of
from peer_formats import mosaic

if TYPE_CHECKING:
    from collections.abc import Iterator

BATCH = 64
# Opens the samples of a label in a folder: the dataset, and what a sample's body is.
Open = Callable[[str, str], tuple[Any, Callable[[Any], Any]]]


def bodies_by_shard(folder: str, label: str) -> Iterator[list[bytes]]:
    """Read all samples, a shard at a time."""
    size, _, count = SHAPES[label]
    step = 512 + size
    for path in paths_of(folder, label):
        data = Path(path).read_bytes()
        yield [data[at : at + size] for at in range(512, count * step, step)]


class Preads(Dataset[bytes]):
    """The limit: a read of the body, whose place is known."""

    def __init__(self, folder: str, label: str) -> None:
        self._shape = SHAPES[label]
        paths = paths_of(folder, label)
        self._files = [os.open(path, os.O_RDONLY) for path in paths]

    def __len__(self) -> int:
        return self._shape.count

    def __getitems__(self, indices: list[int]) -> list[bytes]:
        size, _, count = self._shape
        step, files, read = 512 + size, self._files, os.pread
        return [
            read(files[one // count], size, one % count * step + 512) for one in indices
        ]


def preads(folder: str, label: str) -> Any:
    return Preads(folder, label), bytes


def wids(folder: str, label: str) -> Any:
    from wids import ShardListDataset  # noqa: PLC0415

    shape = SHAPES[label]
    paths = paths_of(folder, label)
    shards = [{"url": path, "nsamples": shape.per_shard} for path in paths]
    dataset = ShardListDataset(
        shards,
        lru_size=shape.shards,
        localname=str,
        transformations=[],
        keep=True,
    )
    return dataset, lambda sample: sample[".bin"].getvalue()


def mosaic_local(folder: str, label: str) -> Any:
    writer = mosaic("streaming.base.format").MDSWriter
    out, shape = f"{folder}/{label}-mds", SHAPES[label]
    limit = shape.per_shard * (shape.size + 16)
    with writer(out=out, columns={"bin": "bytes"}, size_limit=limit) as mds:
        for bodies in bodies_by_shard(folder, label):
            for body in bodies:
                mds.write({"bin": body})
    dataset = mosaic("streaming.base.local").LocalDataset(out)
    return dataset, lambda sample: sample["bin"]


def array_record(folder: str, label: str) -> Any:
    from array_record.python.array_record_data_source import (  # noqa: PLC0415
        ArrayRecordDataSource,
    )
    from array_record.python.array_record_module import (  # noqa: PLC0415
        ArrayRecordWriter,
    )

    paths = [f"{path}.array_record" for path in paths_of(folder, label)]
    for path, bodies in zip(paths, bodies_by_shard(folder, label), strict=True):
        writer = ArrayRecordWriter(path, "group_size:1,uncompressed")
        for body in bodies:
            writer.write(body)
        writer.close()
    return ArrayRecordDataSource(paths), lambda sample: sample


def tables(folder: str, label: str) -> Iterator[Any]:
    import pyarrow as pa  # noqa: PLC0415

    for bodies in bodies_by_shard(folder, label):
        yield pa.table({"bin": pa.array(bodies, pa.large_binary())})


def hugging_face(folder: str, label: str) -> Any:
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    import pyarrow as pa  # noqa: PLC0415

    import datasets  # noqa: PLC0415

    parts = []
    for shard, table in enumerate(tables(folder, label)):
        path = f"{folder}/{label}-{shard}.arrow"
        with pa.OSFile(path, "wb") as file, pa.ipc.new_stream(file, table.schema) as to:
            to.write_table(table)
        parts.append(datasets.Dataset.from_file(path))
    return datasets.concatenate_datasets(parts), lambda sample: sample["bin"]


class Taken(Dataset[bytes]):
    """Lance's rows by number, a batch by one call."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return int(self._dataset.count_rows())

    def __getitems__(self, indices: list[int]) -> list[bytes]:
        bodies: list[bytes] = self._dataset.take(indices).column("bin").to_pylist()
        return bodies


def lance(folder: str, label: str) -> Any:
    import lance  # noqa: PLC0415

    out = f"{folder}/{label}.lance"
    for table in tables(folder, label):
        lance.write_dataset(table, out, mode="append" if Path(out).exists() else None)
    return Taken(lance.dataset(out)), lambda sample: sample


PEERS: dict[str, Open] = {
    "bare pread": preads,
    "wids": wids,
    "Mosaic LocalDataset": mosaic_local,
    "ArrayRecord": array_record,
    "Hugging Face Arrow": hugging_face,
    "Lance take": lance,
}


def way_of(name: str, folder: str, label: str) -> Callable[[], list[int]]:
    """Return what reads an epoch, and returns the numbers of its samples."""
    dataset, body_of = PEERS[name](folder, label)
    size = SHAPES[label].size
    loader = DataLoader(dataset, BATCH, shuffle=True, collate_fn=list)

    def read() -> list[int]:
        return [number_of(body_of(one), size) for batch in loader for one in batch]

    return read
