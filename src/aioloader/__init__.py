"""The asyncio-native streaming data loader for PyTorch.

``async for batch in DataLoader(dataset, ...)``: torch's arguments, samples read
concurrently from files, object stores and databases, at home in async code.
"""

from aioloader import datasets, errors
from aioloader._collate import default_collate, default_convert
from aioloader._loader import DataLoader
from aioloader._merging import merge_states
from aioloader._observe.stats import LoaderStats
from aioloader._order.failures import SKIP, Failure
from aioloader._order.permutation import ShuffledIndices
from aioloader._order.retry import Retry
from aioloader._workers.fork_server import warm_up
from aioloader._workers.info import WorkerInfo, get_worker_info
from aioloader._workers.ray_workers import RayWorkers

__all__ = [
    "SKIP",
    "DataLoader",
    "Failure",
    "LoaderStats",
    "RayWorkers",
    "Retry",
    "ShuffledIndices",
    "WorkerInfo",
    "datasets",
    "default_collate",
    "default_convert",
    "errors",
    "get_worker_info",
    "merge_states",
    "warm_up",
]
