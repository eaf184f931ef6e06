"""Types for the overloads of ``DataLoader``, which only type checkers use.

The overloads infer the type of a batch where typing can express it: tensors, lists and
dicts of tensors, or what ``collate_fn`` returns. Everything else is ``Any``.
"""

from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping
from typing import Any, Literal, Protocol, SupportsIndex, TypeAlias, TypedDict

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import TypeVar

from aioloader._base.failures import OnError, Skip
from aioloader._base.retry import Retry
from aioloader._device.naming import Device
from aioloader._loader.arguments import Workers
from aioloader._pipeline.lifespan import MakeLifespan
from aioloader._workers.rng import Rng

S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)

# Types that `default_collate` turns into a tensor.
Number: TypeAlias = torch.Tensor | np.ndarray[Any, Any] | np.number[Any] | float
K = TypeVar("K")
V = TypeVar("V", bound=Number)


class Indexed(Protocol[S_co]):
    """A dataset with ``__getitem__``, which torch's iterable datasets also have."""

    def __getitem__(self, index: int, /) -> S_co: ...


class NamedFields(Protocol):
    """A named tuple, whose fields are collated into a batch of the same type."""

    def _asdict(self) -> dict[str, Any]: ...


Samples: TypeAlias = Indexed[S | Awaitable[S]] | AsyncIterable[S]
Transform: TypeAlias = Callable[[Any], S | Awaitable[S]]
Rank: TypeAlias = int | Literal["auto"] | DeviceMesh | None
# A device without a transform, which could change the type of a batch.
DeviceLike: TypeAlias = (
    str | SupportsIndex | torch.device | DeviceMesh | Device[None] | None
)

# Samples whose batch type cannot be expressed. ``Any`` matches these overloads first.
Opaque: TypeAlias = (
    NamedFields
    | tuple[NamedFields, ...]
    | tuple[NamedFields, Any]
    | tuple[Any, NamedFields]
    | Mapping[Any, NamedFields]
)


class KeywordOnly(TypedDict, total=False):
    """The keyword-only arguments that do not change the type of a batch."""

    prefetch_factor: int | Literal["auto"] | None
    persistent_workers: bool
    pin_memory_device: str
    in_order: bool
    snapshot_every_n_steps: int | None
    concurrency: int | Literal["auto"]
    workers: Workers
    fetch: Literal["auto", "loader", "workers"]
    rng: Rng | None
    on_timeout: Literal["raise", "restart"]
    loop: Literal["thread", "caller"]
    on_error: OnError | Skip
    retry: Retry | None
    rank: Rank
    world_size: int | None
    lifespan: MakeLifespan | None
    prefetch_bytes: int | None


class Arguments(KeywordOnly, total=False):
    """All arguments that cannot change the type of a batch.

    They exclude ``tail="pad"`` and a ``Device`` with a transform.
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
    device: DeviceLike
