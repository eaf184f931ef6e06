"""Blocks: several samples that move together, as a list or as columns.

Steps move, cut and permute blocks without touching samples, so columns stay columns
until a row is requested. A sample that failed is a ``FailedSample`` in a list.
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
        """Return a column's values, as in rows; None if there is no such column."""
        ...

    def pick(self, indices: Sequence[int]) -> "Columns":
        """Return the rows at ``indices``, in that order."""
        ...

    def joined(self, blocks: "Sequence[Columns]") -> "Columns | None":
        """Append ``blocks`` to this one; return None if their columns differ."""
        ...

    def interleaved(self, blocks: "Sequence[Columns]") -> "Columns | None":
        """Interleave with ``blocks``: the first row of each, the second; or None."""
        ...


Block: TypeAlias = list[Any] | Columns
_BUILTIN = {"builtins", "itertools"}
# How often an iterator may raise the same error: a broken iterator raises it forever.
_MAX_REPEATS = 100


@dataclass(eq=False, repr=False)
class FailedSample:
    """Placeholder for a sample that could not be read or made."""

    error: BaseException  # why; its message says where
    is_users: bool = False  # user code raised it, and need not fail again
    ends: bool = False  # whether the rest of its shard is lost with it
    then: "Block" = field(default_factory=list)  # what follows it in the same position


def read_block(iterator: Iterator[Any], limit: int) -> tuple[list[Any], bool]:
    """Return the next samples of a plain iterator, and whether it has ended.

    A failure is the last sample of its block. A generator that raised has ended.
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
    """Return the next samples of an async iterator, and whether it has ended.

    A failure is the last sample of its block. A generator that raised has ended.
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
        """Tell whether the latest blocks held only the same error, many times."""
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
    """Return the placeholder for a sample for which ``raiser`` raised an error."""
    return FailedSample(raisable(error, raiser), is_users=True)


def unreadable(block: Block) -> list[int]:
    """Return the positions of samples or shards that the source could not read.

    A position that holds several unreadable samples is repeated as often.
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
    """Return the block with the samples in ``FailedSample.then`` as its own."""
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
    """Concatenate ``blocks``, as columns if all have the same."""
    blocks = [block for block in blocks if len(block)] or blocks[:1]
    joined = _together(blocks, "joined")
    return list(chain.from_iterable(blocks)) if joined is None else joined


def interleave(blocks: Sequence[Block]) -> Block:
    """Interleave ``blocks`` of equal length: the first of each, the second of each."""
    interleaved = _together(blocks, "interleaved")
    if interleaved is not None:
        return interleaved
    return list(chain.from_iterable(zip(*blocks, strict=True)))


def _together(blocks: Sequence[Block], how: str) -> Block | None:
    """Combine blocks by the method ``how``; None unless all are alike columns."""
    if len(blocks) < 2:
        return blocks[0] if blocks else []
    if isinstance(blocks[0], list) or any(isinstance(b, list) for b in blocks):
        return None
    columns: Columns | None = getattr(blocks[0], how)(blocks[1:])
    return columns
