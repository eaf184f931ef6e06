"""A state fits the stream that it was saved by, and no other one."""

import itertools
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from aioloader import DataLoader
from aioloader._order.stream_states import merge_states
from aioloader.datasets import TextDataset, from_iterable
from aioloader.errors import StateMismatchError
from beside import beside
from datasets.shards import parquet, read, text


def double(number: int) -> int:
    """Double a number."""
    return 2 * number


async def triple(number: int) -> int:
    """Treble a number."""
    return 3 * number


def numbers(count: int = 40) -> Any:
    """Return the first numbers."""
    return from_iterable(range(count))


def chains(folder: Path) -> list[Any]:
    """Return streams of which each is another one."""
    lines, table = text(folder), parquet(folder)
    options: list[dict[str, Any]] = [
        {"shuffle": True},
        {"shuffle": True, "seed": 1},
        {"interleave": 3},
        {"deterministic": False},
        {"encoding": "latin-1"},
    ]
    files = str(folder / "*.txt")
    return [
        lines,
        *(TextDataset(files, **one) for one in options),
        table,
        parquet(folder, columns=["name"]),
        lines.map(double),
        lines.map(triple),
        lines.filter(bool),
        lines.take(30),
        lines.skip(1),
        lines.skip(2),
        lines.shuffle(4),
        lines.shuffle(5),
        lines.shuffle(4, seed=1),
        lines.shuffle(4).filter(bool),
        lines.filter(bool).shuffle(4),
        lines.batch(2),
        lines.batch(2, drop_last=True),
        lines.mix(table),
        lines.mix(table, weights=[2, 1]),
        lines.mix(table, seed=1),
        lines.mix(table, until="first"),
        lines.mix(table.shuffle(3)),
        table.mix(lines),
        lines.mix(table, table),
    ]


async def state_of(stream: Any, count: int = 5) -> Any:
    """Return the state after some samples, through JSON."""
    _, state = await read(stream, count)
    return json.loads(json.dumps(state))


async def test_no_state_fits_another_stream(tmp_path: Path) -> None:
    """Not one of all pairs; its own fits."""
    streams = chains(tmp_path)
    states = [await state_of(stream) for stream in streams]
    for (one, stream), (other, state) in itertools.product(
        enumerate(streams), enumerate(states)
    ):
        if one == other:
            stream.load_state_dict(state)
            continue
        with pytest.raises(StateMismatchError, match="is of another stream: ") as found:
            stream.load_state_dict(state)
        assert found.value.expected == state["stream"]
        assert found.value.found == stream.describe()


async def test_what_differs_is_named() -> None:
    """The step, its parameter and both values."""
    state = await state_of(numbers().shuffle(4).batch(2))
    with pytest.raises(StateMismatchError, match="size of shuffle was 4, and is 8;"):
        numbers().shuffle(8).batch(2).load_state_dict(state)


async def test_a_function_of_another_name_is_a_warning() -> None:
    """It may have been renamed."""
    state = await state_of(numbers().map(double))
    stream = numbers().map(str)
    with pytest.warns(UserWarning, match=r"function of map was '.*double', and is 'b"):
        stream.load_state_dict(state)
    assert (await read(stream))[0] == [str(number) for number in range(5, 40)]


async def test_the_data_may_move_and_be_read_otherwise(tmp_path: Path) -> None:
    """Directory, cache, budget and concurrency are not of the chain."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    text(tmp_path / "a"), text(tmp_path / "b")
    one = TextDataset("*.txt", store=tmp_path / "a").map(triple_all, concurrency=2)
    moved = str(tmp_path / "b" / "*.txt")
    other = TextDataset(moved, max_bytes=1 << 20, cache=tmp_path / "c")
    names, state = await read(one, 7)
    stream = other.map(triple_all, concurrency=9)
    stream.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert names + (await read(stream))[0] == (await read(one))[0]


async def triple_all(line: str) -> str:
    """Repeat a line."""
    return 3 * line


async def test_other_shards_are_refused(tmp_path: Path) -> None:
    """The names are known once they are listed."""
    lines = text(tmp_path)
    state = await state_of(lines)
    (tmp_path / "more.txt").write_text("more\n")
    for strict in (True, False):
        lines.load_state_dict(state, strict=strict)
        with pytest.raises(StateMismatchError, match=r"with 8 shards, but .* has 9"):
            await read(lines)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "fetch": "workers"}])
async def test_a_loader_refuses_it_when_it_is_loaded(options: Any) -> None:
    """Not when it begins."""
    loader: Any = DataLoader(numbers().shuffle(4), 5, collate_fn=list, **options)
    other: Any = DataLoader(numbers().shuffle(8), 5, collate_fn=list, **options)

    def begin() -> Any:
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        loader.close()
        return state

    state = json.loads(json.dumps(await beside(begin)))
    for strict in (True, False):
        with pytest.raises(StateMismatchError, match="shuffle was 4, and is 8"):
            other.load_state_dict(state, strict=strict)


async def test_states_of_different_streams_are_not_merged() -> None:
    """They are not of one run."""
    states = [
        await state_of(numbers().take(count).shard(rank, 2))
        for rank, count in enumerate((8, 9))
    ]
    with pytest.raises(StateMismatchError, match="different streams: count of take wa"):
        merge_states(states)
