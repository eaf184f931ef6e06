"""Files in the page cache are read without a thread; the samples are the same.

What the cache has is played: the kernel decides it otherwise.
"""

import asyncio
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aioloader.datasets import JSONLinesDataset, TextDataset

SMALL, LARGE = "x" * 200, "y" * 700_000
PLANS: dict[str, list[float]] = {
    "all": [1],
    "half of each": [0.5],
    "nothing": [0],
    "less and less": [1, 0.5, 0.001, 0],
    "nothing, as Linux 5.9 has it": [1, -1],
}


def play(plan: list[float]) -> Callable[..., int]:
    """Return a ``preadv`` that has these shares of what is wanted.

    0: it would wait; -1: it returns 0 instead of saying so.
    """
    shares = itertools.chain(plan, itertools.repeat(plan[-1]))

    def preadv(file: int, buffers: list[memoryview], _at: int, _flags: int) -> int:
        share = next(shares)
        if not share:
            raise BlockingIOError
        if share < 0:
            return 0
        return os.readv(file, [buffers[0][: max(1, int(len(buffers[0]) * share))]])

    return preadv


def lines() -> Iterator[str]:
    for at in range(6000):
        yield json.dumps([at, LARGE if at in {3000, 3001} else SMALL])


def write(folder: Path) -> Path:
    path = folder / "a.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines()))
    return path


@pytest.mark.parametrize("plan", PLANS)
async def test_samples_and_states_do_not_depend_on_the_cache(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path)
    monkeypatch.setattr(os, "preadv", play(PLANS[plan]))
    for kind, known in (
        (JSONLinesDataset, [*map(json.loads, lines())]),
        (TextDataset, [*lines()]),
    ):
        found: list[Any] = []
        states: list[tuple[int, Any]] = []
        async with aiter(kind(path)) as blocks:
            while block := await blocks.pull(700):
                found += block
                states.append((len(found), blocks.state_dict()))
        assert found == known
        for count, state in states[::3]:
            stream = kind(path)
            stream.load_state_dict(state)
            async with aiter(stream) as blocks:
                rest = [sample async for sample in blocks]
            assert rest == known[count:]


async def test_lines_that_are_cached_need_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("line\n" * 200_000)
    asked: list[int] = []
    answer = play([1])

    def preadv(*args: Any) -> int:
        asked.append(answer(*args))
        return asked[-1]

    monkeypatch.setattr(os, "preadv", preadv)
    async with aiter(TextDataset(path)) as blocks:
        count = sum([1 async for _ in blocks])
    assert (count, sum(asked)) == (200_000, path.stat().st_size)
    assert max(asked) <= 1 << 17  # the loop is not held for long


async def test_the_other_tasks_get_their_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing is waited for: one after each block."""
    path = write(tmp_path)
    monkeypatch.setattr(os, "preadv", play([1]))
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    async with aiter(JSONLinesDataset(path)) as blocks:
        while await blocks.pull(256):
            assert turns
            turns = 0
    task.cancel()


async def test_large_samples_are_left_to_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_text(f"{LARGE}\n" * 20)
    asked: list[int] = []
    answer = play([1])

    def preadv(*args: Any) -> int:
        asked.append(answer(*args))
        return asked[-1]

    monkeypatch.setattr(os, "preadv", preadv)
    async with aiter(TextDataset(path)) as blocks:
        assert [len(line) async for line in blocks] == [len(LARGE)] * 20
    assert sum(asked) < len(LARGE)


async def test_a_system_that_cannot_tell_is_read_in_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path)
    monkeypatch.delattr(os, "RWF_NOWAIT", raising=False)
    async with aiter(JSONLinesDataset(path)) as blocks:
        assert [sample async for sample in blocks] == [*map(json.loads, lines())]
