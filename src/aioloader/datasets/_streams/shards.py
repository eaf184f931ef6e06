"""What a sharded format offers: a list of shards, and the reading of one from a place.

All that is common to tar files, tables and rows (order, interleaving, shuffling,
sharing among readers, state) is built on these three protocols alone.
"""

import abc
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from hashlib import blake2b
from typing import Any, Protocol, TypeAlias

from typing_extensions import Buffer

from aioloader._order.blocks import Block
from aioloader.datasets._stores.addresses import Address, name_of

Shard: TypeAlias = Any
Position: TypeAlias = dict[str, Any]
# What a state holds of all shards.
Summary: TypeAlias = dict[str, Any]


# Names that are compared at once.
_PART = 1 << 10


class Parser(Protocol):
    """Bytes to samples; pure, without I/O.

    Attributes:
        offset: Where in the unpacked shard what ``take`` returns next begins.
        is_over: Nothing more will come, whatever is fed.
    """

    offset: int
    is_over: bool

    def feed(self, piece: Buffer) -> None:
        """Add bytes, valid until ``take`` returns fewer samples than asked for."""

    def end(self) -> None:
        """Learn that there are no more bytes."""

    def take(self, limit: int) -> list[Any]:
        """Return up to ``limit`` samples; fewer only if more bytes are needed."""


class ShardReader(Protocol):
    """One open shard, read forward."""

    async def pull(self, limit: int) -> Block:
        """Return the next samples, from 1 to ``limit``; an empty block at the end."""

    def begin(self) -> None:
        """Begin to read ahead, before anybody pulls; calling it is optional."""

    def position(self) -> Position:
        """Return where the sample is that follows the last one returned."""

    def is_draining(self) -> bool:
        """Tell whether all was requested, so that another shard may be opened."""

    async def aclose(self) -> None:
        """End what is under way, and wait for its end."""


class NamesPositions(abc.ABC):
    """A reader of aioloader's that can name the position after each of its samples.

    Others name that of a block, from which samples are counted.
    """

    @abc.abstractmethod
    def position_after(self, count: int) -> Position:
        """Return the position after the first ``count`` samples of the last block."""


class CountsBytes(abc.ABC):
    """A reader that can tell what it holds, so that many small shards are begun.

    Of others, one is begun while the one before it ends.
    """

    @abc.abstractmethod
    def bytes_ahead(self) -> int | None:
        """Return how many bytes were requested and not yet pulled.

        None until the size of the shard is known: that may become an eighth of the
        budget (``BEGUN``), all that a reader requests before it is pulled.
        """


class KnowsSize(abc.ABC):
    """A reader that knows how long its shard is: a state then holds that too.

    ``open`` gets it back as ``"size"`` of the position, to see whether the shard is
    still as long.
    """

    @property
    @abc.abstractmethod
    def size(self) -> int | None:
        """Length of the whole shard, in bytes; None before it is known."""


class ShardFormat(Protocol):
    """How the shards of one dataset are listed and opened."""

    async def shards(
        self, stack: AsyncExitStack, known: Summary | None = None, /
    ) -> Sequence[Shard]:
        """Return the shards in their canonical order.

        Args:
            stack: Closes, after the iteration, what all its shards need.
            known: The ``summary`` that a state was saved with, None at a beginning. A
                format that cuts its shards itself cuts them there again.
        """

    def summary(self, shards: Sequence[Shard]) -> Summary:
        """Return what a state holds of ``shards``: small, and ready for JSON.

        A state is loaded only where the shards found have an equal one. ``"count"``,
        their number, is in it.
        """

    def describe(self) -> dict[str, Any]:
        """Return what determines the samples of a shard, ready for JSON.

        Columns, say, or an encoding: a state is refused where they differ. Not: where
        the shards lie, and what is secret.
        """

    def open(self, shard: Shard, position: Position, budget: int) -> ShardReader:
        """Return a reader of ``shard`` from ``position`` on (``{}``: its beginning).

        Args:
            shard: One of ``shards``.
            position: What a reader's ``position`` returned.
            budget: Bytes that it may read ahead of what was pulled.
        """


class CutsShards(abc.ABC):
    """A format whose shards can be cut, where there are fewer than readers."""

    def count(self, shards: Sequence[Shard]) -> int:
        """Return how many there are, without those known to have no samples."""
        return len(shards)

    @abc.abstractmethod
    async def cut(self, shards: Sequence[Shard], count: int) -> Sequence[Shard]:
        """Return ``count`` shards that have the same samples in the same order.

        All ranks must find the same; what decides of it belongs into ``summary``.

        Raises:
            ValueError: If they cannot be cut; it says what to do.
        """


class OpensTogether(abc.ABC):
    """A format that can read several small shards at the cost of one."""

    @abc.abstractmethod
    def open_together(self, shards: Sequence[Shard], budget: int) -> list[ShardReader]:
        """Return readers that have begun, of the first of ``shards``; perhaps of none.

        Args:
            shards: In order.
            budget: Bytes that all of them may read ahead of what was pulled.
        """


def summary_of(addresses: Iterable[Address]) -> Summary:
    """Return the summary of shards that have addresses: how many, and which.

    They may be moved together: a name counts from the last directory that all are in,
    and has no query, where signatures are, and no account.

    Args:
        addresses: Of each shard, in order.

    Returns:
        ``"count"``, and ``"names"``, a digest.
    """
    plain = [name_of(address) for address in addresses]
    # In parts: a thread gives other threads their turn meanwhile.
    parts = [plain[start : start + _PART] for start in range(0, len(plain), _PART)]
    first, last = min(map(min, parts), default=""), max(map(max, parts), default="")
    # What the first and the last one begin with, all begin with.
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
