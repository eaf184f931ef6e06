"""The laws of a dataset: what a loader, and its workers, take for granted of it.

It is read by loaders, as it will be: one sample at a time and in batches, many at once
where it is async, and in a worker process.
"""

import contextlib
import warnings
from collections.abc import Iterator
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
    """Check that ``dataset`` is what a loader needs.

    Of any dataset: it can be sent to a worker process, also after it was read, and
    gives equal samples there. Of a map-style one: it has a length; the samples at both
    ends and evenly between are equal when they are read again, in batches (by
    ``__getitems__``, where that counts), and many at once if it is async. Of an
    iterable: it begins anew for each epoch; a copy gives equal samples; its length, if
    it has one, is right; it resumes exactly, by its state if it has one.

    A plain dataset may draw at random from the global generators (torch, ``random``,
    numpy): they are seeded alike for the same sample. Anything else that makes samples
    differ from one reading to the next fails.

    Args:
        dataset: Of any kind; it is read.
        samples: How many samples are looked at.

    Raises:
        AssertionError: If it is not; says what differs. What reading raises is raised.
    """
    with torch.random.fork_rng(devices=[]), _without_replay_warnings():
        if kind_of(dataset) is Kind.MAP:
            _check_map(dataset, samples)
        else:
            _check_iterable(dataset, samples)


@contextlib.contextmanager
def _without_replay_warnings() -> Iterator[None]:
    """Keep quiet about streams that are resumed by reading them again."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*has no state_dict", UserWarning)
        yield


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
    copied = _Copies(dataset)
    loader = _loader(copied.one(), batch_size=None)
    with contextlib.closing(loader):
        first = _some(loader, samples)
        second = _some(loader, samples)
    is_whole = len(first) < samples
    if len(second) != len(first) and (is_whole or not second):
        raise AssertionError(
            f"{name} gave {len(first)} samples in one epoch and {len(second)} in the "
            "next; an iterable must begin anew whenever it is iterated, which an "
            "iterator or a generator does not"
        )
    if is_whole:
        _check_length(name, dataset, len(first))
    labels = [f"sample {place}" for place in range(len(first))]
    found = _read(copied.one(), limit=samples)
    _compare(f"a copy of {name}", labels, first, found)
    found = _read(copied.one(), num_workers=1, fetch="workers", limit=samples)
    _compare(f"{name} in a worker process", labels, first, found)
    assert_resumes_exactly(
        lambda: _loader(copied.one(), batch_size=None),
        stops={1, len(first) // 2},
        limit=None if is_whole else samples,
    )


def _check_length(name: str, dataset: Any, found: int) -> None:
    with contextlib.suppress(TypeError, NotImplementedError):
        length = len(dataset)
        if length != found:
            raise AssertionError(
                f"len({name}) is {length}, but it gave {found} samples"
            )


class _Copies:
    """Copies of a dataset as it was at first, made as for a worker."""

    def __init__(self, dataset: Any) -> None:
        try:
            self._data = cloudpickle.dumps(dataset)
        except Exception as error:
            name = type(dataset).__name__
            raise AssertionError(
                f"{name} cannot be sent to a worker process: {error}"
            ) from error

    def one(self) -> Any:
        """Return another one."""
        return cloudpickle.loads(self._data)


def _loader(dataset: Any, **options: Any) -> DataLoader[Any]:
    # Draws are keyed by a sample's place, so that they do not depend on batches.
    return DataLoader(dataset, collate_fn=_as_it_is, rng="sample", **options)


def _read(dataset: Any, *, limit: int | None = None, **options: Any) -> list[Any]:
    """Return the samples that a loader delivers."""
    is_batched = "batch_size" in options
    loader = _loader(dataset, **{"batch_size": None, **options})
    try:
        with contextlib.closing(loader):
            found = _some(loader, limit)
    except WorkerStartError as error:
        name = type(dataset).__name__
        raise AssertionError(
            f"{name} cannot be sent to a worker process: {error}"
        ) from error
    return [one for batch in found for one in batch] if is_batched else found


def _some(loader: DataLoader[Any], limit: int | None) -> list[Any]:
    """Return what comes first of the same epoch."""
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
                "what draws at random must draw from the global generators, or from "
                "the state that is saved"
            )


def _as_it_is(batch: Any) -> Any:
    return batch
