"""The loaders that ``peers.py`` compares: how each reads its own format best.

A function here takes the folder of ``peer_formats.py`` and settings, and returns an
object that gives one shuffled epoch per ``iter``, as uint8 batches of shape ``(64,
20_000)``. ``IMPORTS`` imports a peer's packages first, so they do not count as
start-up. Orders are drawn from all samples where the format has random access (packed,
ArrayRecord, LitData within its chunks), else from shuffled shards and a window or
buffer of 1,000.
"""

from __future__ import annotations

import importlib
import logging
import os
import random
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from peer_formats import SAMPLES, SHARDS, mosaic, names, packed, stack
from shard_server import SAMPLE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

Batches = Any  # iterable or asynchronously iterable, once per epoch
BATCH = 64
WINDOW = 1_000
LANES = 4


class Packed(Dataset[torch.Tensor]):
    """Samples by number, each one read from a file of all."""

    def __init__(self, folder: str) -> None:
        self._file = os.open(packed(folder), os.O_RDONLY)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        body = bytearray(SAMPLE_BYTES)
        os.preadv(self._file, [body], index * SAMPLE_BYTES)
        return torch.frombuffer(body, dtype=torch.uint8)


class Remade:
    """An epoch of a function's results, called for each epoch."""

    def __init__(self, make: Callable[[int], Iterable[Any]]) -> None:
        self._make, self._epoch = make, -1

    def __iter__(self) -> Iterator[Any]:
        """Start an epoch."""
        self._epoch += 1
        return iter(self._make(self._epoch))


def fields(samples: list[dict[str, Any]]) -> torch.Tensor:
    return stack([one["bin"] for one in samples])


# -- this package ---------------------------------------------------------------------


def ours_stream(
    folder: str, kind: str, *, is_async: bool = False, **settings: Any
) -> Any:
    from aioloader import DataLoader as Loader  # noqa: PLC0415
    from aioloader.datasets import MDSDataset, TarDataset  # noqa: PLC0415

    stream: Any
    if kind == "tar":
        stream = TarDataset(names(folder, "tar"), shuffle=True, interleave=LANES)
    else:
        stream = MDSDataset(str(Path(folder) / "mds"), shuffle=True, interleave=LANES)
    loader = Loader(stream.shuffle(WINDOW), BATCH, collate_fn=fields, **settings)
    return Asynchronous(loader) if is_async else loader


class Asynchronous:
    """Exposes only the asynchronous interface of a loader."""

    def __init__(self, loader: Any) -> None:
        self.close = loader.close
        self._loader = loader

    def __aiter__(self) -> Any:
        """Start an epoch."""
        return aiter(self._loader)


def ours_packed(folder: str, **settings: Any) -> Any:
    from aioloader import DataLoader as Loader  # noqa: PLC0415

    return Loader(Packed(folder), BATCH, shuffle=True, **settings)


# -- peers ----------------------------------------------------------------------------


def torchs(folder: str, workers: int = 0, ahead: int = 2) -> Any:
    return DataLoader(
        Packed(folder),
        BATCH,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        prefetch_factor=ahead if workers else None,
    )


def stateful(folder: str, workers: int = 0) -> Any:
    warnings.simplefilter("ignore")  # it uses what the installed torch has deprecated
    module = importlib.import_module("torchdata.stateful_dataloader")
    return module.StatefulDataLoader(
        Packed(folder),
        BATCH,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )


def nodes(folder: str, threads: int, *, whole: bool) -> Any:
    """Torchdata's nodes: threads that read samples, or batches of them."""
    from torch.utils.data import BatchSampler, RandomSampler  # noqa: PLC0415
    from torchdata import nodes as tn  # noqa: PLC0415

    dataset = Packed(folder)
    sampler: Any = RandomSampler(dataset)
    if whole:
        batches = tn.SamplerWrapper(BatchSampler(sampler, BATCH, drop_last=False))

        def read(indices: list[int]) -> torch.Tensor:
            return torch.stack([dataset[index] for index in indices])

        node: Any = tn.ParallelMapper(batches, read, threads, method="thread")
    else:
        node = tn.ParallelMapper(
            tn.SamplerWrapper(sampler), dataset.__getitem__, threads, method="thread"
        )
        node = tn.Mapper(tn.Batcher(node, BATCH, drop_last=False), torch.stack)
    return tn.Loader(tn.Prefetcher(node, 4))


def spdl(folder: str, threads: int) -> Any:
    from spdl_feeds import iterate, spdl_pipeline  # noqa: PLC0415

    dataset = Packed(folder)

    def read(indices: Any) -> torch.Tensor:
        return torch.stack([dataset[index] for index in indices])

    def epoch(_: int) -> Any:
        order = torch.randperm(SAMPLES).split(BATCH)
        batches = [part.tolist() for part in order]
        return iterate(spdl_pipeline(batches, read, concurrency=threads))

    return Remade(epoch)


