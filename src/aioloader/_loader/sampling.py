"""Which samples a loader delivers: samplers for torch's arguments, and ranks' shares.

Like torch, a loader delivers everything unless it is given a ``rank``. ``"auto"`` is
looked up when an iteration starts: the process group may be made after the loader. Of a
``DeviceMesh`` only the numbers are kept.
Nothing here talks to other ranks.
"""

import copy
import itertools
import operator
import os
from collections.abc import Iterable
from math import gcd
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    DistributedSampler,
    IterDataPipe,
    RandomSampler,
    SequentialSampler,
    graph_settings,
)
from torch.utils.data.dataloader import _InfiniteConstantSampler

from aioloader._base.rank_store import group
from aioloader._base.warnings import warn
from aioloader._device.naming import is_mesh, place_in
from aioloader._loader.options import Options
from aioloader._order.epoch import index_sampler_of
from aioloader._order.indices import nested
from aioloader._order.permutation import KeyedOrder, ShuffledIndices
from aioloader._order.ranks import WHOLE, RankPart, Tail
from aioloader.protocols import Kind, OwnStream, set_epoch_of


def part_asked(rank: Any, world_size: Any, tail: Any, dataset: Any) -> RankPart | None:
    """Return the part that a loader's arguments give, or None.

    If ``rank`` is looked up, only its ``tail`` is known.
    """
    # Of some streams nobody knows how long their parts are.
    is_open = isinstance(dataset, OwnStream) and dataset.outline().total is None
    tail = tail or ("uneven" if is_open else "wrap")
    if rank is not None and is_mesh(rank):
        if world_size is not None:
            raise ValueError(
                "a DeviceMesh as rank excludes world_size: it has both, got "
                f"world_size={world_size!r}"
            )
        part = checked(place_in(rank, "rank"), rank.size(), tail)
        return part._replace(has_peers=True)
    if rank == "auto":
        if world_size is not None:
            raise ValueError(
                "rank='auto' excludes world_size: both are looked up when an "
                "iteration starts"
            )
        return RankPart(tail=tail)
    if rank == "env":
        raise ValueError(
            "rank='env' is now rank='auto': torch.distributed where it is "
            "initialized, else RANK and WORLD_SIZE of the environment"
        )
    if rank is None and world_size is None:
        # A single rank: only `tail` is given.
        return None if tail in {"wrap", "uneven"} else RankPart(tail=tail)
    return checked(rank, world_size, tail)


def part_now(loader: Any) -> RankPart:
    """Return the part of an iteration of ``loader`` that would start now."""
    part: RankPart = loader._given_part or WHOLE
    if (loader._own or loader).rank == "auto":
        part = checked(*(group() or _of_environment()), part.tail)
        refuse_two_deals(part, loader.dataset, loader.sampler, loader.batch_sampler)
    return part


def check_batches(options: Options) -> None:
    """Check that ranks that share a stream deliver a batch in each step, or have ended.

    A reader that has ended leaves its turns empty. A batch with fewer samples than the
    rank has readers may then be empty, so the rank would deliver its next one while
    others deliver this one.
    """
    outline, size = options.outline(), options.batch_size or 1
    ranks = outline.world_size * options.readers
    readers = outline.readers or ranks
    least = readers // gcd(readers, ranks)
    is_even = outline.is_endless or outline.total is not None
    if outline.world_size == 1 or size >= least or is_even:
        return
    raise ValueError(
        f"batches of {size} samples are too small for readers({readers}) on "
        f"{ranks} ranks (times workers): each takes turns at {least} readers, so "
        "when some have ended, a batch may be empty, ranks are no longer in step, "
        f"and their states cannot be merged; use a batch_size of {least} or more, "
        f"readers({ranks}), or epoch_length(count)"
    )


def end_talk(options: Options, epoch: int = 0, start: int = 0, own: Any = None) -> Any:
    """Return the ``StoreTalk`` of ranks of which nobody knows how much each has.

    By it they agree on the end of an ``epoch`` of which ``start`` batches were
    delivered, and this rank reads its ``own`` part. None: they need not agree.
    """
    outline = options.outline() if own is None else own.outline()
    dataset, (rank, ranks) = options.dataset, outline.ranks or (0, 1)
    if ranks == 1 or outline.total is not None or outline.is_endless:
        return None
    if options.tail is None:
        raise ValueError(
            f"{dataset!r} is read as rank {rank} of {ranks}, and ranks may have "
            "different numbers of batches, so that some would wait forever in "
            "collective calls: use the stream's repeat() (endless), or "
            "epoch_length(n) as its last step, or the loader's tail='drop', 'wrap' "
            "or 'pad' (ranks end together), or tail='uneven'"
        )
    if options.tail == "uneven":
        return None
    talk = outline.end_talk(options.tail, (epoch, start))
    if talk is None:
        raise ValueError(
            f"tail={options.tail!r} over {dataset!r} needs a store through which "
            f"rank {rank} of {ranks} agrees with the others on the end: initialize "
            "torch.distributed, or use the stream's agree(store), epoch_length(n), "
            "or tail='uneven'"
        )
    return talk


def _of_environment() -> tuple[int, int]:
    found = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    rank, world_size = found.values()
    if rank is None and world_size is None:
        return 0, 1
    try:
        return int(rank or ""), int(world_size or "")
    except ValueError:
        raise ValueError(
            "rank='auto' needs both RANK and WORLD_SIZE in the environment, as numbers "
            f"(torchrun sets them), or neither; they are {found}"
        ) from None


