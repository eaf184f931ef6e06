"""The request for a batch, and what is known of a sampler before it is iterated."""

import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from torch.utils.data import (
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from aioloader._order.permutation import ShuffledIndices

State: TypeAlias = dict[str, Any]
_DEEPEST = 8  # limit on wrappers around a sampler


class IndexBatch(NamedTuple):
    """The request for one batch.

    Attributes:
        number: Position of the (global) batch in the epoch, from 0.
        first: Position of its first sample in the order of all ranks.
        indices: The sampler's indices.
        padding: How many of them, the last ones, are padding.
        state: The sampler's state after this batch, if it has one.
    """

    number: int
    first: int
    indices: Any
    padding: int = 0
    state: Any = None


def nested(sampler: Any) -> Iterator[Any]:
    """Yield a sampler and those it wraps, by the attributes that wrappers use."""
    seen: list[Any] = []
    waiting = [sampler]
    while waiting:
        part = waiting.pop(0)
        if part is None or any(part is one for one in seen) or len(seen) == _DEEPEST:
            continue
        seen.append(part)
        yield part
        waiting += [getattr(part, name, None) for name in ("batch_sampler", "sampler")]


def described(sampler: Any) -> State:
    """Return what is known of a sampler before it is iterated."""
    try:
        length = len(sampler)
    except Exception:  # noqa: BLE001  (torch iterates without asking for it)
        length = None
    state: State = {"sampler": type(sampler).__name__, "length": length}
    if isinstance(sampler, ShuffledIndices):
        state |= {"seed": sampler.seed, "epoch": sampler.epoch}
    for part in nested(sampler):
        if type(part) in {RandomSampler, WeightedRandomSampler}:
            state["replacement"] = part.replacement
    return state


def contents_of(sampler: Any) -> State:
    """Return a checksum of the indices or weights that an epoch is drawn from.

    They may change from epoch to epoch, but not within one. Empty if there are none, or
    they are no numbers.
    """
    values: Any
    for part in nested(sampler):
        if type(part) is SubsetRandomSampler:
            values, dtype = part.indices, "<i8"
        elif type(part) is WeightedRandomSampler:
            values, dtype = part.weights, "<f8"
        else:
            continue
        try:
            return {"contents": zlib.crc32(np.ascontiguousarray(values, dtype).data)}
        except (TypeError, ValueError, OverflowError, RuntimeError):
            return {}
    return {}


def epoch_of(part: Any) -> int | None:
    """Return the epoch of a sampler, perhaps a wrapped one, or of a dataset.

    None if it cannot be read as ``epoch`` and set with ``set_epoch``.
    """
    counts = _with_epoch(part)
    return None if counts is None else int(counts.epoch)


def set_epoch(part: Any, epoch: int | None) -> None:
    """Set the epoch that ``epoch_of`` returned, if it did."""
    counts = _with_epoch(part)
    if counts is not None and epoch is not None:
        counts.set_epoch(epoch)


def _with_epoch(part: Any) -> Any:
    for one in nested(part):
        is_known = type(getattr(one, "epoch", None)) is int
        if is_known and callable(getattr(one, "set_epoch", None)):
            return one
    return None
