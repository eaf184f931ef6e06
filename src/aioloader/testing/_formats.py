"""A check that a shard format meets the requirements of ``ShardedStream``."""

import asyncio
import json
from collections.abc import Hashable
from contextlib import AsyncExitStack, aclosing
from itertools import product
from typing import Any

import cloudpickle

from aioloader._base.blocks import FailedSample
from aioloader.datasets._streams.shards import ShardFormat, ShardPosition, ShardReader
from aioloader.testing._frozen import compare, frozen

_BUDGETS, _LIMITS = (1, 1 << 14, 1 << 24), (1, 2, 7, 1000)
# Numbers of turns of the event loop after which a pull is cancelled.
_TURNS = (0, 1, 2, 5, 20)


async def check_shard_format(made_by: ShardFormat, *, samples: int = 64) -> None:
    """Check that a ``ShardedStream`` can use ``made_by``.

    A pickled copy must list the same shards; summary and description must be JSON. Each
    pull must return 1 to ``limit`` samples, or an empty block at the end; limits and
    budgets must not change the samples. From each position, which must be JSON, a new
    reader must return the remaining samples. Closing a reader must leave no task.

    Args:
        made_by: A format with a few small shards, at least one of them not empty.
        samples: How many samples of each shard to check positions for.

    Raises:
        AssertionError: If a check fails. Errors from reading are raised unchanged.
    """
    before = asyncio.all_tasks()
    async with AsyncExitStack() as stack:
        shards = list(await made_by.shards(stack))
        summary = made_by.summary(shards)
        assert summary.get("count") == len(shards), (
            f"summary must have 'count', the number of shards: {len(shards)}, got "
            f"{summary}"
        )
        for name, value in (("summary", summary), ("describe", made_by.describe())):
            assert _is_json(value), f"{name} must be JSON, got {value}"
        copy: ShardFormat = cloudpickle.loads(cloudpickle.dumps(made_by))
        copied = made_by.summary(list(await copy.shards(stack)))
        assert copied == summary, f"a copy lists {copied}, the original {summary}"
        whole = [await _read(made_by, shard) for shard in shards]
        assert any(whole), "there is not one sample in all shards"
        for number, (shard, expected) in enumerate(zip(shards, whole, strict=True)):
            for budget, limit in product(_BUDGETS, _LIMITS):
                read = await _read(made_by, shard, limit=limit, budget=budget)
                where = f"shard {number}, pulled by {limit} with budget={budget}"
                compare(where, "sample", expected, read)
            await _check_positions(made_by, shard, expected, samples)
            await _check_closing(made_by, shard)
    left = asyncio.all_tasks() - before
    assert not left, f"tasks are left after all was closed: {left}"


async def _check_positions(
    made_by: ShardFormat, shard: Any, expected: list[Any], samples: int
) -> None:
    """Check that reading can resume after each block, and after each sample in it."""
    for limit in (1, 5):
        count, length = 0, 1
        async with aclosing(made_by.open(shard, {}, _BUDGETS[-1])) as reader:
            while length and count <= min(samples, len(expected)):
                positions = {count: reader.position()}
                length = len(await reader.pull(limit))
                if length and (position_after := reader.positions()) is not None:
                    within = range(1, length + 1)
                    positions |= {count + n: position_after(n) for n in within}
                for number, position in positions.items():
                    where = f"after {number} samples, from {position}"
                    assert _is_json(position), f"{where}: a position must be JSON"
                    rest = await _read(made_by, shard, position)
                    compare(where, "sample", expected[number:], rest)
                count += length


async def _check_closing(made_by: ShardFormat, shard: Any) -> None:
    """Check that a reader can be closed after a cancelled pull, and before any pull."""
    for turns in _TURNS:
        before = asyncio.all_tasks()
        reader: ShardReader = made_by.open(shard, {}, _BUDGETS[1])
        pull = asyncio.ensure_future(reader.pull(1))
        for _ in range(turns):
            await asyncio.sleep(0)
        pull.cancel()
        await asyncio.wait([pull])
        await reader.aclose()
        await reader.aclose()
        left = asyncio.all_tasks() - before
        assert not left, f"closed when cancelled after {turns} turns, it leaves {left}"
    await made_by.open(shard, {}, _BUDGETS[1]).aclose()


async def _read(
    made_by: ShardFormat,
    shard: Any,
    position: ShardPosition | None = None,
    *,
    limit: int = 1000,
    budget: int = _BUDGETS[-1],
) -> list[Hashable]:
    """Return all samples after a position, in a form that can be compared."""
    samples: list[Hashable] = []
    async with aclosing(made_by.open(shard, position or {}, budget)) as reader:
        while length := len(block := await reader.pull(limit)):
            assert length <= limit, f"pull({limit}) gave {length} samples"
            samples += [
                ("failed", str(sample.error))
                if type(sample) is FailedSample
                else frozen(sample)
                for sample in block
            ]
        assert not len(await reader.pull(limit)), "there are samples after the end"
    return samples


def _is_json(value: Any) -> bool:
    return bool(json.loads(json.dumps(value)) == value)
