"""Checks of ``DataLoader``'s arguments, first each alone, then in combination.

``given_part`` checks the ranks, and torch's samplers check the batch size. Where torch
has an error message, the same words are used here, so that users can search for them.
After an assignment to an attribute, arguments are checked again, each alone.
"""

import contextlib
import difflib
import multiprocessing
import multiprocessing.context
import operator
import os
from collections.abc import Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, Literal, TypeAlias

import torch

from aioloader._base.failures import parts_of
from aioloader._base.retry import Retry
from aioloader._base.warnings import warn
from aioloader._loader.auto import check_auto
from aioloader._loader.options import (
    FIRST_VALUES,
    NAMES,
    Auto,
    Options,
    auto_number,
    suits,
)
from aioloader._pipeline.lifespan import check_lifespan
from aioloader._workers.ray.workers import RayWorkers
from aioloader.protocols import Kind, is_async_function

Workers: TypeAlias = Literal["process", "thread"] | Executor | RayWorkers

_CHOICES: dict[str, tuple[str | None, ...]] = {
    "fetch": ("auto", "loader", "workers"),
    "rng": (None, "batch", "sample", "worker"),
    "on_timeout": ("raise", "restart"),
    "loop": ("thread", "caller"),
    "tail": (None, "wrap", "pad", "drop", "uneven"),
}
_FUNCTIONS = ("collate_fn", "transform", "worker_init_fn")
# Integers: whether None is allowed, and the minimum unless torch has a message for it.
_COUNTS: dict[str, tuple[bool, int | None]] = {
    "num_workers": (False, None),
    "prefetch_factor": (True, None),
    "snapshot_every_n_steps": (True, 0),
    "concurrency": (False, 1),
    "prefetch_bytes": (True, 1),
}
# Arguments of earlier versions, and their replacements.
_FORMER = {
    "prefetch_device": "device=Device(..., ahead={!r})",
    "device_keys": "device=Device(..., keys={!r})",
    "device_transform": "device=Device(..., transform={!r})",
    "max_failures": "on_error=Skip(at_most={!r})",
}


def refuse_unknown(unknown: Mapping[str, Any]) -> None:
    """Raise a TypeError for an unknown argument, and suggest a replacement, if any."""
    name, value = next(iter(unknown.items()))
    if name in _FORMER:
        now = _FORMER[name].format(value)
        raise TypeError(f"{name}={value!r} is now {now}")
    nearest = difflib.get_close_matches(name, (*NAMES, "shuffle"), 1)
    hint = f": did you mean {nearest[0]!r}?" if nearest else ""
    raise TypeError(
        f"DataLoader.__init__() got an unexpected keyword argument {name!r}{hint}"
    )


def check_each(given: Mapping[str, Any]) -> None:
    """Check the type and value of each argument, regardless of the others."""
    given = {**given, **{name: auto_number(name, given[name]) for name in FIRST_VALUES}}
    _check_numbers(given)
    for name, choices in _CHOICES.items():
        if given[name] not in choices:
            known = " or ".join(map(repr, choices))
            raise ValueError(f"{name} must be {known}, got {given[name]!r}")
    for name in _FUNCTIONS:
        function = given[name]
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be callable, got {type(function).__name__!r}")
    workers = given["workers"]
    is_word = isinstance(workers, str) and workers in {"process", "thread"}
    if not is_word and not isinstance(workers, (Executor, RayWorkers)):
        raise TypeError(
            "workers must be 'process', 'thread', a concurrent.futures.Executor or "
            f"RayWorkers, got {workers!r}"
        )
    if is_async_function(parts_of(given["on_error"])[0]):
        raise TypeError("on_error must be a plain function: it is never awaited")
    retry, generator = given["retry"], given["generator"]
    if not isinstance(retry, (Retry, type(None))):
        raise TypeError(f"retry must be an aioloader.Retry or None, got {retry!r}")
    if not isinstance(generator, (torch.Generator, type(None))):
        raise TypeError(
            f"generator must be a torch.Generator or None, got {generator!r}"
        )


