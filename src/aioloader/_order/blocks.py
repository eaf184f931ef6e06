"""Blocks: several samples that move at once, as a list or as columns.

A block is moved, cut and permuted without a look at its samples, so that columns stay
columns until a row is asked for. Failed samples are in a list, as ``Bad``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, TypeAlias, runtime_checkable


@runtime_checkable
class Columns(Protocol):
    """A block that is not a list; as a sequence it gives rows."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def __getitem__(self, index: Any, /) -> Any:
        """Return one row, or for a slice a block."""
        ...

    def __iter__(self) -> Iterator[Any]:
        """Return the rows, one by one."""
        ...

    def pick(self, indices: Sequence[int]) -> "Columns":
        """Return the rows at ``indices``, in that order."""
        ...

    def joined(self, others: "Sequence[Columns]") -> "Columns | None":
        """Return this block and ``others`` as one; None if their columns differ."""
        ...

    def woven(self, others: "Sequence[Columns]") -> "Columns | None":
        """Return the first row of each, the second of each; None as for ``joined``."""
        ...


Block: TypeAlias = list[Any] | Columns


@dataclass(frozen=True)
class Bad:
    """Placeholder for a sample that could not be read or made.

    Attributes:
        error: Why; its message says where.
    """

    error: Exception


def cut(block: Block, start: int, stop: int | None = None) -> Block:
    """Return a part of ``block``."""
    part: Block = block[start:stop]
    return part


def pick(block: Block, indices: Sequence[int]) -> Block:
    """Return the samples at ``indices``, in that order."""
    if isinstance(block, list):
        return [block[index] for index in indices]
    return block.pick(indices)


def join(blocks: Sequence[Block]) -> Block:
    """Return ``blocks`` as one, in columns if all are alike."""
    blocks = [block for block in blocks if len(block)] or list(blocks[:1])
    if not blocks:
        return []
    if len(blocks) == 1:
        return blocks[0]
    first, *others = blocks
    if not isinstance(first, list) and not any(isinstance(b, list) for b in others):
        columns: Any = others
        joined = first.joined(columns)
        if joined is not None:
            return joined
    return list(chain.from_iterable(blocks))


def weave(blocks: Sequence[Block]) -> Block:
    """Return ``blocks`` of one length as one: the first of each, the second of each."""
    if len(blocks) < 2:
        return blocks[0] if blocks else []
    first, *others = blocks
    if not isinstance(first, list) and not any(isinstance(b, list) for b in others):
        columns: Any = others
        woven = first.woven(columns)
        if woven is not None:
            return woven
    return list(chain.from_iterable(zip(*blocks, strict=True)))
