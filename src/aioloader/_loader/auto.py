"""Check the arguments that are ``"auto"``, and set them before and between epochs."""

import sys
from collections.abc import Callable
from typing import Any

from torch.utils.data import TensorDataset

from aioloader._base.machine import cores
from aioloader._collate.collate import default_collate, default_convert
from aioloader._loader.options import (
    FIRST_VALUES,
    Auto,
    Options,
    argument,
    auto_number,
    suits,
)
from aioloader.protocols import Kind, is_async_function

# Whether threads of Python code run one at a time; always so before Python 3.13.
has_gil: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
# Concurrency in workers that read samples; it is not tuned.
_CONCURRENCY_IN_WORKERS = 64
# Maximum number of workers in the first epoch; later epochs get more if that helps.
_MAX_FIRST_WORKERS = 8
# Values that count as "not given"; a loader rebuilt from its attributes passes them.
_DEFAULT_FUNCTIONS = (None, default_collate, default_convert)


def check_auto(options: Options) -> None:
    """Refuse ``num_workers="auto"`` where the worker count changes what is loaded."""
    if not isinstance(options.num_workers, Auto):
        return
    reason = ""
    if options.rng == "worker":
        reason = "with rng='worker' random numbers depend on the number of workers: "
        reason += "use rng='batch' or 'sample'"
    elif options.kind is not Kind.MAP and options.reads_in_workers:
        reason = "each worker reads a part of an iterable, and the order depends on "
        reason += "their number: use fetch='loader', or a map-style dataset"
    elif options.is_stateful and options.has_copies:
        reason = "a stateful dataset has a state in each worker"
    if reason:
        raise ValueError(f"num_workers='auto' would change what is loaded: {reason}")


def begin(loader: Any, options: Options) -> None:
    """Set the first values of the arguments that are ``"auto"``.

    Random numbers depend on whether there are workers, so later epochs keep the choice.
    All-async code and a ``TensorDataset`` get none, unless an argument needs workers.
    """
    workers = options.num_workers
    if isinstance(workers, Auto):
        workers = Auto(_first_workers(options))
        loader._replace("num_workers", workers)
        if workers and not has_gil() and _can_be_threads(options):
            loader._replace("workers", "thread")
    if isinstance(options.prefetch_factor, Auto) and not options.is_plain:
        loader._replace("prefetch_factor", Auto(3))
    if isinstance(options.concurrency, Auto) and workers and options.reads_in_workers:
        loader._replace("concurrency", Auto(_CONCURRENCY_IN_WORKERS))


def _first_workers(options: Options) -> int:
    needs_workers = (
        options.persistent_workers
        or options.multiprocessing_context is not None
        or options.worker_init_fn is not None
        or options.rng is not None
        or not isinstance(options.workers, str)
    )
    functions = options.transform, options.collate_fn
    custom = [each for each in functions if each not in _DEFAULT_FUNCTIONS]
    needs_workers |= not all(map(is_async_function, custom))
    is_in_memory = type(options.dataset) is TensorDataset
    if not needs_workers and (options.reads_async or is_in_memory):
        return 0
    return min(cores(), _MAX_FIRST_WORKERS)


def _can_be_threads(options: Options) -> bool:
    """Tell whether threads can be the workers, because nothing requires processes."""
    asked = options.workers, options.fetch, options.on_timeout, options.rng
    if asked != ("process", "auto", "raise", None) or options.persistent_workers:
        return False
    is_plain = suits("thread", options.dataset, options.transform, options.collate_fn)
    return is_plain and options.multiprocessing_context is None


def settle(loader: Any) -> None:
    """Before an iteration, set ``"auto"`` arguments to the best values found so far."""
    for name in FIRST_VALUES:
        value = argument(loader, name)
        if isinstance(value, str):  # assigned by the user
            loader._replace(name, auto_number(name, value))
    live = loader._live
    if live.has_kept():
        return
    tuning, latest = live.tuning, live.epoch
    if latest and isinstance(loader.num_workers, Auto) and loader.num_workers:
        most = max(cores(), loader.num_workers)
        workers = tuning.controller("num_workers", loader.num_workers, 1, most)
        deaths = live.pools.supervisors.deaths
        tuning.observe_workers(workers, latest.counters, deaths)
    for name, controller in tuning.controllers.items():
        value = argument(loader, name)
        if isinstance(value, Auto) and value != controller.value:
            loader._replace(name, Auto(controller.value))
