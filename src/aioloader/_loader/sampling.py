"""Torch's samplers for torch's arguments, and its handling of data pipes."""

import copy
import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    IterDataPipe,
    RandomSampler,
    SequentialSampler,
    graph_settings,
)
from torch.utils.data.dataloader import _InfiniteConstantSampler

from aioloader._loader.options import Options
from aioloader._loader.ranks import Ranks, refuse_two_deals
from aioloader._order.epoch import index_sampler_of
from aioloader._order.indices import nested
from aioloader._order.permutation import ShuffledIndices
from aioloader.protocols import Kind, is_own_stream


def make_samplers(
    options: Options, ranks: Ranks, shuffle: Any
) -> tuple[Any, Any, int | None]:
    """Return sampler, batch sampler and batch size, as torch's loader has them.

    The sampler of a stream is a placeholder; without batching there is no batch
    sampler, with the user's no batch size. ``shuffle`` is used up here.
    """
    sampler, batch_sampler = options.sampler, options.batch_sampler
    size, dataset, generator = options.batch_size, options.dataset, options.generator
    if sampler is None:
        if options.kind is not Kind.MAP:
            sampler = _InfiniteConstantSampler()
        elif not shuffle:
            sampler = SequentialSampler(dataset)
        elif not ranks.is_asked():
            sampler = RandomSampler(dataset, generator=generator)
        else:  # the same on all ranks, whatever their seeds
            seed = 0 if generator is None else generator.initial_seed()
            sampler = ShuffledIndices(len(dataset), seed)
    if batch_sampler is not None:
        size = None
    elif size is not None:
        batch_sampler = BatchSampler(sampler, size, options.drop_last)
    refuse_two_deals(ranks.given, dataset, sampler, batch_sampler)
    return sampler, batch_sampler, size


def own_order(sampler: Any, batch_sampler: Any) -> tuple[Any, Any]:
    """Return the samplers for a copy of a loader, with their own ``ShuffledIndices``.

    Each loader sets the epoch of its own.
    """
    order = index_sampler_of(sampler, batch_sampler)
    if not isinstance(order, ShuffledIndices):
        return sampler, batch_sampler
    own = copy.copy(order)
    if type(batch_sampler) is BatchSampler:
        batch_sampler = copy.copy(batch_sampler)
        batch_sampler.sampler = own
    elif batch_sampler is not None:
        batch_sampler = own
    return own if sampler is order else sampler, batch_sampler


def settle_shuffle(dataset: Any, shuffle: Any) -> tuple[Any, Any]:
    """Return dataset and ``shuffle``, which is applied to an ``IterDataPipe``."""
    if shuffle is None or not isinstance(dataset, IterDataPipe):
        return dataset, shuffle
    return graph_settings.apply_shuffle_settings(dataset, shuffle=shuffle), None


def draw_base_seed(generator: torch.Generator | None) -> int:
    """Draw a seed as torch does, from the user's generator or the default one."""
    drawn = torch.empty((), dtype=torch.int64).random_(generator=generator)
    return int(drawn.item())


def seed_pipe(dataset: IterDataPipe[Any], generator: torch.Generator | None) -> None:
    """Seed the random steps of a data pipe for an epoch."""
    shared = torch.Generator().manual_seed(draw_base_seed(generator))
    graph_settings.apply_random_seed(dataset, shared)


def tell_epoch(samplers: Iterable[Any], dataset: Any, epoch: int) -> None:
    """Set the next epoch's number in all parts that have ``set_epoch``."""
    parts = [*itertools.chain.from_iterable(map(nested, samplers)), dataset]
    for part in {id(part): part for part in parts}.values():
        hook = getattr(part, "set_epoch", None)
        # Our streams get each epoch's number when the epoch starts.
        if callable(hook) and not is_own_stream(part):
            hook(epoch)
