"""Index batches, in torch's order and with torch's random draws.

Torch's samplers yield Python integers one by one, from a list of the whole permutation.
The exact torch classes are recognised here and cut from one index tensor instead; any
other sampler is iterated as it is. Draws fall on the generators in the same order as in
torch, the last, unused permutation included: a shared generator must end up the same.
"""

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from aioloader._order.permutation import ShuffledIndices

Chunk: TypeAlias = torch.Tensor | range

# Indices of a lazy order computed at a time.
_BLOCK = 1 << 15


def index_batches(index_sampler: Any) -> Iterator[Any]:
    """Yield what ``index_sampler`` yields: batches of indices, or indices."""
    chunks = index_chunks(index_sampler)
    if chunks is None:
        return iter(index_sampler)
    return map(_as_list, chunks)


def index_chunks(index_sampler: Any) -> Iterator[Chunk] | None:
    """Return the batches of an exact torch sampler as tensors or ranges, else None.

    Nothing is drawn before the first batch is asked for.

    Args:
        index_sampler: A sampler; only an exact ``BatchSampler`` over a sequential, a
            random (without replacement, each index once) or a ``ShuffledIndices``
            sampler is recognised.

    Returns:
        Batches as int64 tensors of shape ``(batch_size,)``, views of one permutation,
        or as ranges; the last may be shorter.
    """
    if type(index_sampler) is not BatchSampler:
        return None
    sampler: Any = index_sampler.sampler
    size, drop_last = index_sampler.batch_size, index_sampler.drop_last
    if type(sampler) is SequentialSampler:
        return _cut(range(len(sampler.data_source)), size, drop_last=drop_last)
    if type(sampler) is ShuffledIndices:
        return _cut_lazily(sampler, size, drop_last=drop_last)
    if type(sampler) is RandomSampler and _visits_each_once(sampler):
        return _cut_permutation(sampler, size, drop_last=drop_last)
    return None


def _visits_each_once(sampler: RandomSampler) -> bool:
    return not sampler.replacement and sampler.num_samples == len(sampler.data_source)


def _as_list(chunk: Chunk) -> list[int]:
    return list(chunk) if type(chunk) is range else chunk.tolist()


def _cut(indices: Chunk, size: int, *, drop_last: bool) -> Iterator[Chunk]:
    n = len(indices)
    for start in range(0, n - n % size if drop_last else n, size):
        yield indices[start : start + size]


def _cut_permutation(
    sampler: RandomSampler, size: int, *, drop_last: bool
) -> Iterator[Chunk]:
    n, generator = len(sampler.data_source), sampler.generator
    if generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    yield from _cut(torch.randperm(n, generator=generator), size, drop_last=drop_last)
    if sampler.generator is not None:
        torch.randperm(n, generator=generator)


def _cut_lazily(
    sampler: ShuffledIndices, size: int, *, drop_last: bool
) -> Iterator[Chunk]:
    # Of the epoch when the first batch is asked for, whatever is set meanwhile.
    order = ShuffledIndices(sampler.n, sampler.seed)
    order.set_epoch(sampler.epoch)
    step = max(1, _BLOCK // size) * size
    for start in range(0, order.n, step):
        block = torch.from_numpy(order.take(start, min(start + step, order.n)))
        yield from _cut(block, size, drop_last=drop_last)