def check_together(options: Options, shuffle: Any) -> None:
    """Check arguments in combination, before samplers are made from them."""
    _check_sampling(options, shuffle)
    _check_workers(options)
    if options.lifespan is not None or options.fetch == "workers":
        _check_places(options)
    if options.rng in {"batch", "sample"}:
        _check_seeds(options)
    if options.chooses:
        check_auto(options)


def count_workers(num_workers: Any, workers: Any) -> Any:
    """Return the number of workers, from ``num_workers`` or from ``RayWorkers``."""
    num_workers = auto_number("num_workers", num_workers)
    if isinstance(num_workers, Auto):
        is_fixed = isinstance(workers, RayWorkers)
        return workers.num_workers if is_fixed else num_workers
    with contextlib.suppress(TypeError, ValueError):  # ``check_each`` raises
        # As torch does, accept numpy integers and any zero.
        num_workers = 0 if num_workers == 0 else operator.index(num_workers)
    if not isinstance(workers, RayWorkers) or num_workers == workers.num_workers:
        return num_workers
    if num_workers:
        raise ValueError(
            f"num_workers={num_workers!r}, but RayWorkers has num_workers="
            f"{workers.num_workers}: leave num_workers out"
        )
    return workers.num_workers


def context_of(context: Any, num_workers: int, workers: Any) -> Any:
    if num_workers == 0:
        raise ValueError(
            "multiprocessing_context can only be used with multi-process loading "
            f"(num_workers > 0), but got num_workers={num_workers}"
        )
    if workers != "process":
        raise ValueError(
            "multiprocessing_context can only be used with workers='process', but "
            f"got workers={workers!r}"
        )
    if isinstance(context, str):
        valid = multiprocessing.get_all_start_methods()
        if context not in valid:
            raise ValueError(
                "multiprocessing_context option should specify a valid start method in "
                f"{valid!r}, but got multiprocessing_context={context!r}"
            )
        return multiprocessing.get_context(context)
    if not isinstance(context, multiprocessing.context.BaseContext):
        raise TypeError(
            "multiprocessing_context option should be a valid context object or a "
            "string specifying the start method, but got "
            f"multiprocessing_context={context}"
        )
    return context


def _check_seeds(options: Options) -> None:
    """Refuse ``rng`` where concurrent code shares the global generators.

    Threads share these generators, and so do coroutines that run in this process.
    """
    if options.num_workers:
        is_pool = isinstance(options.workers, ThreadPoolExecutor)
        if options.workers == "thread" or is_pool:
            raise ValueError(
                f"rng={options.rng!r} cannot seed the random numbers of threads: they "
                "share the global generators; leave rng out and use "
                "aioloader.get_worker_info().rng, which is seeded for each batch, or "
                "use workers='process'"
            )
        return
    functions = options.transform, options.collate_fn
    has_plain = any(each and not is_async_function(each) for each in functions)
    if options.reads_async and not has_plain:
        raise ValueError(
            f"rng={options.rng!r} cannot seed the random numbers of coroutines in this "
            "process: use num_workers=1 or more, where they take them from "
            "aioloader.get_worker_info().rng, or move them to a plain transform"
        )


def _check_numbers(given: Mapping[str, Any]) -> None:
    for name, (is_optional, least) in _COUNTS.items():
        count = given[name]
        if is_optional and count is None:
            continue
        try:
            operator.index(count)
        except TypeError:
            or_auto = " or 'auto'" if name in FIRST_VALUES else ""
            raise TypeError(
                f"{name} must be an integer{or_auto}, got {count!r}"
            ) from None
        if least is not None and count < least:
            raise ValueError(f"{name} must be at least {least}, got {count}")
    if given["num_workers"] < 0:
        raise ValueError(
            "num_workers option should be non-negative; "
            "use num_workers=0 to disable multiprocessing."
        )
    factor = given["prefetch_factor"]
    if factor is not None and factor < 1:
        raise ValueError(
            "prefetch_factor option should be non-negative and at least 1, "
            f"got {factor}"
        )
    _check_timeout(given["timeout"])


