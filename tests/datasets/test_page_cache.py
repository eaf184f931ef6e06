"""Files in the page cache are read without a thread; the samples are the same.

What the cache has is played: the kernel decides it otherwise.
"""

import asyncio
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aioloader.datasets import JSONLinesDataset, TextDataset

SMALL, LARGE = "x" * 200, "y" * 700_000
LINES = [json.dumps([at, LARGE if at in {3000, 3001} else SMALL]) for at in range(6000)]
PLANS: dict[str, list[float]] = {
    "all": [1],
    "half of each": [0.5],
    "nothing": [0],
    "less and less": [1, 0.5, 0.001, 0],
    "nothing, as Linux 5.9 has it": [1, -1],
}
Play = Callable[[list[float]], list[int]]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Give ``preadv`` these shares of what is wanted, and return the bytes it gives.

    0: it would wait; -1: it returns 0 instead of saying so.
    """

    def start(plan: list[float]) -> list[int]:
        shares, given = itertools.chain(plan, itertools.repeat(plan[-1])), list[int]()

        def preadv(file: int, buffers: list[memoryview], _at: int, _flags: int) -> int:
            share = next(shares)
            if not share:
                raise BlockingIOError
            length = max(1, int(len(buffers[0]) * share))
            given.append(0 if share < 0 else os.readv(file, [buffers[0][:length]]))
            return given[-1]

        monkeypatch.setattr(os, "preadv", preadv)
        return given

    return start


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "a.jsonl"
    made.write_text("".join(f"{line}\n" for line in LINES))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("plan", [*PLANS, "a system that cannot tell"])
async def test_samples_and_states_do_not_depend_on_the_cache(
    plan: str, path: Path, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    if plan in PLANS:
        play(PLANS[plan])
    else:
        monkeypatch.delattr(os, "RWF_NOWAIT", raising=False)
    kinds: Any = {JSONLinesDataset: [*map(json.loads, LINES)], TextDataset: LINES}
    for kind, known in kinds.items():
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
                assert [sample async for sample in blocks] == known[count:]


@pytest.mark.parametrize("line", ["line", LARGE], ids=["small", "large"])
async def test_only_large_samples_need_a_thread(
    line: str, tmp_path: Path, play: Play
) -> None:
    path, count = tmp_path / "a.txt", 1_000_000 // len(line) + 20
    path.write_text(f"{line}\n" * count)
    given = play([1])
    async with aiter(TextDataset(path)) as blocks:
        assert sum([1 async for _ in blocks]) == count
    if line is LARGE:
        assert sum(given) < len(LARGE)
    else:
        assert sum(given) == path.stat().st_size
    assert max(given) <= 1 << 17


async def test_the_other_tasks_get_their_turns(path: Path, play: Play) -> None:
    play([1])
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
