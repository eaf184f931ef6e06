"""The law of ends: a shard that was cut or changed never loses samples silently.

Whole samples come in order; then there is an error, or none is missing.
"""

import bz2
import functools
import gzip
import itertools
import json
import os
import random
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from aioloader import DataLoader
from aioloader.datasets import (
    ArrowDataset,
    CSVDataset,
    JSONLinesDataset,
    MDSDataset,
    ParquetDataset,
    TarDataset,
    TextDataset,
)
from aioloader.errors import DatasetError, TruncatedReadError
from datasets.shards import bytes_of, name_of, put, sqlite
from datasets.tar_archives import Member, archive

pytestmark = pytest.mark.law
# More bytes than one read takes; random, so they do not compress.
_BYTES = random.Random(0).randbytes
ROWS = [f"{k}-{_BYTES(1500).hex()}" for k in range(80)]
TABLE = pa.table({"name": ROWS})
LINES = "".join(f"{row}\n" for row in ROWS).encode()
BATCHES = -(-len(ROWS) // 3)


def shard_of_mds() -> bytes:
    samples = [struct.pack("<I", len(row)) + row.encode() for row in ROWS]
    first = 4 + 4 * (len(samples) + 1)
    offsets = itertools.accumulate(map(len, samples), initial=first)
    return b"".join(
        [struct.pack(f"<{len(samples) + 2}I", len(samples), *offsets), *samples]
    )


def mds(path: str, packed: Any = None, **options: Any) -> MDSDataset:
    entry = {
        "format": "mds", "version": 2, "samples": len(ROWS), "compression": packed,
        "column_names": ["name"], "column_encodings": ["str"], "column_sizes": [None],
        "raw_data": {"basename": Path(path).name, "bytes": len(shard_of_mds())},
        "zip_data": packed and {"basename": Path(path).name},
    }  # fmt: skip
    text = json.dumps({"version": 2, "shards": [entry]})
    (Path(path).parent / "index.json").write_text(text)
    return MDSDataset(str(Path(path).parent), **options)


def plain() -> dict[str, tuple[Callable[..., Any], bytes]]:
    """Return formats whose shards have no end marker."""
    json_lines = "".join(json.dumps({"name": row}) + "\n" for row in ROWS).encode()
    return {
        "txt": (TextDataset, LINES),
        "jsonl": (JSONLinesDataset, json_lines),
        "csv": (CSVDataset, b"name\n" + LINES),
    }


def marked() -> dict[str, tuple[Callable[..., Any], bytes]]:
    """Return formats whose shards have an end marker or an index."""
    members = [Member(f"{k}.txt", row.encode()) for k, row in enumerate(ROWS)]
    bare: dict[str, Any] = {"tar": (TarDataset, archive(members)), **plain()}
    packs: Any = {"gz": gzip.compress, "zst": zstandard.compress}
    formats = {
        f"{name}.{ending}": (make, pack(body))
        for name, (make, body) in bare.items()
        for ending, pack in packs.items()
    }
    formats["csv.bz2"] = CSVDataset, bz2.compress(plain()["csv"][1])
    shard = shard_of_mds()
    return formats | {
        "tar": bare["tar"],
        "parquet": (ParquetDataset, bytes_of(TABLE, "parquet", 9)),
        "arrow": (ArrowDataset, bytes_of(TABLE, "arrow", 9)),
        "arrows": (ArrowDataset, bytes_of(TABLE, "arrows", 9)),
        "mds": (mds, shard),
        "mds.gz": (functools.partial(mds, packed="gz"), gzip.compress(shard)),
        "mds.zst": (functools.partial(mds, packed="zstd"), zstandard.compress(shard)),
    }


MARKED, EVERY = marked(), marked() | plain()
MODES: list[dict[str, Any]] = [
    {},
    {"prefetch_factor": 2},
    {"num_workers": 1, "workers": "thread"},
]


CHANGES: dict[str, Callable[[bytes, float], bytes]] = {
    "cut": lambda body, share: body[: int(share * len(body))],
    "longer": lambda body, share: body + body[: 1 + int(share * len(body))],
    "another": lambda body, _: body,
    "a hole": lambda body, share: body[: int(share * len(body))].ljust(
        len(body), b"\0"
    ),
}


@contextmanager
def shard_of(form: str) -> Iterator[tuple[Path, bytes, Callable[..., Any]]]:
    make, body = EVERY[form]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"a.{form}".replace("arrows", "arrow")
        put(path, body)

        def loader(**mode: Any) -> Any:
            return DataLoader(
                make(str(path), max_bytes=1 << 16), 3, collate_fn=collated, **mode
            )

        yield path, body, loader


def collated(samples: list[Any]) -> list[str]:
    return [name_of(sample) for sample in samples]


def read_on(batches: Any, rows: list[str]) -> DatasetError | None:
    """Append all samples; return the error that ended the stream, if any."""
    try:
        for batch in batches:
            rows += batch
    except DatasetError as error:
        return error
    return None


def check(names: list[str], error: DatasetError | None) -> None:
    assert names == ROWS[: len(names)]
    assert error is not None or names == ROWS


CUTS = st.sampled_from([*MARKED]), st.floats(0, 1, exclude_max=True)


def check_cut(form: str, share: float, mode: dict[str, Any]) -> None:
    """Check a format with an end marker; a tar's padding may be missing."""
    with shard_of(form) as (path, body, loader):
        put(path, body[: int(share * len(body))])
        names: list[str] = []
        error = read_on(loader(**mode), names)
        check(names, error)
        assert isinstance(error, TruncatedReadError | None)


@given(*CUTS, st.sampled_from(MODES))
def test_a_cut_shard_is_noticed(form: str, share: float, mode: dict[str, Any]) -> None:
    check_cut(form, share, mode)


@given(*CUTS, st.sampled_from(["loader", "workers"]))
@settings(
    max_examples=settings().max_examples // 30,
    phases=[Phase.generate],  # making it smaller would take minutes
)
def test_a_cut_shard_is_noticed_in_workers(form: str, share: float, fetch: str) -> None:
    check_cut(form, share, {"num_workers": 1, "fetch": fetch})


CHANGED = given(
    st.sampled_from([*EVERY]),
    st.integers(1, BATCHES - 1),
    st.sampled_from([*CHANGES]),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from(MODES),
)


@CHANGED
def test_a_shard_changed_while_read_is_noticed(
    form: str, k: int, change: str, share: float, mode: dict[str, Any]
) -> None:
    with shard_of(form) as (path, body, loader):
        batches = iter(loader(**mode))
        names = [name for _ in range(k) for name in next(batches)]
        put(path, CHANGES[change](body, share))
        check(names, read_on(batches, names))


@given(st.floats(0, 1, exclude_max=True))
@settings(max_examples=settings().max_examples // 4)
def test_a_cut_database_raises(share: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        stream = sqlite(Path(folder))
        path = Path(folder) / "a.db"
        os.truncate(path, int(share * path.stat().st_size))
        with pytest.raises(DatasetError):
            list(DataLoader(stream, 3, collate_fn=collated))
