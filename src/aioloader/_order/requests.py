"""The requests of one epoch: index batches, or numbers of samples of a stream."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from aioloader._order.indices import index_batches


def stream_requests(batch_size: int | None) -> Iterator[range]:
    """Return places in a stream, without an end: the stream tells where it ends."""
    size = batch_size or 1
    return (range(start, start + size) for start in itertools.count(0, size))


def map_requests(
    sampler: Iterable[Any] | None, batch_sampler: Iterable[Any] | None
) -> Iterator[Any]:
    """Return the indices of each batch as a sequence; or one by one."""
    if batch_sampler is not None:
        return map(_as_sequence, index_batches(batch_sampler))
    return ([index] for index in iter(() if sampler is None else sampler))


def _as_sequence(indices: Any) -> Any:
    """Return what a batch sampler gave as something with a length and places."""
    if isinstance(indices, (Sequence, torch.Tensor, np.ndarray)):
        return indices
    return list(indices)
