"""Use aioloader's loaders with Hugging Face's accelerate and ``Trainer``.

``Accelerator.prepare`` rebuilds a loader as torch's ``DataLoader``, which has no
``transform`` and cannot read async datasets. ``prepare`` lets accelerate set the ranks,
seeds and device, and then replaces torch's loader in accelerate's wrapper with an
``aioloader.DataLoader`` that has the other arguments of the user's loader.

Example:
    >>> from aioloader.accelerate import prepare
    >>> model, optimizer, loader = prepare(accelerator, model, optimizer, loader)
"""

import copy
import importlib
import inspect
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch.utils.data

from aioloader._base.warnings import warn
from aioloader._loader.loader import DataLoader
from aioloader._loader.torch_compat import dataset_kind
from aioloader.errors import UNRELEASED
from aioloader.protocols import Kind, OwnStream, kind_of

try:
    from accelerate import data_loader as theirs
except ImportError as _error:
    raise ImportError(
        "aioloader.accelerate needs accelerate: "
        f'pip install "aioloader[accelerate]{UNRELEASED}"'
    ) from _error

__all__ = ["AsyncIterableDatasetShard", "TrainerMixin", "prepare", "skip_first_batches"]

# Arguments that determine the samples; accelerate sets them.
_DECIDED = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")
# Arguments hidden from accelerate's temporary torch loader, which would act on them.
_HIDDEN = (
    *("num_workers", "prefetch_factor", "persistent_workers", "pin_memory"),
    *("multiprocessing_context", "timeout", "worker_init_fn"),
)


def prepare(accelerator: Any, *objects: Any) -> Any:
    """Prepare objects like ``accelerator.prepare``, but keep aioloader's loaders.

    Args:
        accelerator: An ``accelerate.Accelerator``.
        objects: Models, optimizers, schedulers, and loaders of any class.

    Returns:
        The prepared objects in the same order; a single object is returned as it is.
        Each aioloader loader is replaced by accelerate's wrapper, whose
        ``base_dataloader`` is an aioloader loader.

    Raises:
        ValueError: If a loader has ``rank`` or ``world_size`` while accelerate has
            several processes, or if a loader has a loaded state.
    """
    return accelerator.prepare(*(_prepared(accelerator, part) for part in objects))


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Return a loader that skips the first batches, like accelerate's function.

    Args:
        dataloader: A loader of any class, prepared or not.
        num_batches: How many batches to skip.
    """
    base = getattr(dataloader, "base_dataloader", dataloader)
    if not _is_ours(base):
        return theirs.skip_first_batches(dataloader, num_batches)
    if base is dataloader:
        skipped = theirs.skip_first_batches(_bare(base), num_batches)
    else:
        with patch.object(dataloader, "base_dataloader", _bare(base)):
            skipped = theirs.skip_first_batches(dataloader, num_batches)
    is_wrapped = isinstance(skipped, theirs.DataLoaderAdapter)
    make = _with_engine if is_wrapped else _engine
    return make(skipped, type(base), _arguments(base))


class TrainerMixin:
    """Mixin for ``transformers.Trainer`` to use aioloader; list it before ``Trainer``.

    Example:
        >>> class MyTrainer(TrainerMixin, Trainer):
        ...     loader_options = {"concurrency": 128, "transform": tokenize}

    Attributes:
        loader_options: Arguments of ``aioloader.DataLoader`` that
            ``TrainingArguments`` does not have.
    """

    loader_options: dict[str, Any] = {}  # noqa: RUF012  (set as a class attribute)

    def _get_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        dataset_kind(dataset, kind_of(dataset))  # registers async iterables with torch
        parent: Any = super()
        prepared = parent._get_dataloader(dataset, *args, **kwargs)
        base = prepared.base_dataloader
        if _is_ours(base):  # kept from an earlier evaluation
            return prepared
        arguments = _arguments(base) | self.loader_options
        return _with_engine(prepared, DataLoader, arguments)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        first, loader = kwargs.get("epochs_trained"), kwargs.get("train_dataloader")
        if first and first == kwargs.get("epoch"):  # a resumed run
            _warn_of_other_samples(loader, first)
        trainer = importlib.import_module("transformers.trainer")
        parent: Any = super()
        with patch.object(trainer, "skip_first_batches", skip_first_batches):
            return parent._run_epoch(*args, **kwargs)


def _warn_of_other_samples(loader: Any, epoch: int) -> None:
    base = getattr(loader, "base_dataloader", loader)
    dataset = getattr(base, "dataset", None)
    dataset = getattr(dataset, "dataset", dataset)  # unwrap accelerate's shard
    if isinstance(dataset, OwnStream) and dataset.outline().continues:
        warn(
            f"training resumes in epoch {epoch}, at the beginning of {dataset!r}: the "
            "Trainer does not save where the epochs before it stopped. For the same "
            "samples as without the stop, use repeat() and max_steps instead"
        )


class AsyncIterableDatasetShard(theirs.IterableDatasetShard):  # type: ignore[misc]
    """Accelerate's ``IterableDatasetShard`` for a dataset with ``__aiter__``.

    Every process reads the whole dataset and takes its part of each global batch. A
    short last batch is filled up with the first batch's samples, or dropped.
    """

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(f"{type(self.dataset).__name__} is read by `async for`")

    async def __aiter__(self) -> AsyncIterator[Any]:
        per_rank, whole = self.batch_size, self.batch_size * self.num_processes
        if self.split_batches:
            per_rank, whole = self.batch_size // self.num_processes, self.batch_size
        mine = slice(self.process_index * per_rank, (self.process_index + 1) * per_rank)
        first, batch = list[Any](), list[Any]()
        samples = aiter(self.dataset)
        try:
            async for sample in samples:
                batch.append(sample)
                if len(batch) == whole:
                    for kept in batch[mine]:
                        yield kept
                    first, batch = first or batch, []
        finally:
            if hasattr(samples, "aclose"):
                await samples.aclose()
        if batch and not self.drop_last:
            first = first or list(batch)
            while len(batch) < whole:
                batch += first
            for kept in batch[mine]:
                yield kept


def _prepared(accelerator: Any, loader: Any) -> Any:
    if not _is_ours(loader) or vars(loader).get("_accelerate_prepared"):
        return loader
    if accelerator.num_processes > 1 and (loader.rank is not None or loader.world_size):
        raise ValueError(
            f"rank={loader.rank!r} splits the samples between ranks, and accelerate "
            f"splits them again between its {accelerator.num_processes} processes: "
            "leave rank= and world_size= out"
        )
    if loader._live.loaded is not None:
        raise ValueError(
            "the loader has a loaded state, which accelerate's samplers ignore: call "
            "load_state_dict on the loader that prepare returns"
        )
    prepared = accelerator.prepare_data_loader(_bare(loader))
    prepared._is_accelerate_prepared = True
    return _with_engine(prepared, type(loader), _arguments(loader))


def _is_ours(loader: Any) -> bool:
    """Tell whether ``loader`` is an aioloader ``DataLoader`` itself, not a wrapper."""
    return issubclass(type(loader), DataLoader)


def _bare(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a copy that accelerate can rebuild as a torch loader without workers."""
    bare, torchs = copy.copy(loader), inspect.signature(torch.utils.data.DataLoader)
    for name in _HIDDEN:
        object.__setattr__(bare, name, torchs.parameters[name].default)
    bare._is_accelerate_prepared = False  # avoids the property's check
    return bare


