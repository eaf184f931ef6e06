"""The laws of a format and of a parser: what streams of shards rely on.

Readers are opened as in a stream: in parallel, from every position, with a small
budget, and closed at any stage.
"""

import asyncio
import json
from collections.abc import Callable, Hashable, Sequence
from contextlib import AsyncExitStack, aclosing
from itertools import product
from typing import Any

import cloudpickle

from aioloader._order.blocks import Bad, Block
from aioloader.datasets._streams.shards import (
    Parser,
    Position,
    Shard,
    ShardFormat,
    ShardReader,
)
from aioloader.testing._frozen import frozen, shown

_BUDGETS = (1, 1 << 14, 1 << 24)
_LIMITS = (1, 2, 7, 1000)
_SIZES = (1, 3, 64, 1000, 1 << 30)
# Turns of the loop after which a pull is cancelled.
_TURNS = (0, 1, 2, 5, 20)

MakeParser = Callable[[str, int], Parser]


async def check_shard_format(made_by: ShardFormat, *, samples: int = 64) -> None:
    """Check that a ``ShardedStream`` can use ``made_by``.

    Shards are listed alike each time, also by a copy sent to another process; their
    summary is JSON. A reader gives from 1 to ``limit`` samples, and an empty block at
    its end and ever after; the samples do not depend on the limits, the budget or other
    readers. From the position after each sample, which is JSON, a new reader gives the
    rest. It can be closed at any time, also twice, before it has started, and after a
    pull was cancelled, and leaves no task.

    Args:
        made_by: The format, over a few small shards; not all of them empty.
        samples: Number of positions per shard from which it is read again.

    Raises:
        AssertionError: If not; says what differs. Errors of reading pass through.
    """
    before = asyncio.all_tasks()
    async with AsyncExitStack() as stack:
        shards = await _check_listing(made_by, stack)
        whole = [await _read(made_by, shard) for shard in shards]
        assert any(whole), "there is not one sample in all shards"
        for number, (shard, expected) in enumerate(zip(shards, whole, strict=True)):
            where = f"shard {number}"
            for budget, limit in product(_BUDGETS, _LIMITS):
                found = await _read(made_by, shard, limit=limit, budget=budget)
                what = f"{where}, pulled by {limit} with budget={budget}"
                _compare(what, expected, found)
            await _check_positions(made_by, shard, expected, where, samples)
            await _check_closing(made_by, shard, expected, where)
        await _check_alongside(made_by, shards, whole)
    left = asyncio.all_tasks() - before
    assert not left, f"tasks are left after all was closed: {left}"


async def _check_listing(made_by: ShardFormat, stack: AsyncExitStack) -> list[Shard]:
    shards = list(await made_by.shards(stack))
    summary = made_by.summary(shards)
    assert summary.get("count") == len(shards), (
        f"summary must have 'count', the number of shards: {len(shards)}, got {summary}"
    )
    for name, said in (("summary", summary), ("describe", made_by.describe())):
        assert json.loads(json.dumps(said)) == said, f"{name} must be JSON, got {said}"
    again = list(await made_by.shards(stack, summary))
    copy: ShardFormat = cloudpickle.loads(cloudpickle.dumps(made_by))
    copied = list(await copy.shards(stack))
    for how, found in (("again", again), ("by a copy from a pickle", copied)):
        said = made_by.summary(found)
        assert said == summary, f"shards listed {how} are {said}, they were {summary}"
    assert copy.describe() == made_by.describe(), "a copy has another description"
    return shards


async def _check_positions(
    made_by: ShardFormat, shard: Shard, expected: list[Any], where: str, samples: int
) -> None:
    """Read the rest from the position after each sample, and after each of a block."""
    for limit in (1, 5):
        count, length = 0, 1
        async with aclosing(made_by.open(shard, {}, _BUDGETS[-1])) as reader:
            while length and count <= min(samples, len(expected)):
                found = {count: reader.position()}
                length = len(await reader.pull(limit))
                if length and (positions := reader.positions()) is not None:
                    found |= {count + n: positions(n) for n in range(1, length + 1)}
                for at, position in found.items():
                    sent = json.loads(json.dumps(position))
                    what = f"{where}, after {at} samples, from {position}"
                    assert sent == position, f"{what}: a position must be JSON"
                    rest = await _read(made_by, shard, sent)
                    _compare(what, expected[at:], rest)
                count += length


async def _check_closing(
    made_by: ShardFormat, shard: Shard, expected: list[Any], where: str
) -> None:
    """Close a reader at every stage, and after a pull that was cancelled."""
    for stage in ("opened", "started", "pulled", *_TURNS):
        before = asyncio.all_tasks()
        reader = made_by.open(shard, {}, _BUDGETS[1])
        if stage == "started":
            reader.begin()
            await asyncio.sleep(0)
        elif stage == "pulled":
            await reader.pull(1)
        elif isinstance(stage, int):
            await _cancel_pull(reader, stage)
        assert isinstance(reader.is_draining(), bool), "is_draining must be a bool"
        await reader.aclose()
        await reader.aclose()
        left = asyncio.all_tasks() - before
        when = f"cancelled after {stage} turns" if stage in _TURNS else stage
        assert not left, f"{where}: closed when {when}, a reader leaves {left}"
    found = await _read(made_by, shard)
    _compare(f"{where}, after others were closed", expected, found)


