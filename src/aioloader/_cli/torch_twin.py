"""Torch's loader with the dataset and the arguments of one of ours.

Features that torch lacks are left out, or replaced, and listed in notes.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from aioloader._loader.loader import DataLoader
from aioloader._loader.options import argument
from aioloader._loader.torch_compat import TORCH_LOADER
from aioloader.protocols import (
    HasLifespan,
    Kind,
    is_async_function,
    kind_of,
    reads_async,
)

if TYPE_CHECKING:
    import torch.utils.data

_SAME = [
    *("dataset", "collate_fn", "pin_memory", "worker_init_fn", "generator"),
    *("persistent_workers", "in_order"),
]
# Effect on torch's rounds of each argument that torch lacks.
_WITHOUT = {
    "workers": "its workers are processes",
    "fetch": "its workers read the samples",
    "device": "its batches stay in CPU memory",
    "on_error": "it ends with the first sample that fails",
    "retry": "it ends with the first sample that fails",
    "prefetch_bytes": "it holds as many bytes as its batches have",
    "rank": "it delivers the samples of all ranks",
    "rng": "its random numbers are others",
    "timeout": "without workers it has none",
    "prefetch_factor": "without workers it makes no batch ahead",
}


def twin_of(
    loader: DataLoader[Any],
) -> "tuple[torch.utils.data.DataLoader[Any] | None, list[str]]":
    """Return torch's loader for the same batches, and what is not compared, in words.

    None if torch cannot run this.
    """
    if reason := _obstacle(loader):
        return None, [f"Not compared with torch's DataLoader: {reason}."]
    arguments, left_out = _arguments(loader)
    notes = [
        f"Not in torch's DataLoader: {name}={_shown(argument(loader, name))}; "
        f"{_WITHOUT[name]}."
        for name in left_out
    ]
    if (transform := argument(loader, "transform")) is not None:
        is_batched = loader.batch_sampler is not None or loader.batch_size is not None
        given = transform, loader.collate_fn, is_batched
        arguments["collate_fn"] = partial(_collate_transformed, *given)
        words = "transform; its collate_fn applies it to each sample."
        notes.append(f"Not in torch's DataLoader: {words}")
    return TORCH_LOADER(**arguments), notes


def _obstacle(loader: DataLoader[Any]) -> str:
    """Return why torch cannot run this; empty if it can."""
    dataset = loader.dataset
    name = type(dataset).__name__
    if kind_of(dataset) is Kind.ASYNC_ITERABLE:
        return f"{name} is an async iterable, which torch cannot read"
    if reads_async(dataset):
        return f"{name} is read by coroutines, which torch cannot run"
    for each in ("transform", "collate_fn"):
        if is_async_function(argument(loader, each)):
            return f"{each} is async, and torch cannot run it"
    has_lifespan = argument(loader, "lifespan") is not None
    if has_lifespan or isinstance(dataset, HasLifespan):
        return f"{name} has a lifespan, which torch does not enter"
    return ""


def _arguments(loader: DataLoader[Any]) -> tuple[dict[str, Any], list[str]]:
    """Return arguments for torch's loader, and the names of those left out."""
    arguments = {name: getattr(loader, name) for name in _SAME} | _sampling(loader)
    arguments["num_workers"] = int(loader.num_workers)
    parameters = inspect.signature(DataLoader.__init__).parameters
    left_out = []
    for name in _WITHOUT:
        value = argument(loader, name)
        if value == parameters[name].default:
            continue
        if loader.num_workers and name in {"timeout", "prefetch_factor"}:
            arguments[name] = value
        else:
            left_out.append(name)
    if loader.pin_memory_device:
        arguments["pin_memory_device"] = loader.pin_memory_device
    context = loader.multiprocessing_context
    if context is not None and argument(loader, "workers") == "process":
        arguments["multiprocessing_context"] = context
    return arguments, left_out


def _sampling(loader: DataLoader[Any]) -> dict[str, Any]:
    if kind_of(loader.dataset) is not Kind.MAP:
        return {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if loader.batch_size is None and loader.batch_sampler is not None:
        return {"batch_sampler": loader.batch_sampler}
    return {
        "batch_size": loader.batch_size,
        "sampler": loader.sampler,
        "drop_last": loader.drop_last,
    }


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, (str, int, float)) else type(value).__name__


def _collate_transformed(
    transform: Callable[[Any], Any],
    collate: Callable[[Any], Any],
    is_batched: bool,  # noqa: FBT001  (of a partial)
    samples: Any,
) -> Any:
    """Transform, then collate; workers get it pickled."""
    made = [transform(one) for one in samples] if is_batched else transform(samples)
    return collate(made)
