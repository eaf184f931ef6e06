"""What a sharded format implements: listing shards, and reading one from a position.

Everything common to tar files, tables and rows (order, interleaving, shuffling, sharing
among readers, state) is built on these two base classes alone.
"""

import abc
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from hashlib import blake2b
from typing import Any, ClassVar, Generic, Literal, TypeAlias

from typing_extensions import TypeVar

from aioloader._base.blocks import Block
from aioloader.datasets._stores.addresses import Address, name_of
from aioloader.datasets._stores.versions import Version

Shard = TypeVar("Shard", default=Any)  # a format's own
Position: TypeAlias = dict[str, Any]
# Summary of all shards, kept in a state.
Summary: TypeAlias = dict[str, Any]


# What a shard without an end mark is: an error, or worth a warning.
MissingEnd: TypeAlias = Literal["error", "warn"]

# Names compared at once.
_PART = 1 << 10


class ShardReader(abc.ABC):
    """One open shard, read forward. Only ``pull`` and ``position`` have no default."""

    @abc.abstractmethod
    async def pull(self, limit: int) -> Block:
        """Return the next samples, from 1 to ``limit``; an empty block at the end."""

    @abc.abstractmethod
    def position(self) -> Position:
        """Return the position after the last sample returned."""

    def begin(self) -> None:  # noqa: B027  (a default)
        """Start reading ahead, before the first pull; calling it is optional."""

    def positions(self) -> Callable[[int], Position] | None:
        """Return what maps a number of samples of the last block to a position.

        None if samples are counted from the position before their block: right where
        a shard is the same whenever it is read.
        """
        return None

    def version(self) -> tuple[str, Version] | None:
        """Return the redacted address and the version; None if not known (yet).

        A state then holds it too; ``open`` gets it back within the position, to check
        that the shard is the same.
        """
        return None

    def bytes_ahead(self) -> float | None:
        """Return how many bytes were requested and not yet pulled.

        Small shards are opened together by it. None until the size of the shard is
        known: that reader may grow to an eighth of the budget (``START_DIVISOR``), all
        that a reader requests before it is pulled. Infinite if it is never known:
        nothing is opened after this one then, until it is the current one.
        """
        return math.inf

    def is_draining(self) -> bool:
        """Return whether all was requested, so that another shard may be opened."""
        return False

    async def aclose(self) -> None:  # noqa: B027  (a default)
        """Stop pending work and wait for it to end."""


class ShardFormat(abc.ABC, Generic[Shard]):
    """How the shards of one dataset are listed and opened.

    Only ``shards``, ``summary`` and ``open`` have no default.

    Attributes:
        changes: Whether a shard may have other samples when it is read again.
    """

    changes: ClassVar[bool] = False

    @abc.abstractmethod
    async def shards(
        self, stack: AsyncExitStack, known: Summary | None = None, /
    ) -> Sequence[Shard]:
        """Return the shards in their canonical order.

        Args:
            stack: Closes, after the iteration, what all its shards need.
            known: The ``summary`` in the state; None without a state. A format that
                cuts its shards itself cuts them at the same places again.
        """

    @abc.abstractmethod
    def summary(self, shards: Sequence[Shard]) -> Summary:
        """Return a summary of ``shards`` for a state: small, and JSON-serialisable.

        A state is loaded only if the shards found have an equal summary. It includes
        ``"count"``, their number.
        """

    @abc.abstractmethod
    def open(self, shard: Shard, position: Position, budget: int) -> ShardReader:
        """Return a reader of ``shard`` from ``position`` on (``{}``: its beginning).

        Args:
            shard: One of ``shards``.
            position: What a reader's ``position`` returned.
            budget: Bytes that it may read ahead of the pulls.
        """

    def describe(self) -> dict[str, Any]:
        """Return what determines the samples of a shard, JSON-serialisable.

        Columns or an encoding, for example: a state is refused where they differ. Left
        out: where the shards lie, and secrets.
        """
        return {}

    def count(self, shards: Sequence[Shard]) -> int:
        """Return the number of shards, without those known to be empty."""
        return len(shards)

    async def cut(self, shards: Sequence[Shard], count: int) -> Sequence[Shard]:  # noqa: ARG002
        """Return ``count`` shards that have the same samples in the same order.

        Called where there are fewer shards than readers; they are returned as they are
        if none can be cut. All ranks must get the same ones; whatever decides that
        belongs in ``summary``.

        Raises:
            ValueError: If only some can be cut; it says what to do.
        """
        return shards

    async def sizes(
        self,
        shards: Sequence[Shard],  # noqa: ARG002
        *,
        must: bool,  # noqa: ARG002
    ) -> Sequence[int] | None:
        """Return the lengths of the shards, all in one unit; None if some are unknown.

        By them readers get equal shares.

        Args:
            shards: What ``shards`` returned.
            must: Whether to ask the store for those that are unknown.
        """
        return None

    def open_together(self, shards: Sequence[Shard], budget: int) -> list[ShardReader]:  # noqa: ARG002
        """Return open readers of the first of ``shards``; of none by default.

        For small shards that can be read at the cost of one.

        Args:
            shards: In order.
            budget: Bytes that all of them may read ahead of the pulls.
        """
        return []


def summary_of(addresses: Iterable[Address]) -> Summary:
    """Return the summary of shards that have addresses: their count and names.

    They may be moved together: names, of which it has a digest, count from their last
    common directory, without queries, which hold signatures, and without accounts.
    """
    plain = [name_of(address) for address in addresses]
    # In parts, so that other threads get their turn.
    parts = [plain[start : start + _PART] for start in range(0, len(plain), _PART)]
    first, last = min(map(min, parts), default=""), max(map(max, parts), default="")
    # A prefix of the first and the last name is one of all names.
    shared = next(
        (at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b),
        min(len(first), len(last)),
    )
    start = first.rfind("/", 0, shared) + 1
    digest = blake2b(digest_size=8)
    for part in parts:
        names = "".join(f"{name[start:]}\0" for name in part)
        digest.update(names.encode("utf-8", "surrogateescape"))
    return {"count": len(plain), "names": digest.hexdigest()}
