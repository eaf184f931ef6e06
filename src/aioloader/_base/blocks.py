"""Blocks: several samples that move together, as a list or as columns.

A block is moved, cut and permuted without touching its samples, so that columns stay
columns until a row is requested. A sample that failed is a ``FailedSample`` in a list.
"""

import inspect
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, repeat
from typing import Any, Protocol, TypeAlias, runtime_checkable

from aioloader._base.raising import ends_task, raisable


@runtime_checkable
class Columns(Protocol):
    """A block that is not a list; as a sequence it gives rows."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...

    def column(self, name: str) -> list[Any] | None:
        """Return the values of a column, as in rows; None if there is no such one."""
        ...

    def pick(self, indices: Sequence[int]) -> "Columns":
        """Return the rows at ``indices``, in that order."""
        ...

    def joined(self, others: "Sequence[Columns]") -> "Columns | None":
        """Return this block and ``others`` as one; None if their columns differ."""
        ...

    def interleaved(self, others: "Sequence[Columns]") -> "Columns | None":
        """Interleave: the first row of each, the second of each; or None."""
        ...


Block: TypeAlias = list[Any] | Columns
_BUILTIN = {"builtins", "itertools"}
# How often an iterator may raise the same error: a broken one does so forever.
_SAME = 100


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
    """Detect an error that an iterator raises again and again."""

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
        if self._count < _SAME:
            return False
        last.error.add_note(
            f"aioloader: the iterator raised this {_SAME} times in a row, so it has "
            "ended"
        )
        return True


def failed(error: BaseException, what: str = "the dataset") -> FailedSample:
    """Return the placeholder for a sample whose code, ``what``, raised an error."""
    return FailedSample(raisable(error, what), is_users=True)


def unreadable(block: Block) -> list[int]:
    """Return the positions of samples or shards that the source could not read.

    A position is there as often as there are such samples in it.
    """
    if not isinstance(block, list) or FailedSample not in set(map(type, block)):
        return []
    return [
        k
        for k, one in enumerate(block)
        if type(one) is FailedSample
        for each in (one, *one.then)
        if type(each) is FailedSample and not each.is_users
    ]


def spread(block: Block) -> Block:
    """Return the block with what follows failed samples in their positions."""
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
    """Return one block, or None if rows must be taken from several."""
    if len(blocks) < 2:
        return blocks[0] if blocks else []
    if isinstance(blocks[0], list) or any(isinstance(b, list) for b in blocks):
        return None
    columns: Columns | None = getattr(blocks[0], how)(blocks[1:])
    return columns
