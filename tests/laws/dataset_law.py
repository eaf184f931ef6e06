"""The laws of a dataset: what a loader and its workers rely on.

The dataset is read by loaders, as in use: one sample at a time and in batches, many at
once if it is async, and in a worker process.
"""

import contextlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import cloudpickle
import torch

from aioloader._loader.loader import DataLoader
from aioloader.errors import WorkerStartError
from aioloader.protocols import Kind, kind_of
from aioloader.testing._frozen import frozen, shown
from aioloader.testing._laws import assert_resumes_exactly

_BATCH = 4


def check_dataset(dataset: Any, *, samples: int = 32) -> None:
    """Check that a loader can use ``dataset``.

    Any dataset: it can be sent to a worker process, also after it was read, and gives
    equal samples there. A map-style one: it has a length; the samples at both ends and
    evenly between are equal when read again, in batches (by ``__getitems__``, if
    defined), and many at once if it is async. An iterable: it starts again in each
    epoch; a copy gives equal samples; its length, if it has one, is right; it resumes
    exactly, from its state if it has one.

    A plain dataset may use random numbers of the global generators (torch, ``random``,
    numpy): they are seeded alike for the same sample. Any other difference between two
    readings fails.

    Args:
        dataset: Of any kind; it is read.
        samples: Number of samples to check.

    Raises:
        AssertionError: If not; says what differs. Errors of reading pass through.
    """
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # of streams that are resumed by reading them again
        warnings.filterwarnings("ignore", ".*has no state_dict", UserWarning)
        if kind_of(dataset) is Kind.MAP:
            _check_map(dataset, samples)
        else:
            _check_iterable(dataset, samples)


def _check_map(dataset: Any, samples: int) -> None:
    name = type(dataset).__name__
    try:
        n = len(dataset)
    except TypeError as error:
        raise AssertionError(
            f"{name} has no length: {error}; give it a __len__, or the loader a sampler"
        ) from error
    samples = min(samples, n)
    places = [place * (n - 1) // max(1, samples - 1) for place in range(samples)]
    first = _read(dataset, sampler=places, concurrency=1)
    labels = [f"{name}[{place}]" for place in places]
    again = _read(dataset, sampler=places, batch_size=_BATCH)
    _compare(f"{name} read again, in batches,", labels, first, again)
    remote = _read(dataset, sampler=places, num_workers=1)
    _compare(f"{name} in a worker process", labels, first, remote)


def _check_iterable(dataset: Any, samples: int) -> None:
    name = type(dataset).__name__
    copied = _copies(dataset)
    loader = _loader(copied(), batch_size=None)
    with contextlib.closing(loader):
        first = _some(loader, samples)
        second = _some(loader, samples)
    is_whole = len(first) < samples
    if len(second) != len(first) and (is_whole or not second):
        raise AssertionError(
            f"{name} gave {len(first)} samples in one epoch and {len(second)} in the "
            "next; an iterable must start again whenever it is iterated, which an "
            "iterator or a generator does not"
        )
    with contextlib.suppress(TypeError, NotImplementedError):
        if is_whole and (length := len(dataset)) != len(first):
            raise AssertionError(
                f"len({name}) is {length}, but it gave {len(first)} samples"
            )
    labels = [f"sample {place}" for place in range(len(first))]
    found = _read(copied(), limit=samples)
    _compare(f"a copy of {name}", labels, first, found)
    found = _read(copied(), num_workers=1, fetch="workers", limit=samples)
    _compare(f"{name} in a worker process", labels, first, found)
    assert_resumes_exactly(
        lambda: _loader(copied(), batch_size=None),
        stops={1, len(first) // 2},
        limit=None if is_whole else samples,
        new_process=False,  # there is a worker process for that
    )


def _copies(dataset: Any) -> Callable[[], Any]:
    """Return a function that copies a dataset in its initial state, as for a worker."""
    try:
        return partial(cloudpickle.loads, cloudpickle.dumps(dataset))
    except Exception as error:
        raise _cannot_be_sent(dataset, error) from error


def _cannot_be_sent(dataset: Any, error: Exception) -> AssertionError:
    name = type(dataset).__name__
    return AssertionError(f"{name} cannot be sent to a worker process: {error}")


def _loader(dataset: Any, **options: Any) -> DataLoader[Any]:
    # Random numbers follow a sample's position, so they do not depend on batches.
    return DataLoader(dataset, collate_fn=_as_it_is, rng="sample", **options)


def _read(dataset: Any, *, limit: int | None = None, **options: Any) -> list[Any]:
    """Return the samples that a loader delivers."""
    is_batched = "batch_size" in options
    loader = _loader(dataset, **{"batch_size": None, **options})
    try:
        with contextlib.closing(loader):
            found = _some(loader, limit)
    except WorkerStartError as error:
        raise _cannot_be_sent(dataset, error) from error
    return [one for batch in found for one in batch] if is_batched else found


def _some(loader: DataLoader[Any], limit: int | None) -> list[Any]:
    """Return the first samples of an epoch, always the same one."""
    torch.manual_seed(0)
    loader.set_epoch(0)
    found: list[Any] = []
    for one in loader:
        found.append(one)
        if len(found) == limit:
            break
    return found


def _compare(how: str, labels: list[str], first: list[Any], found: list[Any]) -> None:
    if len(found) != len(first):
        raise AssertionError(
            f"{how} gave {len(found)} samples, and {len(first)} before"
        )
    for label, one, other in zip(labels, first, found, strict=True):
        if frozen(one) != frozen(other):
            raise AssertionError(
                f"{how} gave another {label}: {shown(other)}, and {shown(one)} before; "
                "random numbers must come from the global generators, or those in the "
                "saved state"
            )


def _as_it_is(batch: Any) -> Any:
    return batch