def _check_timeout(timeout: Any) -> None:
    try:
        is_time = bool(timeout >= 0)  # numpy numbers and tensors too, as in torch
    except TypeError:
        raise TypeError(
            f"timeout option should be a number of seconds, got {timeout!r}"
        ) from None
    if not is_time:  # NaN too
        raise ValueError(f"timeout option should be non-negative, got {timeout!r}")


def _check_sampling(options: Options, shuffle: Any) -> None:
    """Check that shuffle, samplers, batch size and drop_last fit together."""
    sampler, batch_sampler = options.sampler, options.batch_sampler
    if options.kind is not Kind.MAP:
        hint = ""
        if options.is_own_stream:
            hint = (
                "; a stream shuffles itself: .shuffle(size) permutes windows of "
                "samples, and shuffle=True of a dataset of shards their order"
            )
        if shuffle not in {False, None}:
            raise ValueError(
                "DataLoader with IterableDataset: expected unspecified shuffle option, "
                f"but got shuffle={shuffle}{hint}"
            )
        for name in ("sampler", "batch_sampler"):
            value = getattr(options, name)
            if value is not None:
                raise ValueError(
                    f"DataLoader with IterableDataset: expected unspecified {name} "
                    f"option, but got {name}={value}"
                )
    if sampler is not None and shuffle:
        raise ValueError("sampler option is mutually exclusive with shuffle")
    size, drop_last = options.batch_size, options.drop_last
    if batch_sampler is not None:
        if size != 1 or shuffle or sampler is not None or drop_last:
            raise ValueError(
                "batch_sampler option is mutually exclusive with batch_size, shuffle, "
                "sampler, and drop_last"
            )
    elif size is None and drop_last:
        raise ValueError(
            "batch_size=None option disables auto-batching and is mutually exclusive "
            "with drop_last"
        )


def _check_workers(options: Options) -> None:
    workers, num_workers = options.workers, options.num_workers
    if isinstance(workers, Executor) and num_workers == 0:
        raise ValueError(
            "workers=Executor needs num_workers > 0: how many batches it makes at once"
        )
    if isinstance(workers, Executor) and options.worker_init_fn is not None:
        raise ValueError(
            "worker_init_fn is not called in the workers of an executor, which are the "
            "user's own: give the executor an initializer"
        )
    if options.persistent_workers and num_workers == 0:
        raise ValueError("persistent_workers option needs num_workers > 0")
    if options.has_processes:
        available = os.cpu_count() or 1
        if hasattr(os, "sched_getaffinity"):
            available = len(os.sched_getaffinity(0))
        if num_workers > available:  # in torch's words
            warn(
                f"This DataLoader will create {num_workers} worker processes in total. "
                "Our suggested max number of worker in current system is "
                f"{available}, which is smaller than what this DataLoader is going to "
                "create. Please be aware that excessive worker creation might get "
                "DataLoader running slow or even freeze, lower the worker number to "
                "avoid potential slowness/freeze if necessary."
            )


def _check_places(options: Options) -> None:
    """Check that workers can read samples and enter the lifespan where required."""
    workers, dataset, fetch = options.workers, options.dataset, options.fetch
    functions = options.transform, options.collate_fn
    if options.lifespan is not None:
        check_lifespan(options.lifespan, dataset, *functions)
    can_read = workers == "process" or suits(workers, dataset, *functions)
    is_executor = isinstance(workers, Executor)
    if options.lifespan is not None and is_executor and fetch != "loader" and can_read:
        raise ValueError(
            "lifespan cannot be entered in the workers of an executor, which are the "
            "user's own: give the executor an initializer, let the loader read "
            "(fetch='loader'), or use workers='thread' or 'process'"
        )
    if fetch == "workers" and not can_read:
        needs = "a map-style dataset and plain functions if workers are threads or an "
        needs += "executor: leave it at 'auto', or use workers='process'"
        if isinstance(workers, RayWorkers):
            needs = "a map-style dataset if workers are RayWorkers: leave it at "
            needs += "'auto', and the loader reads an iterable once for all of them"
        raise ValueError(f"fetch='workers' needs {needs}")