def checked(rank: Any, world_size: Any, tail: Tail) -> RankPart:
    """Return the part of one of ``world_size`` ranks."""
    if rank is None or world_size is None:
        raise ValueError(
            f"rank and world_size go together, got rank={rank!r} and "
            f"world_size={world_size!r}"
        )
    try:
        rank, world_size = operator.index(rank), operator.index(world_size)
    except TypeError:
        raise TypeError(
            "rank must be an integer or 'auto' or a DeviceMesh, and world_size an "
            f"integer, got {rank!r} and {world_size!r}"
        ) from None
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in range({world_size}), got {rank}")
    return RankPart(rank, world_size, tail)


def refuse_two_deals(part: RankPart, dataset: Any, *samplers: Any) -> None:
    """Check that the samples are split between ranks only once."""
    if part.world_size == 1:
        return
    asked = f"rank={part.rank} of world_size={part.world_size}"
    for sampler in itertools.chain(*map(nested, samplers)):
        others = _replicas(sampler)
        if others > 1:
            raise ValueError(
                f"{asked} and a {type(sampler).__name__} of {others} replicas would "
                "both split the samples: each rank would get 1 of "
                f"{part.world_size * others} samples; leave out one of them (rank=, or "
                "the sampler; Lightning puts none in with "
                "use_distributed_sampler=False)"
            )
    # The loader deals the samples of a chain, and the shards of a stream.
    is_chain = type(dataset) is ChainDataset and type(dataset.datasets) in {list, tuple}
    same = None if is_chain else (part.rank, part.world_size)
    for stream in dataset.datasets if is_chain else [dataset]:
        shard = stream.outline().ranks if isinstance(stream, OwnStream) else None
        if shard not in {None, same}:
            raise ValueError(
                f"{asked}, but the stream is sharded by shard{shard}: leave out one of "
                "them"
            )


def _replicas(sampler: Any) -> int:
    """Return how many ranks a sampler serves: torch's, or accelerate's by shape."""
    if isinstance(sampler, DistributedSampler):
        return sampler.num_replicas
    count = getattr(sampler, "num_processes", 1)
    is_shard = hasattr(sampler, "process_index") and isinstance(count, int)
    return count if is_shard else 1


def repeats_samples(options: Options, shuffle: Any) -> bool:
    """Tell whether giving all samples to all ranks is probably a mistake.

    Validating on the whole dataset on each rank is common; training in a random order
    or reading a stream that way is not.
    """
    if options.rank is not None:
        return False
    if options.is_own_stream:
        return options.outline().ranks is None
    return options.kind is Kind.MAP and bool(shuffle)


def warn_of_repeats() -> bool:
    """Warn if several ranks run and each gets all samples; return whether it warned."""
    _, ranks = group() or (0, 1)
    if ranks == 1:
        return False
    warn(
        f"torch.distributed runs {ranks} ranks, and this DataLoader delivers every "
        "sample on each of them: pass rank='auto' to share them out, a "
        "DistributedSampler, or rank=0, world_size=1 if that is meant"
    )
    return True


def make_samplers(
    options: Options, given: RankPart | None, shuffle: Any
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
        elif options.rank is None:
            sampler = RandomSampler(dataset, generator=generator)
        else:  # the same on all ranks, whatever their seeds
            seed = 0 if generator is None else generator.initial_seed()
            sampler = ShuffledIndices(len(dataset), seed)
    if batch_sampler is not None:
        size = None
        _check_lengths(dataset, batch_sampler)
    elif size is not None:
        batch_sampler = BatchSampler(sampler, size, options.drop_last)
    if given is not None:
        refuse_two_deals(given, dataset, sampler, batch_sampler)
    return sampler, batch_sampler, size


def _check_lengths(dataset: Any, batch_sampler: Any) -> None:
    """Check that a sampler that has the samples' lengths has this dataset's."""
    for part in nested(batch_sampler):
        lengths = getattr(part, "lengths", None)
        if lengths is None or not isinstance(part, KeyedOrder):
            continue
        expected = len(lengths)
        found = operator.length_hint(dataset, expected)  # it may have no length
        if found != expected:
            raise ValueError(
                f"the {type(part).__name__} has the lengths of {expected:,} samples, "
                f"but the dataset has {found:,}: make it of this dataset's lengths, "
                "one per sample"
            )


def own_order(sampler: Any, batch_sampler: Any) -> tuple[Any, Any]:
    """Return the samplers for a copy of a loader, with their own ``KeyedOrder``.

    Each loader sets the epoch of its own.
    """
    order = index_sampler_of(sampler, batch_sampler)
    if not isinstance(order, KeyedOrder):
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
    if not isinstance(dataset, IterDataPipe):
        return dataset, shuffle
    return graph_settings.apply_shuffle_settings(dataset, shuffle=shuffle), None


def draw_base_seed(generator: torch.Generator | None) -> int:
    """Draw a seed as torch does, from the user's generator or the default one."""
    drawn = torch.empty((), dtype=torch.int64).random_(generator=generator)
    return int(drawn.item())


def seed_pipe(dataset: IterDataPipe[Any], generator: torch.Generator | None) -> None:
    shared = torch.Generator().manual_seed(draw_base_seed(generator))
    graph_settings.apply_random_seed(dataset, shared)


def tell_epoch(samplers: Iterable[Any], dataset: Any, epoch: int) -> None:
    """Set the next epoch's number in all parts that have ``set_epoch``."""
    parts = [*itertools.chain.from_iterable(map(nested, samplers)), dataset]
    for part in {id(part): part for part in parts}.values():
        if not isinstance(part, OwnStream):  # they get it when the epoch starts
            set_epoch_of(part, epoch)