async def _cancel_pull(reader: ShardReader, turns: int) -> None:
    task = asyncio.ensure_future(reader.pull(1))
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()


async def _check_alongside(
    made_by: ShardFormat, shards: Sequence[Shard], whole: list[list[Any]]
) -> None:
    """Read all shards at once, and each while the others are half read."""
    found: list[list[Any]] = [[] for _ in shards]
    async with AsyncExitStack() as stack:
        readers = [made_by.open(shard, {}, _BUDGETS[1]) for shard in shards]
        for reader in readers:
            stack.push_async_callback(reader.aclose)
            reader.begin()
        going = dict(enumerate(readers))
        while going:
            for at, reader in list(going.items()):
                block = await _pulled(reader, 3)
                found[at] += map(_frozen, block)
                if not len(block):
                    del going[at]
    for number, (expected, got) in enumerate(zip(whole, found, strict=True)):
        _compare(f"shard {number}, read alongside the others", expected, got)


async def _read(
    made_by: ShardFormat,
    shard: Shard,
    position: Position | None = None,
    *,
    limit: int = 1000,
    budget: int = _BUDGETS[-1],
) -> list[Any]:
    """Return all samples after a position."""
    found: list[Any] = []
    async with aclosing(made_by.open(shard, position or {}, budget)) as reader:
        while len(block := await _pulled(reader, limit)):
            found += map(_frozen, block)
        assert not len(await reader.pull(limit)), "there are samples after the end"
    return found


async def _pulled(reader: ShardReader, limit: int) -> Block:
    block = await reader.pull(limit)
    length = len(block)
    assert length <= limit, f"pull({limit}) gave {length} samples, over its limit"
    return block


def check_parser(make: MakeParser, data: bytes) -> None:
    """Check that a ``ByteStream`` can use the parsers of ``make``.

    Samples do not depend on the pieces or on how many are taken; they do not change
    when the buffer of a piece is reused. ``take`` returns less than its limit only if
    there are no more. From ``offset``, before each sample, a new parser gives the rest.
    After the end, and once ``is_over``, there is nothing more.

    Args:
        make: Makes a parser from an address and the offset of its first byte.
        data: A small shard, of a few samples.

    Raises:
        AssertionError: If not; says what differs.
    """
    expected = _parsed(make, data, len(data) or 1, 1 << 30)
    assert expected, "there is not one sample in the data"
    for size, limit in product(_SIZES, _LIMITS):
        found = _parsed(make, data, size, limit)
        _compare(f"in pieces of {size:,} bytes, taken by {limit}", expected, found)
    _check_offsets(make, data, expected)


def _check_offsets(make: MakeParser, data: bytes, expected: list[Any]) -> None:
    parser = make("shard", 0)
    assert parser.offset == 0, f"offset must be 0 at the beginning, not {parser.offset}"
    parser.feed(data)
    is_ended = False
    for count in range(len(expected) + 1):
        offset = parser.offset
        assert 0 <= offset <= len(data), f"offset {offset} is outside the data"
        rest = _parsed(make, data, len(data) or 1, 1000, offset)
        what = f"from offset {offset}, before sample {count}"
        _compare(what, expected[count:], rest)
        if not (found := parser.take(1)) and not is_ended:
            is_ended = True
            parser.end()
            found = parser.take(1)
        assert len(found) == (count < len(expected)), (
            f"take(1) gave {len(found)} samples after {count} of {len(expected)}"
        )


def _parsed(
    make: MakeParser, data: bytes, size: int, limit: int, offset: int = 0
) -> list[Any]:
    """Return all samples of ``data`` after an offset, fed in pieces of ``size``."""
    parser = make("shard", offset)
    taken: list[Any] = []
    buffer = bytearray(min(size, max(1, len(data))))
    for start in range(offset, len(data), size):
        if parser.is_over:
            break
        piece = data[start : start + size]
        buffer[: len(piece)] = piece
        parser.feed(memoryview(buffer)[: len(piece)])
        _take_all(parser, limit, taken)
        buffer[:] = b"\xff" * len(buffer)  # the piece is no longer valid
    if not parser.is_over:
        parser.end()
        _take_all(parser, limit, taken)
    assert not parser.take(limit), "there are samples after the end"
    return [_frozen(sample) for sample in taken]


def _take_all(parser: Parser, limit: int, taken: list[Any]) -> None:
    while found := parser.take(limit):
        assert len(found) <= limit, f"take({limit}) gave {len(found)} samples"
        taken += found
        if len(found) < limit:
            break
    more = parser.take(limit)
    assert not more, f"take({limit}) gave fewer samples, and there were more"


def _frozen(sample: Any) -> Hashable:
    if type(sample) is Bad:
        return "a failed sample", type(sample.error), str(sample.error)
    return frozen(sample)


def _compare(where: str, expected: list[Any], found: list[Any]) -> None:
    """Name the first sample that differs."""
    for at, (first, second) in enumerate(zip(expected, found, strict=False)):
        assert first == second, (
            f"{where}: sample {at} is {shown(second)}, it was {shown(first)}"
        )
    assert len(expected) == len(found), (
        f"{where}: there are {len(found)} samples, there were {len(expected)}"
    )
