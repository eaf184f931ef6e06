"""Parquet: how fast do columns become batches of tensors?

Two million rows of eight numeric columns and a short string, in two files of about
64 MB with row groups of 100,000 rows, on disk and in its cache; batches of 1,024, in
the order of the files. A batch is a dict of column to tensor, or to a list of strings.
The limit is pyarrow's own ``iter_batches``, without its threads, which make batches of
this size slower, and ``torch.from_numpy`` per column. An epoch starts with opening the
files.

Hugging Face datasets and Ray Data run where they are installed. They are no
dependencies of the benchmarks, because they bring many others along: install aioloader,
``datasets`` and ``ray[data]`` into a separate environment, and run this script with its
Python.

Ray cannot make a tensor of a string, and skips that column. Contenders that take a row
at a time through Hugging Face's formatter get 200,000 rows, because they take minutes.
"""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet as pq
from torch.utils.data import DataLoader

from harness import Contender, Figures, Metric, Options, Question, Target, main
from meter import Meter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

BATCH = 1_024
ROWS, GROUP, FILES = 2_000_000, 100_000, 2
# rows of the full files, of those for row-at-a-time contenders, and to warm up
SIZES = {"full": ROWS, "small": 200_000, "tiny": 20_000}
FLOATS = ("a", "b", "c", "d")
NUMBERS = ("id", *FLOATS, "e", "f", "label")
TWO = ("id", "a")

Batch = dict[str, Any]
Columns = tuple[str, ...] | None


# -- the files ------------------------------------------------------------------------


def table(first: int, rows: int) -> pa.Table:
    """Make rows that hardly compress."""
    rng = np.random.default_rng(first)
    columns: dict[str, Any] = {"id": np.arange(first, first + rows)}
    columns |= {name: rng.random(rows) for name in FLOATS}
    columns |= {name: rng.random(rows, np.float32) for name in ("e", "f")}
    columns["label"] = rng.integers(0, 1_000, rows, np.int64)
    columns["name"] = [f"row {number:07d}" for number in range(first, first + rows)]
    return pa.table(columns)


@contextlib.contextmanager
def serve() -> Iterator[str]:
    """Write the files; yield the folder they are in."""
    with tempfile.TemporaryDirectory(prefix="aioloader-parquet-") as folder:
        for size, rows in SIZES.items():
            for number in range(FILES):
                path = Path(folder, f"{size}-{number}.parquet")
                made = table(number * rows // FILES, rows // FILES)
                pq.write_table(made, path, row_group_size=GROUP)
        yield folder


# -- contenders -----------------------------------------------------------------------


def ours(
    paths: list[str], *, columns: Columns = None, interleave: int = 1
) -> Iterable[Batch]:
    import aioloader  # noqa: PLC0415
    from aioloader.datasets import ParquetDataset  # noqa: PLC0415

    dataset: Any = ParquetDataset(paths, columns, interleave=interleave)
    loader: Iterable[Batch] = aioloader.DataLoader(dataset, BATCH)
    return loader


def bare(
    paths: list[str], *, columns: Columns = None, threads: bool = False
) -> Iterator[Batch]:
    """Return the limit: batches end where a file does."""
    for path in paths:
        wanted = None if columns is None else list(columns)
        with pq.ParquetFile(path) as file:
            batches = file.iter_batches(BATCH, columns=wanted, use_threads=threads)
            for batch in batches:
                yield {name: tensor(batch.column(name)) for name in batch.column_names}


def tensor(column: pa.Array) -> Any:
    if pa.types.is_string(column.type):
        return column.to_pylist()
    return torch.from_numpy(np.array(column.to_numpy()))


def stream(paths: list[str], columns: Columns) -> Any:
    """Open the files as Hugging Face's streams do."""
    # files on this disk need no hub, and progress bars no terminal
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    from datasets import load_dataset  # noqa: PLC0415

    made: Any = load_dataset(
        "parquet",
        data_files=paths,
        split="train",
        streaming=True,
        columns=None if columns is None else list(columns),
    )
    return made.with_format("torch")


def hugging_face(
    paths: list[str], *, workers: int, columns: Columns = None
) -> Iterable[Batch]:
    """Feed torch's loader row by row, as documented."""
    made: DataLoader[Batch] = DataLoader(
        stream(paths, columns), BATCH, num_workers=workers
    )
    return made


def hugging_face_batches(
    paths: list[str], *, columns: Columns = None
) -> Iterable[Batch]:
    """Let it make the batches, which is the fastest path through it."""
    made: Iterable[Batch] = stream(paths, columns).iter(BATCH)
    return made


def ray_data(paths: list[str], *, columns: tuple[str, ...]) -> Iterable[Batch]:
    import ray.data  # noqa: PLC0415

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False, logging_level="error")
    read = ray.data.read_parquet(paths, columns=list(columns))
    made: Iterable[Batch] = read.iter_torch_batches(batch_size=BATCH)
    return made


