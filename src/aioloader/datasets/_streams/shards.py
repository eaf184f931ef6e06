"""What a sharded format implements: listing shards, and reading one from a position.

Everything common to tar files, tables and rows (order, interleaving, shuffling, sharing
among readers, state) is built on these three protocols alone.
"""

import abc
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from hashlib import blake2b
from typing import Any, Literal, Protocol, TypeAlias, get_args

from typing_extensions import Buffer

from aioloader._order.blocks import Block
from aioloader.datasets._stores.addresses import Address, name_of
from aioloader.datasets._stores.versions import Version

Shard: TypeAlias = Any
Position: TypeAlias = dict[str, Any]
# Summary of all shards, kept in a state.
Summary: TypeAlias = dict[str, Any]


# What a shard without an end mark is: an error, or worth a warning.
MissingEnd: TypeAlias = Literal["error", "warn"]

# Names compared at once.
_PART = 1 << 10


class Parser(Protocol):
    """Bytes to samples; pure, without I/O.

    Accepted for one more release: a generator function of a file is shorter.

    Attributes:
        offset: Position in the unpacked shard of the next sample from ``take``.
        is_over: No sample will follow, whatever is fed.
    """

    offset: int
    is_over: bool

    def feed(self, piece: Buffer) -> None:
        """Add bytes, valid until ``take`` returns fewer samples than asked for."""

    def end(self) -> None:
        """Note that there are no more bytes.

        If the format shows that a shard may not end there, a ``Bad`` with a
        ``TruncatedReadError`` follows the samples before it. Where the format cannot
        show it, as with lines, the length of the shard was compared.
        """

    def take(self, limit: int) -> list[Any]:
        """Return up to ``limit`` samples; fewer only if more bytes are needed."""


class ShardReader(Protocol):
    """One open shard, read forward."""

    async def pull(self, limit: int) -> Block:
        """Return the next samples, from 1 to ``limit``; an empty block at the end."""

    def begin(self) -> None:
        """Start reading ahead, before the first pull; calling it is optional."""

    def position(self) -> Position:
        """Return the position after the last sample returned."""

    def is_draining(self) -> bool:
        """Return whether all was requested, so that another shard may be opened."""

    async def aclose(self) -> None:
        """Stop pending work and wait for it to end."""


class NamesPositions(abc.ABC):
    """A reader of aioloader's that can name the position after each of its samples.

    Other readers name that of a block, from which samples are counted.
    """

    @abc.abstractmethod
    def positions(self) -> Callable[[int], Position]:
        """Return what maps a number of samples of the last block to a position."""


class CountsBytes(abc.ABC):
    """A reader that knows how much it has read ahead, so small shards open together.

    With other readers, the next shard is opened while the current one ends.
    """

    @abc.abstractmethod
    def bytes_ahead(self) -> int | None:
        """Return how many bytes were requested and not yet pulled.

        None until the size of the shard is known: that reader may grow to an eighth of
        the budget (``START_DIVISOR``), all that a reader requests before it is pulled.
        """


class KnowsVersion(abc.ABC):
    """A reader that knows the version of its shard, which a state then holds too.

    ``open`` gets it back within the position, to check that the shard is the same.
    """

    @abc.abstractmethod
    def version(self) -> tuple[str, Version] | None:
        """Return the redacted address and the version; None before it is known."""


class ShardFormat(Protocol):
    """How the shards of one dataset are listed and opened."""

    async def shards(
        self, stack: AsyncExitStack, known: Summary | None = None, /
    ) -> Sequence[Shard]:
        """Return the shards in their canonical order.

        Args:
            stack: Closes, after the iteration, what all its shards need.
            known: The ``summary`` in the state; None without a state. A format that
                cuts its shards itself cuts them at the same places again.
        """

    def summary(self, shards: Sequence[Shard]) -> Summary:
        """Return a summary of ``shards`` for a state: small, and JSON-serialisable.

        A state is loaded only where the shards found have an equal one. It includes
        ``"count"``, their number.
        """

    def describe(self) -> dict[str, Any]:
        """Return what determines the samples of a shard, JSON-serialisable.

        Columns or an encoding, for example: a state is refused where they differ. Left
        out: where the shards lie, and secrets.
        """

    def open(self, shard: Shard, position: Position, budget: int) -> ShardReader:
        """Return a reader of ``shard`` from ``position`` on (``{}``: its beginning).

        Args:
            shard: One of ``shards``.
            position: What a reader's ``position`` returned.
            budget: Bytes that it may read ahead of the pulls.
        """


class CutsShards(abc.ABC):
    """A format whose shards can be cut, if there are fewer shards than readers."""

    def count(self, shards: Sequence[Shard]) -> int:
        """Return the number of shards, without those known to be empty."""
        return len(shards)

    @abc.abstractmethod
    async def cut(self, shards: Sequence[Shard], count: int) -> Sequence[Shard]:
        """Return ``count`` shards that have the same samples in the same order.

        All ranks must get the same ones; whatever decides that belongs in ``summary``.

        Raises:
            ValueError: If they cannot be cut; it says what to do.
        """


class WeighsShards(abc.ABC):
    """A format that knows how long its shards are, so that readers get equal shares."""

    @abc.abstractmethod
    async def sizes(
        self, shards: Sequence[Shard], *, must: bool
    ) -> Sequence[int] | None:
        """Return the lengths of the shards, all in one unit; None if some are unknown.

        Args:
            shards: What ``shards`` returned.
            must: Whether to ask the store for those that are unknown.
        """


class OpensTogether(abc.ABC):
    """A format that can read several small shards at the cost of one."""

    @abc.abstractmethod
    def open_together(self, shards: Sequence[Shard], budget: int) -> list[ShardReader]:
        """Return open readers of the first of ``shards``; perhaps of none.

        Args:
            shards: In order.
            budget: Bytes that all of them may read ahead of the pulls.
        """


def check_missing_end(given: object) -> None:
    """Check an argument.

    Raises:
        ValueError: If it is not one of the words.
    """
    if given not in get_args(MissingEnd):
        raise ValueError(f"missing_end must be 'error' or 'warn', got {given!r}")


def summary_of(addresses: Iterable[Address]) -> Summary:
    """Return the summary of shards that have addresses: their count and names.

    They may be moved together: names count from their last common directory, without
    queries, which hold signatures, and without accounts.

    Args:
        addresses: Those of the shards, in order.

    Returns:
        ``"count"``, and ``"names"``, a digest.
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
