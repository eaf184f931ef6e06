"""Random numbers that depend on the batch, not on the worker that makes it.

Before each batch the generators of torch, random and numpy are seeded from (base seed,
epoch, batch number), so that augmentations do not depend on the number of workers,
their scheduling or a replay. Python's and numpy's own seeding does the mixing.
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
    """Return a 63-bit seed for up to three numbers, such as epoch and batch."""
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
    """Return the key of a batch, and the base of its samples' keys or None.

    Keys of batches (``rng="batch"``) differ on each rank; those of samples
    (``"sample"``) are independent of batches and ranks.
    """
    if not by_sample:
        place = number * part.world_size + part.rank
        return key_of(base_seed, epoch, place), None
    of_epoch = key_of(base_seed, epoch)
    return key_of(of_epoch, first), (of_epoch, first, part.world_size)


def key_of_sample(task: BatchTask, position: int, stage: int) -> int:
    """Return the seed of one sample of ``task`` in one of its stages.

    With ``rng="sample"`` it does not depend on the sample's batch.
    """
    if task.sample_keys is None:
        return key_of(task.key or 0, position, stage)
    of_epoch, first, step = task.sample_keys
    return key_of(of_epoch, first + step * position, stage)


def seed_batch(task: BatchTask) -> None:
    """Seed the global generators for the plain code of ``task``, if it has a seed."""
    if task.key is not None:
        seed_all(task.key)


def seed_sample(task: BatchTask, position: int, stage: int) -> None:
    seed_all(key_of_sample(task, position, stage))


def seed_all(key: int) -> None:
    """Seed the global generators of torch (CPU), random and numpy."""
    torch.default_generator.manual_seed(key)
    random.seed(key)
    # A seed of one word costs 2 us, of two words 13.
    np.random.seed((key ^ key >> 32) & 0xFFFFFFFF)


@dataclass(eq=False, repr=False)
class BatchGenerators:
    """Generators of one batch, for code that does not draw from the global ones."""

    key: int

    @cached_property
    def torch(self) -> torch.Generator:
        """A CPU generator for ``generator=`` of torch's functions."""
        return torch.Generator().manual_seed(self.key)

    @cached_property
    def numpy(self) -> "np.random.Generator":
        """A numpy generator (PCG64)."""
        return np.random.default_rng(self.key)

    @cached_property
    def random(self) -> random.Random:
        """A generator of the standard library."""
        return random.Random(self.key)  # noqa: S311  (no secret)


def states() -> bytes:
    """Return the states of the global generators in a comparable form."""
    torchs = torch.default_generator.get_state().numpy()
    return pickle.dumps((torchs, random.getstate(), np.random.get_state()))


@contextlib.contextmanager
def swapped_in(key: int) -> Iterator[None]:
    """Seed the global generators, and restore the user's states afterwards."""
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
    """Return a context that seeds plain code of ``task``, then restores the states."""
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