# -- the clock ------------------------------------------------------------------------


def epoch(make: Callable[[list[str]], Iterable[Batch]], paths: list[str]) -> int:
    """Read all, and check that each row came once."""
    rows = keys = 0
    for batch in make(paths):
        rows += len(batch["id"])
        keys += int(batch["id"].sum())
    if keys != rows * (rows - 1) // 2:
        raise RuntimeError(f"the keys of {rows} rows sum up to {keys}")
    return rows


def run(
    make: Callable[[list[str]], Iterable[Batch]], size: str, options: Options
) -> Figures:
    """Read the tiny files, so that all is imported, and then the measured ones."""
    if options.quick:
        size = "tiny" if size == "small" else "small"
    warm, paths = (
        sorted(map(str, Path(options.url).glob(f"{one}-*.parquet")))
        for one in ("tiny", size)
    )
    epoch(make, warm)
    gc.collect()
    with Meter() as meter:
        rows = epoch(make, paths)
    if rows != SIZES[size]:
        raise RuntimeError(f"{rows} rows seen, {SIZES[size]} expected")
    threads = {f"cpu:{name}": one for name, one in meter.threads.items() if one > 0.01}
    return {"rows": rows / meter.wall, "cpu": meter.cpu / rows * 1e6, **threads}


# -- the question ---------------------------------------------------------------------


def makers(columns: Columns) -> dict[str, Callable[[list[str]], Iterable[Batch]]]:
    """Return the contenders that can run here."""
    made: dict[str, Callable[[list[str]], Iterable[Batch]]] = {
        "aioloader": partial(ours, columns=columns),
        "aioloader interleave 4": partial(ours, columns=columns, interleave=4),
        "limit": partial(bare, columns=columns),
        "limit threads": partial(bare, columns=columns, threads=True),
    }
    if find_spec("datasets"):
        made |= {
            f"HF datasets {count} workers": partial(
                hugging_face, workers=count, columns=columns
            )
            for count in (0, 2)
        }
        made["HF datasets batches"] = partial(hugging_face_batches, columns=columns)
    if find_spec("ray"):
        made["Ray Data"] = partial(ray_data, columns=columns or NUMBERS)
    return made


def contenders() -> dict[str, Contender]:
    return {
        f"{what}: {name}": Contender(
            partial(run, make, "small" if name.endswith("workers") else "full"),
            against=f"{what}: limit",
            extra=name.endswith("interleave 4"),
            max_rounds=2 if name[:2] in {"HF", "Ra"} else 100,
        )
        for what, columns in (("all", None), ("two", TWO))
        for name, make in makers(columns).items()
    }


CONTENDERS = contenders()

QUESTION = Question(
    name="parquet",
    text="How fast do 2,000,000 rows of Parquet become batches of tensors?",
    contenders=CONTENDERS,
    metrics=[
        Metric("rows", "rows/s"),
        Metric("cpu", "CPU us/row", ",.2f", higher=False),
    ],
    targets=[
        Target(
            f"{what}: aioloader",
            [
                name
                for name in CONTENDERS
                if name.startswith((f"{what}: HF", f"{what}: R"))
            ],
            2,
        )
        for what in ("all", "two")
    ],
    serve=serve,
)

if __name__ == "__main__":
    main(QUESTION)
