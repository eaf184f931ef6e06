"""What a sharded format offers: a list of shards, and the reading of one from a place.

All that is common to tar files, tables and rows (order, interleaving, shuffling,
sharing among readers, state) is built on these three protocols alone.
"""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, Protocol, TypeAlias

from typing_extensions import Buffer

from aioloader._order.blocks import Block

Shard: TypeAlias = Any
Position: TypeAlias = dict[str, Any]


class Parser(Protocol):
    """Bytes to samples; pure, without I/O.

    Attributes:
        offset: Where in the unpacked shard what ``take`` returns next begins.
        is_over: Nothing more will come, whatever is fed.
    """

    offset: int
    is_over: bool

    def feed(self, piece: Buffer) -> None:
        """Add bytes; they stay valid until the next call."""

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


class ShardFormat(Protocol):
    """How the shards of one dataset are listed and opened."""

    async def shards(self, stack: AsyncExitStack) -> Sequence[Shard]:
        """Return the shards in their canonical order.

        Args:
            stack: Closes, after the iteration, what all its shards need.
        """

    def open(self, shard: Shard, position: Position, budget: int) -> ShardReader:
        """Return a reader of ``shard`` from ``position`` on (``{}``: its beginning).

        Args:
            shard: One of ``shards``.
            position: What a reader's ``position`` returned.
            budget: Bytes that it may read ahead of what was pulled.
        """
