"""Blocks: groups of samples that move together, as a list or as columns.

A pipeline's steps move, cut and permute blocks without reading the samples, so columns
stay columns until a row is requested. A list holds a failed sample as ``FailedSample``.
"""

import inspect
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, repeat
from typing import Any, Protocol, TypeAlias, runtime_checkable

from aioloader._base.raising import ends_task, raisable


@runtime_checkable
class Columns(Protocol):
    """A block stored as columns; as a sequence it yields rows."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...

    def column(self, name: str) -> list[Any] | None:
        """Return a column's values in row order; None if there is no such column."""
        ...

    def pick(self, indices: Sequence[int]) -> "Columns":
        """Return the rows at ``indices``, in that order."""
        ...

    def joined(self, blocks: "Sequence[Columns]") -> "Columns | None":
        """Return this block followed by ``blocks``, or None if their columns differ."""
        ...

    def interleaved(self, blocks: "Sequence[Columns]") -> "Columns | None":
        """Interleave the rows of this block and ``blocks``; None if columns differ."""
        ...


Block: TypeAlias = list[Any] | Columns
_BUILTIN = {"builtins", "itertools"}
# An iterator that raises the same error this many times in a row counts as ended.
_MAX_REPEATS = 100


@dataclass(eq=False, repr=False)
class FailedSample:
    """Placeholder for a sample that could not be read or transformed."""

    error: BaseException  # its message or notes say where it failed
    is_users: bool = False  # raised by user code; a retry may succeed
    ends: bool = False  # the rest of its shard is lost, too
    then: "Block" = field(default_factory=list)  # samples after it, at its position


def read_block(iterator: Iterator[Any], limit: int) -> tuple[list[Any], bool]:
    """Return up to ``limit`` samples of an iterator, and whether the iterator ended.

    An error ends the block with a ``FailedSample``; an error also ends a generator.
    """
    block: list[Any] = []
    try:
        # The samples before an error stay in the list. ``islice`` calls ``__iter__``,
        # where a user's iterator may restart.
        if type(iterator).__module__ in _BUILTIN:
            block.extend(islice(iterator, limit))
        else:
            block.extend(map(next, repeat(iterator, limit)))
    except BaseException as error:
        block.append(failed(error))
        return block, inspect.isgenerator(iterator)
    return block, len(block) < limit


async def read_block_async(
    iterator: AsyncIterator[Any], limit: int
) -> tuple[list[Any], bool]:
    """Return up to ``limit`` samples of an async iterator, and whether it ended.

    An error ends the block with a ``FailedSample``; an error also ends a generator.
    """
    block: list[Any] = []
    try:
        for _ in range(limit):
            block.append(await anext(iterator))  # noqa: PERF401  (kept if one fails)
    except StopAsyncIteration:
        return block, True
    except BaseException as error:
        if ends_task(error):
            raise
        block.append(failed(error))
        return block, inspect.isasyncgen(iterator)
    return block, False


class SameErrors:
    """Detect an iterator that raises the same error over and over."""

    def __init__(self) -> None:
        self._error = ""
        self._count = 0

    def is_stuck(self, block: Sequence[Any]) -> bool:
        """Tell whether one error came 100 times in a row; add a note in that case."""
        last = block[-1] if len(block) else None
        if type(last) is not FailedSample:
            self._count = 0
            return False
        error = repr(last.error)
        is_same = len(block) == 1 and error == self._error
        self._error, self._count = error, 1 + (self._count if is_same else 0)
        if self._count < _MAX_REPEATS:
            return False
        last.error.add_note(
            f"aioloader: the iterator raised this {_MAX_REPEATS} times in a row, so it "
            "has ended"
        )
        return True


def failed(error: BaseException, raiser: str = "the dataset") -> FailedSample:
    """Return the placeholder of a sample that user code (``raiser``) failed to read."""
    return FailedSample(raisable(error, raiser), is_users=True)


def unreadable(block: Block) -> list[int]:
    """Return the positions in a block where the source could not read a sample.

    A position with several such samples is repeated. Errors of user code do not count.
    """
    if not isinstance(block, list) or FailedSample not in set(map(type, block)):
        return []
    return [
        position
        for position, sample in enumerate(block)
        if type(sample) is FailedSample
        for part in (sample, *sample.then)
        if type(part) is FailedSample and not part.is_users
    ]


def spread(block: Block) -> Block:
    """Return the block with every ``FailedSample.then`` spliced in after its sample."""
    if not isinstance(block, list) or FailedSample not in set(map(type, block)):
        return block
    spread: list[Any] = []
    for sample in block:
        spread.append(sample)
        if type(sample) is FailedSample:
            spread += sample.then
    return spread


def pick(block: Block, indices: Sequence[int]) -> Block:
    if isinstance(block, list):
        return [block[index] for index in indices]
    return block.pick(indices)


def join(blocks: Sequence[Block]) -> Block:
    """Concatenate ``blocks``; the result is a list unless all have the same columns."""
    blocks = [block for block in blocks if len(block)] or blocks[:1]
    joined = _together(blocks, "joined")
    return list(chain.from_iterable(blocks)) if joined is None else joined


def interleave(blocks: Sequence[Block]) -> Block:
    """Interleave ``blocks`` of equal length: all first samples, all second ones, ..."""
    interleaved = _together(blocks, "interleaved")
    if interleaved is not None:
        return interleaved
    return list(chain.from_iterable(zip(*blocks, strict=True)))


def _together(blocks: Sequence[Block], how: str) -> Block | None:
    """Combine blocks by the ``Columns`` method ``how``; None if they do not match."""
    if len(blocks) < 2:
        return blocks[0] if blocks else []
    if isinstance(blocks[0], list) or any(isinstance(b, list) for b in blocks):
        return None
    columns: Columns | None = getattr(blocks[0], how)(blocks[1:])
    return columns
