"""Random numbers that depend on the batch, not on the worker that makes it.

Except with ``rng="worker"``, generators of torch, random and numpy are seeded for each
batch with a hash of (base seed, epoch, batch number). Augmentations then do not depend
on the number of workers and their scheduling, and are the same in a replay.
"""

import contextlib
import hashlib
import pickle
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np
import torch

from aioloader._order.ranks import RankPart
from aioloader._pipeline.batch_task import BatchTask

Rng: TypeAlias = Literal["batch", "sample", "worker"]
_KEY = struct.Struct("<4q")


def key_of(base_seed: int, *place: int) -> int:
    """Hash a base seed and up to three numbers, such as epoch and batch, to 63 bits."""
    numbers = (*place, -1, -1, -1)[:3]
    digest = hashlib.blake2b(_KEY.pack(base_seed, *numbers), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def keys_of(
    base_seed: int,
    epoch: int,
    part: RankPart,
    number: int,
    first: int,
    *,
    by_sample: bool,
) -> tuple[int, tuple[int, int, int] | None]:
    """Return a batch's seed, and the ``sample_keys`` of its ``BatchTask`` or None.

    With ``rng="batch"`` the seeds of ranks differ. With ``rng="sample"`` a sample's
    seed depends on its position in the epoch, not on batches and ranks.
    """
    if not by_sample:
        place = number * part.world_size + part.rank
        return key_of(base_seed, epoch, place), None
    of_epoch = key_of(base_seed, epoch)
    return key_of(of_epoch, first), (of_epoch, first, part.world_size)


def key_of_sample(task: BatchTask, position: int, stage: int) -> int:
    """Return the seed of the sample at ``position`` of ``task``, for one stage.

    With ``rng="sample"`` the seed does not depend on the sample's batch.
    """
    if task.sample_keys is None:
        return key_of(task.key or 0, position, stage)
    of_epoch, first, step = task.sample_keys
    return key_of(of_epoch, first + step * position, stage)


def seed_batch(task: BatchTask) -> None:
    """Seed the global generators for the batch ``task``, if it has a seed."""
    if task.key is not None:
        seed_all(task.key)


def seed_sample(task: BatchTask, position: int, stage: int) -> None:
    seed_all(key_of_sample(task, position, stage))


def seed_all(key: int) -> None:
    """Seed the global generators of torch (CPU), random and numpy."""
    torch.default_generator.manual_seed(key)
    random.seed(key)
    # numpy takes 2 us for a seed of one word and 13 us for one of two words.
    np.random.seed((key ^ key >> 32) & 0xFFFFFFFF)


@dataclass(eq=False, repr=False)
class BatchGenerators:
    """Private generators of a batch, sample or thread; each is made when first used."""

    key: int

    @cached_property
    def torch(self) -> torch.Generator:
        """A CPU generator, for the ``generator=`` argument of torch's functions."""
        return torch.Generator().manual_seed(self.key)

    @cached_property
    def numpy(self) -> "np.random.Generator":
        """A numpy generator (PCG64) with the same seed."""
        return np.random.default_rng(self.key)

    @cached_property
    def random(self) -> random.Random:
        """A generator of the standard library with the same seed."""
        return random.Random(self.key)  # noqa: S311  (no secret)


def states() -> bytes:
    """Return the global generators' states as bytes, to compare them."""
    torchs = torch.default_generator.get_state().numpy()
    return pickle.dumps((torchs, random.getstate(), np.random.get_state()))


@contextlib.contextmanager
def swapped_in(key: int) -> Iterator[None]:
    """Seed the global generators for the block; restore the user's states after it."""
    torch_state = torch.default_generator.get_state()
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    seed_all(key)
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def swapped_for(task: BatchTask) -> contextlib.AbstractContextManager[None]:
    """Return ``swapped_in`` for the seed of ``task``; if none, a null context."""
    key = task.key
    return contextlib.nullcontext() if key is None else swapped_in(key)


def seed_worker(base_seed: int, worker: int) -> int:
    """Seed a worker process as torch does; return its seed, ``base_seed + worker``."""
    seed = base_seed + worker
    random.seed(seed)
    torch.manual_seed(seed)
    entropy = (worker, base_seed & 0xFFFFFFFF, base_seed >> 32 & 0xFFFFFFFF, 0)
    state = np.random.SeedSequence(entropy).generate_state(4)
    np.random.seed(state)
    return seed
