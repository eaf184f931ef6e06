"""The arguments of ``DataLoader`` as its overloads name them, for type checkers.

The overloads say what a batch is where typing can: a batch of tensors, of tuples and
dicts of them, or what ``collate_fn`` returns. Everything else is ``Any``. Nothing here
runs when a loader is made.
"""

from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping
from typing import Any, Literal, Protocol, TypeAlias, TypedDict

import numpy as np
import torch
from typing_extensions import TypeVar

from aioloader._device.naming import Keys
from aioloader._loader.arguments import Workers
from aioloader._loader.ranks import Rank
from aioloader._order.failures import OnError
from aioloader._order.retry import Retry
from aioloader._pipeline.lifespan import MakeLifespan
from aioloader._workers.rng import Rng

S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)

# What `default_collate` makes a tensor of.
Number: TypeAlias = torch.Tensor | np.ndarray[Any, Any] | np.number[Any] | float
K = TypeVar("K")
V = TypeVar("V", bound=Number)


class Indexed(Protocol[S_co]):
    """A dataset with samples by index; torch's iterable ones have the method too."""

    def __getitem__(self, index: int, /) -> S_co:
        """Return one sample."""
        ...


class NamedFields(Protocol):
    """A named tuple, which stays one: its fields are collated, whatever their types."""

    def _asdict(self) -> dict[str, Any]: ...


Samples: TypeAlias = Indexed[S | Awaitable[S]] | AsyncIterable[S]
Transform: TypeAlias = Callable[[Any], S | Awaitable[S]]

# Samples of which `default_collate` makes something that typing cannot say. A sample
# of type Any is assignable to it and comes first, so that its batch is Any too.
Opaque: TypeAlias = (
    NamedFields
    | tuple[NamedFields, ...]
    | tuple[NamedFields, Any]
    | tuple[Any, NamedFields]
    | Mapping[Any, NamedFields]
)


class KeywordOnly(TypedDict, total=False):
    """The keyword-only arguments, but for those that change what a batch is."""

    prefetch_factor: int | Literal["auto"] | None
    persistent_workers: bool
    pin_memory_device: str
    in_order: bool
    snapshot_every_n_steps: int | None
    concurrency: int | Literal["auto"]
    device: Any
    prefetch_device: int
    device_keys: Keys | None
    workers: Workers
    fetch: Literal["auto", "loader", "workers"]
    rng: Rng | None
    on_timeout: Literal["raise", "restart"]
    loop: Literal["thread", "caller"]
    on_error: OnError
    max_failures: float | None
    retry: Retry | None
    rank: Rank
    world_size: int | None
    lifespan: MakeLifespan | None
    prefetch_bytes: int | None


class Arguments(KeywordOnly, total=False):
    """All but ``dataset``, ``batch_size``, ``collate_fn`` and ``transform``.

    With ``tail="pad"``, which is left out here, batches are ``(batch, mask)``; and a
    ``device_transform`` makes any other batch of it.
    """

    shuffle: bool | None
    sampler: Iterable[Any] | None
    batch_sampler: Iterable[Any] | None
    num_workers: int | Literal["auto"]
    pin_memory: bool
    drop_last: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: Any
    generator: torch.Generator | None
    tail: Literal["wrap", "drop", "uneven"] | None
    device_transform: None


class WithTransform(Arguments, total=False):
    """The same, with ``transform``."""

    transform: Callable[[Any], Any] | None