def _arguments(loader: Any) -> dict[str, Any]:
    """Return a loader's arguments, except those that determine the samples."""
    names = set(inspect.signature(type(loader)).parameters).difference(_DECIDED)
    return {name: getattr(loader, name) for name in names if hasattr(loader, name)}


def _with_engine(prepared: Any, cls: type, arguments: dict[str, Any]) -> Any:
    """Replace the torch loader in accelerate's wrapper with a ``cls`` loader."""
    engine = _engine(prepared.base_dataloader, cls, arguments)
    prepared.base_dataloader = engine
    prepared.dl_state_dict = engine.state_dict()
    prepared.load_state_dict = partial(_load, prepared)
    return prepared


def _engine(base: Any, cls: type, arguments: dict[str, Any]) -> DataLoader[Any]:
    """Return a loader of class ``cls`` that reads the samples of ``base``."""
    dataset = base.dataset
    is_shard = isinstance(dataset, theirs.IterableDatasetShard)
    is_ours = isinstance(dataset, AsyncIterableDatasetShard)
    if is_shard and not is_ours and kind_of(dataset.dataset) is Kind.ASYNC_ITERABLE:
        names = inspect.signature(theirs.IterableDatasetShard).parameters
        given = {name: getattr(dataset, name) for name in names}
        dataset = AsyncIterableDatasetShard(**given)
    decided: dict[str, Any] = {"batch_sampler": base.batch_sampler}
    if isinstance(base.dataset, torch.utils.data.IterableDataset):
        decided = {"batch_size": base.batch_size, "drop_last": base.drop_last}
    elif base.batch_sampler is None:
        decided = {"batch_size": None, "sampler": base.sampler}
    engine: DataLoader[Any] = cls(dataset, **arguments, **decided)
    return engine


def _load(prepared: Any, state: dict[str, Any]) -> None:
    """Load a state and its epoch number, which seeds accelerate's samplers."""
    prepared.base_dataloader.load_state_dict(state)
    prepared.iteration = state["epoch"]
