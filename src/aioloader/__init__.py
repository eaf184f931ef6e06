"""An asyncio-native streaming data loader for PyTorch.

``async for batch in DataLoader(dataset, ...)`` takes torch's arguments and reads
samples concurrently from files, object stores and databases. Modules that only some
programs need are imported on first use, so that ``import aioloader`` is fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

from aioloader import errors
from aioloader._base.failures import SKIP, Failure, Skip
from aioloader._base.retry import Retry
from aioloader._collate.collate import default_collate, default_convert, varlen_collate
from aioloader._device.naming import Device
from aioloader._loader.loader import DataLoader
from aioloader._order.permutation import ShuffledIndices
from aioloader._workers.info import WorkerInfo, get_worker_info

if TYPE_CHECKING:
    from aioloader import datasets
    from aioloader._collate.padding import pad_collate
    from aioloader._loader.state_check import merge_states
    from aioloader._observe.metrics import (
        PrometheusCollector,
        observe_with_opentelemetry,
    )
    from aioloader._observe.progress import progress
    from aioloader._observe.stats import LoaderStats
    from aioloader._observe.trace import merge_traces
    from aioloader._order.token_budget import TokenBudgetBatchSampler
    from aioloader._workers.process.fork_server import warm_up
    from aioloader._workers.ray.workers import RayWorkers

__version__ = "0.1.0.dev0"

_LATER = {
    "LoaderStats": "aioloader._observe.stats",
    "PrometheusCollector": "aioloader._observe.metrics",
    "RayWorkers": "aioloader._workers.ray.workers",
    "TokenBudgetBatchSampler": "aioloader._order.token_budget",
    "merge_states": "aioloader._loader.state_check",
    "merge_traces": "aioloader._observe.trace",
    "observe_with_opentelemetry": "aioloader._observe.metrics",
    "pad_collate": "aioloader._collate.padding",
    "progress": "aioloader._observe.progress",
    "warm_up": "aioloader._workers.process.fork_server",
}

__all__ = [
    "SKIP",
    "DataLoader",
    "Device",
    "Failure",
    "LoaderStats",
    "PrometheusCollector",
    "RayWorkers",
    "Retry",
    "ShuffledIndices",
    "Skip",
    "TokenBudgetBatchSampler",
    "WorkerInfo",
    "datasets",
    "default_collate",
    "default_convert",
    "errors",
    "get_worker_info",
    "merge_states",
    "merge_traces",
    "observe_with_opentelemetry",
    "pad_collate",
    "progress",
    "varlen_collate",
    "warm_up",
]


def __getattr__(name: str) -> Any:
    if name == "datasets":
        return importlib.import_module("aioloader.datasets")
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LATER[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
