"""The law of ends: of a shard that was cut or changed, nothing is missing silently.

Whole samples come, in order; then there is an error, or they are all.
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
# More than is read at once; there is nothing in them to compress.
_BYTES = random.Random(0).randbytes
ROWS = [f"{at}-{_BYTES(1500).hex()}" for at in range(80)]
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
    """Return formats whose shards do not show where they end, but by their length."""
    json_lines = "".join(json.dumps({"name": row}) + "\n" for row in ROWS).encode()
    return {
        "txt": (TextDataset, LINES),
        "jsonl": (JSONLinesDataset, json_lines),
        "csv": (CSVDataset, b"name\n" + LINES),
    }


def marked() -> dict[str, tuple[Callable[..., Any], bytes]]:
    """Return formats whose shards show where they end."""
    members = [Member(f"{at}.txt", row.encode()) for at, row in enumerate(ROWS)]
    bare: dict[str, Any] = {"tar": (TarDataset, archive(members)), **plain()}
    packs: Any = {"gz": gzip.compress, "zst": zstandard.compress}
    found = {
        f"{name}.{ending}": (make, pack(body))
        for name, (make, body) in bare.items()
        for ending, pack in packs.items()
    }
    found["csv.bz2"] = CSVDataset, bz2.compress(plain()["csv"][1])
    shard = shard_of_mds()
    return found | {
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
    "cut": lambda body, where: body[: int(where * len(body))],
    "longer": lambda body, where: body + body[: 1 + int(where * len(body))],
    "another": lambda body, _: body,
    "a hole": lambda body, where: body[: int(where * len(body))].ljust(
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


def read_on(batches: Any, found: list[str]) -> DatasetError | None:
    """Add what comes to ``found``; return the error that ended it."""
    try:
        for batch in batches:
            found += batch
    except DatasetError as error:
        return error
    return None


def check(found: list[str], error: DatasetError | None) -> None:
    assert found == ROWS[: len(found)]
    assert error is not None or found == ROWS


CUTS = st.sampled_from([*MARKED]), st.floats(0, 1, exclude_max=True)


def check_cut(form: str, where: float, mode: dict[str, Any]) -> None:
    """Check a format that shows the end; a tar's padding may be missing."""
    with shard_of(form) as (path, body, loader):
        put(path, body[: int(where * len(body))])
        found: list[str] = []
        error = read_on(loader(**mode), found)
        check(found, error)
        assert isinstance(error, TruncatedReadError | None)


@given(*CUTS, st.sampled_from(MODES))
def test_any_cut(form: str, where: float, mode: dict[str, Any]) -> None:
    check_cut(form, where, mode)


@given(*CUTS, st.sampled_from(["loader", "workers"]))
@settings(
    max_examples=settings().max_examples // 30,
    phases=[Phase.generate],  # making it smaller would take minutes
)
def test_any_cut_in_workers(form: str, where: float, fetch: str) -> None:
    check_cut(form, where, {"num_workers": 1, "fetch": fetch})


CHANGED = given(
    st.sampled_from([*EVERY]),
    st.integers(1, BATCHES - 1),
    st.sampled_from([*CHANGES]),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from(MODES),
)


@CHANGED
def test_any_change_while_it_is_read(
    form: str, k: int, change: str, where: float, mode: dict[str, Any]
) -> None:
    with shard_of(form) as (path, body, loader):
        batches = iter(loader(**mode))
        found = [name for _ in range(k) for name in next(batches)]
        put(path, CHANGES[change](body, where))
        check(found, read_on(batches, found))


@given(st.floats(0, 1, exclude_max=True))
@settings(max_examples=settings().max_examples // 4)
def test_any_cut_of_a_database(where: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        stream = sqlite(Path(folder))
        path = Path(folder) / "a.db"
        os.truncate(path, int(where * path.stat().st_size))
        with pytest.raises(DatasetError):
            list(DataLoader(stream, 3, collate_fn=collated))
