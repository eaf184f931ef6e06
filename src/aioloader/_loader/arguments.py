"""Torch's arguments, checked as torch checks them, but all in the constructor.

The messages are torch's, so that what users know and search for stays true. What is
wider here is documented at ``DataLoader``.
"""

import contextlib
import multiprocessing
import multiprocessing.context
import operator
import os
from concurrent.futures import Executor
from typing import Any, Literal, TypeAlias

import torch

from aioloader._observe.warnings import warn
from aioloader._order.retry import Retry
from aioloader._pipeline.lifespan import check_lifespan
from aioloader._workers.ray.workers import RayWorkers
from aioloader.protocols import Kind, is_async_function, kind_of, reads_async

Workers: TypeAlias = Literal["process", "thread"] | Executor | RayWorkers


def count_workers(num_workers: Any, workers: Any) -> Any:
    """Return the number of workers: that of ``RayWorkers``, where it is left at 0.

    Raises:
        ValueError: If both tell, and not the same.
    """
    with contextlib.suppress(TypeError):  # it is refused later, in words
        num_workers = operator.index(num_workers)  # numpy's, too
    if not isinstance(workers, RayWorkers) or num_workers == workers.num_workers:
        return num_workers
    if num_workers:
        raise ValueError(
            f"num_workers={num_workers!r}, but there are to be {workers.num_workers} "
            "RayWorkers: leave num_workers out"
        )
    return workers.num_workers


def check_numbers(
    *,
    num_workers: Any,
    timeout: Any,
    prefetch_factor: Any,
    concurrency: Any,
    prefetch_device: Any,
    snapshot_every_n_steps: Any,
) -> None:
    """Check counts and seconds.

    Raises:
        TypeError: If one is no number.
        ValueError: If one is out of range.
    """
    _check_count("num_workers", num_workers)
    if num_workers < 0:
        raise ValueError(
            "num_workers option should be non-negative; "
            "use num_workers=0 to disable multiprocessing."
        )
    _check_seconds(timeout)
    if not timeout >= 0:  # also not a number
        raise ValueError(f"timeout option should be non-negative, got {timeout!r}")
    if prefetch_factor is not None:
        _check_count("prefetch_factor", prefetch_factor)
        if prefetch_factor < 1:
            raise ValueError(
                "prefetch_factor option should be non-negative and at least 1, "
                f"got {prefetch_factor}"
            )
    for name, count in (
        ("concurrency", concurrency),
        ("prefetch_device", prefetch_device),
    ):
        _check_count(name, count)
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")
    if snapshot_every_n_steps is not None:
        _check_count("snapshot_every_n_steps", snapshot_every_n_steps)
        if snapshot_every_n_steps < 0:
            raise ValueError(
                "snapshot_every_n_steps must be at least 0 (which, like None, is "
                f"never), got {snapshot_every_n_steps}"
            )


def check_workers(
    *,
    num_workers: int,
    persistent_workers: bool,
    multiprocessing_context: Any,
    workers: Any,
    worker_init_fn: Any,
) -> Any:
    """Check what belongs to workers; return the context object, or None.

    Raises:
        ValueError: If an option needs workers and there are none, or names no context.
        TypeError: If the context is no context, or ``workers`` is nothing known.
    """
    is_word = isinstance(workers, str) and workers in {"process", "thread"}
    if not is_word and not isinstance(workers, (Executor, RayWorkers)):
        raise TypeError(
            "workers must be 'process', 'thread', a concurrent.futures.Executor or "
            f"RayWorkers, got {workers!r}"
        )
    if isinstance(workers, Executor) and num_workers == 0:
        raise ValueError(
            "workers=Executor needs num_workers > 0: how many batches it has at once"
        )
    if isinstance(workers, Executor) and worker_init_fn is not None:
        raise ValueError(
            "worker_init_fn is not called in the workers of an executor, which are the "
            "user's own: give the executor an initializer"
        )
    if persistent_workers and num_workers == 0:
        raise ValueError("persistent_workers option needs num_workers > 0")
    context = multiprocessing_context
    if context is not None:
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
        context = _context_of(context)
    if workers == "process" and num_workers:
        if not hasattr(os, "memfd_create"):
            raise ValueError(
                "worker processes need Linux (memory files, pidfds); use "
                "workers='thread' or num_workers=0"
            )
        _warn_of_many(num_workers)
    return context


def _warn_of_many(num_workers: int) -> None:
    """Warn, in torch's words, of more workers than there are processors."""
    available = len(os.sched_getaffinity(0))
    if num_workers > available:
        warn(
            f"This DataLoader will create {num_workers} worker processes in total. Our "
            f"suggested max number of worker in current system is {available}, which "
            "is smaller than what this DataLoader is going to create. Please be aware "
            "that excessive worker creation might get DataLoader running slow or even "
            "freeze, lower the worker number to avoid potential slowness/freeze if "
            "necessary."
        )


def check_options(*, fetch: Any, rng: Any, on_timeout: Any) -> None:
    """Check the words that say where and how workers task.

    Raises:
        ValueError: If one is another word.
    """
    for name, value, words in (
        ("fetch", fetch, ("auto", "loader", "workers")),
        ("rng", rng, (None, "batch", "sample", "worker")),
        ("on_timeout", on_timeout, ("raise", "restart")),
    ):
        if value not in words:
            known = " or ".join(repr(word) for word in words)
            raise ValueError(f"{name} must be {known}, got {value!r}")


