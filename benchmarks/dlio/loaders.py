"""Data loader classes for DLIO's ``reader.data_loader_classname``, around aioloader.

``DropIn`` is the result of changing only the import: DLIO's dataset and sampler, and
worker processes. ``Threads`` reads by threads of the rank itself.
"""

from __future__ import annotations

import math
import threading
from typing import Any

from dlio_benchmark.data_loader.torch_data_loader import (
    TorchDataLoader,
    TorchDataset,
    dlio_sampler,
)
from dlio_benchmark.reader.reader_factory import ReaderFactory

from aioloader import DataLoader


class DropIn(TorchDataLoader):
    """DLIO's loader for torch, with this package's ``DataLoader``."""

    def read(self) -> None:
        """Make the loader, with the arguments that DLIO gives torch's."""
        dataset = TorchDataset(
            self.format_type,
            self.dataset_type,
            self.epoch_number,
            self.num_samples,
            self._args.read_threads,
            self.batch_size,
        )
        self.load(
            dataset,
            worker_init_fn=dataset.worker_init,
            multiprocessing_context=self._args.multiprocessing_context,
        )

    def load(self, dataset: Any, **more: Any) -> None:
        """Make a loader in DLIO's order, with DLIO's number of workers."""
        args = self._args
        sampler = dlio_sampler(
            args.my_rank,
            args.comm_size,
            self.num_samples,
            args.sample_shuffle,
            args.epochs,
            args.seed,
        )
        self._dataset = DataLoader(
            dataset,
            batch_size=self.batch_size,
            sampler=sampler,
            num_workers=args.read_threads,
            pin_memory=True,
            drop_last=True,
            prefetch_factor=math.ceil(args.prefetch_size / args.read_threads) or 2,
            persistent_workers=True,
            **more,
        )


class Threads(DropIn):
    """The same samples in the same order, read by threads of this process."""

    def read(self) -> None:
        """Make the loader: as many threads as DLIO has worker processes."""
        self.load(ThreadDataset(self), workers="thread")


class ThreadDataset:
    """DLIO's samples, with a reader for each calling thread."""

    def __init__(self, loader: DropIn) -> None:
        self._loader = loader
        self._own = threading.local()

    def __len__(self) -> int:
        return self._loader.num_samples

    def __getitem__(self, index: int) -> Any:
        if not hasattr(self._own, "reader"):
            self._own.reader = ReaderFactory.get_reader(
                type=self._loader.format_type,
                dataset_type=self._loader.dataset_type,
                thread_index=threading.get_native_id(),
                epoch_number=self._loader.epoch_number,
            )
        return self._own.reader.read_index(index, 0)
