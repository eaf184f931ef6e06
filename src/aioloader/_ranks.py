"""Which rank a loader serves: told by its arguments, the environment or torch.

A dataset is dealt to ranks by the loader only where nothing else does it: a sampler
that the user gives, and an iterable, may know of ranks by themselves.
"""

import operator
import os
from typing import Any, Literal, TypeAlias

import torch.distributed
from torch.utils.data import DistributedSampler

from aioloader._order.orders import nested
from aioloader._order.permutation import ShuffledIndices
from aioloader._order.ranks import Part, Tail
from aioloader.datasets.streams import Stream
from aioloader.protocols import Kind, kind_of

Rank: TypeAlias = int | Literal["env"] | None
_TAILS = (None, "wrap", "pad", "drop", "uneven")


def part_of(
    rank: Any, world_size: Any, tail: Any, dataset: Any, *, has_sampler: bool
) -> Part | None:
    """Return the part that a loader is to deliver; None: nobody has asked for ranks.

    Raises:
        ValueError: If the arguments exclude each other or are out of range.
        TypeError: If one is of the wrong type.
    """
    if tail not in _TAILS:
        known = " or ".join(repr(word) for word in _TAILS)
        raise ValueError(f"tail must be {known}, got {tail!r}")
    is_stream = isinstance(dataset, Stream)
    if is_stream and tail not in {None, "uneven"}:
        raise ValueError(
            f"tail={tail!r} needs to know where the other ranks' shards end, and "
            "streams do not tell; use tail='uneven', or take(count) for equal numbers"
        )
    tail = tail or ("uneven" if is_stream else "wrap")
    if rank == "env":
        rank, world_size = _from_environment(world_size)
    elif rank is None and world_size is None:
        return _by_default(tail, dataset, has_sampler=has_sampler)
    return _checked(rank, world_size, tail)


def _from_environment(world_size: Any) -> tuple[int, int]:
    if world_size is not None:
        raise ValueError("rank='env' excludes world_size: both come from there")
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        found = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
        raise ValueError(
            "rank='env' needs the numbers RANK and WORLD_SIZE in the environment, as "
            f"torchrun sets them; they are {found}"
        ) from None


def _checked(rank: Any, world_size: Any, tail: Tail) -> Part:
    if rank is None or world_size is None:
        raise ValueError(
            f"rank and world_size go together, got rank={rank!r} and "
            f"world_size={world_size!r}"
        )
    try:
        rank, world_size = operator.index(rank), operator.index(world_size)
    except TypeError:
        raise TypeError(
            "rank must be an integer or 'env', and world_size an integer, got "
            f"{rank!r} and {world_size!r}"
        ) from None
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in range({world_size}), got {rank}")
    return Part(rank, world_size, tail)


def _by_default(tail: Tail, dataset: Any, *, has_sampler: bool) -> Part | None:
    """Deal what torch would give to all ranks alike: a dataset without a sampler."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return None if tail in {"wrap", "uneven"} else Part(tail=tail)
    is_stream = isinstance(dataset, Stream)
    if not is_stream and (has_sampler or kind_of(dataset) is not Kind.MAP):
        return None
    return Part(distributed.get_rank(), distributed.get_world_size(), tail)


def check_dealt_once(part: Part, sampler: Any, batch_sampler: Any) -> None:
    """Check that the samplers do not deal to ranks what is dealt here.

    Raises:
        ValueError: If one does: each rank would get a part of its part.
    """
    if part.world_size == 1:
        return
    for found in (*nested(batch_sampler), *nested(sampler)):
        if isinstance(found, DistributedSampler) or _is_shard(found):
            raise ValueError(
                f"{type(found).__name__} deals to ranks already, and so does "
                f"rank={part.rank} of {part.world_size}: each would get a part of its "
                "part. Leave rank= and world_size= out, or have the framework put no "
                "sampler in (Lightning: use_distributed_sampler=False)"
            )


def _is_shard(sampler: Any) -> bool:
    """Tell whether it is like accelerate's ``BatchSamplerShard``."""
    count = getattr(sampler, "num_processes", 1)
    return hasattr(sampler, "process_index") and isinstance(count, int) and count > 1


def shuffled(dataset: Any, generator: torch.Generator | None) -> ShuffledIndices:
    """Return an order that is the same on all ranks, however each is seeded."""
    seed = 0 if generator is None else generator.initial_seed()
    return ShuffledIndices(len(dataset), seed)