def webdataset(folder: str, workers: int = 0, ahead: int = 2) -> Any:
    import webdataset as wds  # noqa: PLC0415

    stream = wds.WebDataset(
        names(folder, "tar"), shardshuffle=SHARDS, empty_check=False
    )
    stream = stream.shuffle(WINDOW).batched(BATCH, collation_fn=fields)
    return DataLoader(
        stream,
        batch_size=None,
        num_workers=workers,
        persistent_workers=workers > 0,
        prefetch_factor=ahead if workers else None,
    )


def litdata(folder: str, workers: int = 0, ahead: int = 2) -> Any:
    from litdata import StreamingDataLoader, StreamingDataset  # noqa: PLC0415

    dataset = StreamingDataset(str(Path(folder) / "lit"), shuffle=True, seed=1)
    return StreamingDataLoader(
        dataset,
        batch_size=BATCH,
        collate_fn=fields,
        num_workers=workers,
        persistent_workers=workers > 0,
        prefetch_factor=ahead if workers else None,
    )


def mosaics(
    folder: str, workers: int = 0, ahead: int = 2, algorithm: str = "py1e"
) -> Any:
    dataset = mosaic("streaming.base.dataset").StreamingDataset(
        local=str(Path(folder) / "mds"),
        shuffle=True,
        shuffle_algo=algorithm,
        shuffle_block_size=WINDOW,
        num_canonical_nodes=1,
        batch_size=BATCH,
    )
    return DataLoader(
        dataset,
        BATCH,
        collate_fn=fields,
        num_workers=workers,
        persistent_workers=workers > 0,
        prefetch_factor=ahead if workers else None,
    )


def as_array(body: bytes) -> Any:
    return np.frombuffer(body, dtype=np.uint8)


def grains(folder: str, workers: int = 0, threads: int = 16, buffer: int = 500) -> Any:
    import grain  # noqa: PLC0415

    source = grain.sources.ArrayRecordDataSource(names(folder, "array_record"))
    samples = grain.MapDataset.source(source)
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=buffer)

    def epoch(number: int) -> Any:
        chosen = samples.shuffle(seed=number).map(as_array).batch(BATCH)
        batches = chosen.to_iter_dataset(options)
        if workers:
            batches = batches.mp_prefetch(
                grain.multiprocessing.MultiprocessingOptions(num_workers=workers)
            )
        return map(torch.from_numpy, batches)

    return Remade(epoch)


def tensorflow(
    folder: str, calls: int | None = None, threads: int = 0, *, by_batch: bool = True
) -> Any:
    """tf.data; ``None`` calls in parallel are AUTOTUNE, 0 threads its default."""
    import tensorflow as tf  # noqa: PLC0415

    auto = tf.data.AUTOTUNE
    files = tf.data.Dataset.from_tensor_slices(names(folder, "tfrecord"))
    records = files.shuffle(SHARDS).interleave(
        partial(tf.data.TFRecordDataset, buffer_size=1 << 20),
        cycle_length=LANES,
        num_parallel_calls=calls or auto,
        deterministic=False,
    )

    def decode(body: Any) -> Any:
        return tf.io.decode_raw(body, tf.uint8)

    records = records.shuffle(WINDOW)
    if by_batch:
        records = records.batch(BATCH).map(decode, num_parallel_calls=calls or auto)
    else:
        records = records.map(decode, num_parallel_calls=calls or auto).batch(BATCH)
    options = tf.data.Options()
    options.threading.private_threadpool_size = threads
    batches = records.prefetch(auto).with_options(options)

    def epoch(_: int) -> Any:
        to = tf.experimental.dlpack.to_dlpack
        return (torch.from_dlpack(to(batch)) for batch in batches)

    return Remade(epoch)


def ray_data(folder: str, ahead: int = 1, form: str = "pyarrow") -> Any:
    import ray  # noqa: PLC0415

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.init(
        num_cpus=os.cpu_count(),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    dataset = ray.data.read_parquet(str(Path(folder) / "parquet"), shuffle="files")

    def epoch(number: int) -> Any:
        batches = dataset.iter_batches(
            batch_size=BATCH,
            batch_format=form,
            prefetch_batches=ahead,
            local_shuffle_buffer_size=WINDOW,
            local_shuffle_seed=number,
        )
        for batch in batches:
            column = batch["bin"]
            yield stack(column.to_pylist() if form == "pyarrow" else list(column))

    return Remade(epoch)


IMPORTS = {
    "aioloader": ("aioloader", "aioloader.datasets"),
    "torch": (),
    "torchdata": ("torchdata.nodes", "torchdata.stateful_dataloader"),
    "SPDL": ("spdl.pipeline", "uvloop"),
    "WebDataset": ("webdataset",),
    "LitData": ("litdata",),
    "Grain": ("grain",),
    "tf.data": ("tensorflow",),
    "Ray Data": ("ray.data",),
}


def import_peer(name: str) -> None:
    """Import what a contender needs, before its clock runs."""
    random.seed(1)
    torch.manual_seed(1)
    if name.startswith("Mosaic"):
        mosaic("streaming.base.dataset")
    for start, modules in IMPORTS.items():
        if name.startswith(start):
            for module in modules:
                importlib.import_module(module)
