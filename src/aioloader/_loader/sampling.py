"""Samplers for a loader's arguments, and each rank's part of the batches.

Without ``rank``, a loader delivers all samples, as torch's does. ``rank="auto"`` is
looked up when an iteration starts, as the process group may be initialized after the
loader is made. Nothing here communicates with other ranks.
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


def given_part(rank: Any, world_size: Any, tail: Any, dataset: Any) -> RankPart | None:
    """Return the part of each batch that a loader's arguments request, or None.

    With ``rank="auto"``, only the ``tail`` is known yet.
    """
    # Streams of unknown length are padded only on request.
    is_open = isinstance(dataset, OwnStream) and dataset.outline().total is None
    tail = tail or ("uneven" if is_open else "wrap")
    if rank is not None and is_mesh(rank):
        if world_size is not None:
            raise ValueError(
                "a DeviceMesh as rank excludes world_size: it has both, got "
                f"world_size={world_size!r}"
            )
        part = rank_part(place_in(rank, "rank"), rank.size(), tail)
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
    if rank is None and world_size is None:  # at most ``tail`` is given
        return None if tail in {"wrap", "uneven"} else RankPart(tail=tail)
    return rank_part(rank, world_size, tail)


def current_part(loader: Any) -> RankPart:
    """Return the part that an iteration of ``loader`` would deliver if it began now."""
    part: RankPart = loader._given_part or WHOLE
    if (loader._own or loader).rank == "auto":
        part = rank_part(*(group() or _ranks_from_environment()), part.tail)
        refuse_double_split(part, loader.dataset, loader.sampler, loader.batch_sampler)
    return part


def check_batches(options: Options) -> None:
    """Check that batches are large enough to keep the ranks of a stream in step.

    A rank takes samples from its readers in turn. If it has more readers than a batch
    has samples, a batch may be empty once readers end, so that ranks get out of step.
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


def end_rounds(
    options: Options, epoch: int = 0, start: int = 0, own: Any = None
) -> Any:
    """Return the ``EpochEndRounds`` in which ranks agree on an end; None if unneeded.

    Rounds are needed if ranks have unknown numbers of batches and must end together.
    ``own`` is this rank's stream; ``start`` batches of ``epoch`` were delivered before.
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
    rounds = outline.end_talk(options.tail, (epoch, start))
    if rounds is None:
        raise ValueError(
            f"tail={options.tail!r} over {dataset!r} needs a store through which "
            f"rank {rank} of {ranks} agrees with the others on the end: initialize "
            "torch.distributed, or use the stream's agree(store), epoch_length(n), "
            "or tail='uneven'"
        )
    return rounds


def _ranks_from_environment() -> tuple[int, int]:
    values = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    rank, world_size = values.values()
    if rank is None and world_size is None:
        return 0, 1
    try:
        return int(rank or ""), int(world_size or "")
    except ValueError:
        raise ValueError(
            "rank='auto' needs both RANK and WORLD_SIZE in the environment, as numbers "
            f"(torchrun sets them), or neither; they are {values}"
        ) from None


def rank_part(rank: Any, world_size: Any, tail: Tail) -> RankPart:
    """Return a rank's part; raise unless rank and world size are valid."""
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


def refuse_double_split(part: RankPart, dataset: Any, *samplers: Any) -> None:
    """Check that the samples are split between ranks only once."""
    if part.world_size == 1:
        return
    asked = f"rank={part.rank} of world_size={part.world_size}"
    for sampler in itertools.chain(*map(nested, samplers)):
        count = _replicas(sampler)
        if count > 1:
            raise ValueError(
                f"{asked} and a {type(sampler).__name__} of {count} replicas would "
                "both split the samples: each rank would get 1 of "
                f"{part.world_size * count} samples; leave out one of them (rank=, or "
                "the sampler; Lightning adds none with "
                "use_distributed_sampler=False)"
            )
    # A chain's samples are split by the loader, so its streams must not be sharded.
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
    """Return how many ranks torch's or accelerate's sampler serves; 1 for others."""
    if isinstance(sampler, DistributedSampler):
        return sampler.num_replicas
    count = getattr(sampler, "num_processes", 1)
    is_shard = hasattr(sampler, "process_index") and isinstance(count, int)
    return count if is_shard else 1


def repeats_samples(options: Options, shuffle: Any) -> bool:
    """Tell whether delivering all samples on all ranks is probably a mistake."""
    # Validation on the whole dataset on each rank is common; shuffling there is not.
    if options.rank is not None:
        return False
    if options.is_own_stream:
        return options.outline().ranks is None
    return options.kind is Kind.MAP and bool(shuffle)


def warn_of_repeats() -> bool:
    """Warn if several ranks each get all samples; return whether there are several."""
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
    """Return sampler, batch sampler and batch size; without ranks, equal to torch's."""
    sampler, batch_sampler = options.sampler, options.batch_sampler
    size, dataset, generator = options.batch_size, options.dataset, options.generator
    if sampler is None:
        if options.kind is not Kind.MAP:
            sampler = _InfiniteConstantSampler()
        elif not shuffle:
            sampler = SequentialSampler(dataset)
        elif options.rank is None:
            sampler = RandomSampler(dataset, generator=generator)
        else:  # all ranks need the same order, even if torch is seeded differently
            seed = 0 if generator is None else generator.initial_seed()
            sampler = ShuffledIndices(len(dataset), seed)
    if batch_sampler is not None:
        size = None
        _check_lengths(dataset, batch_sampler)
    elif size is not None:
        batch_sampler = BatchSampler(sampler, size, options.drop_last)
    if given is not None:
        refuse_double_split(given, dataset, sampler, batch_sampler)
    return sampler, batch_sampler, size


def _check_lengths(dataset: Any, batch_sampler: Any) -> None:
    """Check that a batch sampler's ``lengths``, if any, has an entry per sample."""
    for part in nested(batch_sampler):
        lengths = getattr(part, "lengths", None)
        if lengths is None or not isinstance(part, KeyedOrder):
            continue
        expected = len(lengths)
        count = operator.length_hint(dataset, expected)  # or ``expected`` if unknown
        if count != expected:
            raise ValueError(
                f"the {type(part).__name__} has the lengths of {expected:,} samples, "
                f"but the dataset has {count:,}: make it of this dataset's lengths, "
                "one per sample"
            )


def copy_keyed_order(sampler: Any, batch_sampler: Any) -> tuple[Any, Any]:
    """Return the samplers for a copied loader, which needs its own ``KeyedOrder``."""
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


def apply_shuffle(dataset: Any, shuffle: Any) -> tuple[Any, Any]:
    """Apply ``shuffle`` to an ``IterDataPipe``; return other arguments unchanged."""
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


def set_epochs(samplers: Iterable[Any], dataset: Any, epoch: int) -> None:
    """Call ``set_epoch`` of the samplers and the dataset, except for streams."""
    parts = [*itertools.chain.from_iterable(map(nested, samplers)), dataset]
    for part in {id(part): part for part in parts}.values():
        if not isinstance(part, OwnStream):  # a stream gets it when the epoch starts
            set_epoch_of(part, epoch)