def suits(workers: Any, dataset: Any, *functions: Any) -> bool:
    """Tell whether workers that are no processes of ours can do all.

    None of them reads streams; threads and executors do what is plain.
    """
    if isinstance(workers, RayWorkers):
        return kind_of(dataset) is Kind.MAP
    is_plain = not (reads_async(dataset) or any(map(is_async_function, functions)))
    return kind_of(dataset) is Kind.MAP and is_plain


def check_fetch(workers: Any, dataset: Any, *functions: Any) -> None:
    """Check that workers can read the samples if that is asked for.

    Raises:
        ValueError: If they cannot.
    """
    if not suits(workers, dataset, *functions):
        if isinstance(workers, RayWorkers):
            raise ValueError(
                "fetch='workers' needs a map-style dataset if workers are RayWorkers: "
                "leave it at 'auto', and the loader reads an iterable, once, for them"
            )
        raise ValueError(
            "fetch='workers' needs a map-style dataset and plain functions if workers "
            "are threads or an executor: leave it at 'auto', or use workers='process'"
        )


def check_sampling(
    kind: Kind,
    *,
    batch_size: Any,
    shuffle: Any,
    sampler: Any,
    batch_sampler: Any,
    drop_last: Any,
) -> None:
    """Check which of the ways to choose samples are given together.

    Raises:
        ValueError: If two of them exclude each other.
    """
    if kind is not Kind.MAP:
        given = {"sampler": sampler, "batch_sampler": batch_sampler}
        if shuffle not in {False, None}:
            raise ValueError(
                "DataLoader with IterableDataset: expected unspecified shuffle option, "
                f"but got shuffle={shuffle}"
            )
        for name, value in given.items():
            if value is not None:
                raise ValueError(
                    f"DataLoader with IterableDataset: expected unspecified {name} "
                    f"option, but got {name}={value}"
                )
    if sampler is not None and shuffle:
        raise ValueError("sampler option is mutually exclusive with shuffle")
    if batch_sampler is not None:
        if batch_size != 1 or shuffle or sampler is not None or drop_last:
            raise ValueError(
                "batch_sampler option is mutually exclusive with batch_size, shuffle, "
                "sampler, and drop_last"
            )
    elif batch_size is None and drop_last:
        raise ValueError(
            "batch_size=None option disables auto-batching and is mutually exclusive "
            "with drop_last"
        )


def check_places(
    *, loop: str, collate_fn: Any, transform: Any, worker_init_fn: Any
) -> None:
    """Check where things run, and that functions can be called.

    Raises:
        ValueError: If ``loop`` is another word.
        TypeError: If a function is not callable.
    """
    if loop not in {"thread", "caller"}:
        raise ValueError(f"loop must be 'thread' or 'caller', got {loop!r}")
    for name, function in (
        ("collate_fn", collate_fn),
        ("transform", transform),
        ("worker_init_fn", worker_init_fn),
    ):
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be callable, got {type(function).__name__!r}")


def check_reads(*, on_error: Any, retry: Any) -> None:
    """Check what is to happen when reads fail.

    Raises:
        TypeError: If ``retry`` is no ``Retry``, or ``on_error`` a coroutine function.
    """
    if retry is not None and not isinstance(retry, Retry):
        raise TypeError(f"retry must be an aioloader.Retry or None, got {retry!r}")
    if is_async_function(on_error):
        raise TypeError("on_error must be a plain function: it decides on the spot")


def check_resources(
    lifespan: Any,
    dataset: Any,
    transform: Any,
    collate_fn: Any,
    workers: Any,
    fetch: Any,
) -> None:
    """Check ``lifespan``, and that there is a place where it can be entered.

    Raises:
        TypeError: If it is no function that returns a context manager.
        ValueError: If an executor reads, or an async one is for plain functions.
    """
    check_lifespan(lifespan, dataset, transform, collate_fn)
    if lifespan is None or not isinstance(workers, Executor) or fetch == "loader":
        return
    if suits(workers, dataset, transform, collate_fn):
        raise ValueError(
            "lifespan cannot be entered in the workers of an executor, which are the "
            "user's own: give the executor an initializer, let the loader read "
            "(fetch='loader'), or use workers='thread' or 'process'"
        )


def can_pin(pin_memory_device: str) -> bool:
    """Tell whether batches can be pinned; warn, as torch does, where they cannot."""
    if pin_memory_device:
        warn(
            "pin_memory_device is deprecated, the current accelerator will be used as "
            f"the device, ignore pin_memory_device='{pin_memory_device}'."
        )
    found = torch.accelerator.is_available()
    accelerator = torch.accelerator.current_accelerator() if found else None
    if accelerator is None:
        warn(
            "'pin_memory' argument is set as true but no accelerator is found, then "
            "device pinned memory won't be used."
        )
    elif accelerator.type == "mps":
        warn(
            "'pin_memory' argument is set as true but not supported on MPS now, device "
            "pinned memory won't be used."
        )
    return accelerator is not None and accelerator.type != "mps"


def _check_seconds(timeout: Any) -> None:
    """Check a number, as torch does by comparing it: numpy's and a tensor's count."""
    try:
        timeout < 0  # noqa: B015
    except TypeError:
        raise TypeError(
            f"timeout option should be a number of seconds, got {timeout!r}"
        ) from None


def _check_count(name: str, value: Any) -> None:
    try:
        operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None


def _context_of(context: Any) -> Any:
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
