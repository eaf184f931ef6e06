"""What a stream says of itself: a state fits the stream that saved it, and no other."""

import functools
import itertools
import json
import operator
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aioloader import DataLoader
from aioloader.datasets import (
    SQLDataset,
    TarDataset,
    TextDataset,
    from_dataset,
    from_iterable,
    mix,
)
from aioloader.datasets._streams.descriptions import name_of
from aioloader.errors import StateMismatchError
from datasets.ranks import merge_states
from datasets.shards import parquet, read, text
from datasets.test_flat_steps import tokenizer


def numbers(count: int = 40) -> Iterator[int]:
    yield from range(count)


class Called:
    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, value: int) -> int:
        return value + self.number

    def method(self, value: int) -> int:
        return value


def as_tokens(number: int) -> list[int]:
    return [*range(2 + number)]


def double(number: int) -> int:
    return 2 * number


async def triple(value: Any) -> Any:
    return 3 * value


def test_names_of_functions_are_stable() -> None:
    here = __name__
    for function, name in (
        (numbers, f"{here}.numbers"),
        (functools.partial(operator.add, "secret"), "partial(_operator.add)"),
        (lambda x: x, f"{here}.test_names_of_functions_are_stable.<locals>.<lambda>"),
        (Called(3), f"{here}.Called"),
        (Called(3).method, f"{here}.Called.method"),
        (operator.itemgetter("txt"), "operator.itemgetter"),
        (functools.lru_cache(numbers), f"{here}.numbers"),
        (json.loads, "json.loads"),
        (int, "builtins.int"),
    ):
        assert name_of(function) == name


@pytest.mark.filterwarnings("ignore")
def test_values_of_queries() -> None:
    pytest.importorskip("adbc_driver_sqlite")
    one, other = (
        SQLDataset(
            "sqlite:///x", "SELECT * FROM t WHERE a = ?", key="id", parameters=[value]
        ).describe()
        for value in ("secret", "other")
    )
    assert "secret" not in str(one)
    assert one != other
    tar = TarDataset("https://user:secret@host/a.tar?sig=secret")
    assert "secret" not in str(tar.describe())


@pytest.mark.slow
def test_another_process_says_the_same() -> None:
    """Hash seeds, addresses of objects and names of the main module do not count."""
    code = (
        "import json\n"
        f"from {__name__} import Called, numbers\n"
        "from datasets.test_flat_steps import tokenizer\n"
        "from aioloader.datasets import from_iterable\n"
        "stream = from_iterable(numbers).map(Called(1)).tokenize(tokenizer())\n"
        "stream = stream.shuffle(4).batch(2)\n"
        "print(json.dumps(stream.describe()))\n"
    )
    root = str(Path(__file__).parents[2])
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join([*sys.path, root]), "PYTHONHASHSEED": "7"},
        capture_output=True,
        check=True,
        text=True,
    )
    stream = from_iterable(numbers).map(Called(2)).tokenize(tokenizer())
    stream = stream.shuffle(4).batch(2)
    assert json.loads(run.stdout) == stream.describe()


# -- states ---------------------------------------------------------------------------


async def state_of(stream: Any, count: int = 5) -> Any:
    return (await read(stream, count))[1]


def chains(folder: Path) -> list[Any]:
    lines, table = text(folder), parquet(folder)
    options: list[dict[str, Any]] = [
        {"shuffle": True},
        {"shuffle": True, "seed": 1},
        {"interleave": 3},
        {"deterministic": False},
        {"encoding": "latin-1"},
    ]
    files = str(folder / "*.txt")
    tokens = from_iterable(numbers).map(as_tokens)
    packings: list[dict[str, Any]] = [
        {},
        {"length": 9},
        {"strategy": "best_fit"},
        {"eos": 1},
        {"last": "pad"},
        {"pad": 1},
        {"shift": False},
    ]
    return [
        *(tokens.pack(**{"length": 8, **one}) for one in packings),
        from_dataset(range(23)),
        from_dataset(range(24)),
        from_dataset(range(23), shuffle=True),
        mix({"a": lines, "b": table}, [2, 1]),
        mix({"b": lines, "a": table}, [2, 1]),
        lines,
        *(TextDataset(files, **one) for one in options),
        table,
        parquet(folder, columns=["name"]),
        lines.map(double),
        lines.map(triple),
        lines.filter(bool),
        lines.take(30),
        lines.take(29),
        lines.repeat(2),
        lines.repeat(3),
        lines.epoch_length(9),
        lines.epoch_length(8),
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
        lines.mix(table, weights=[(0, [1, 1]), (9, [2, 1])]),
        lines.mix(table, until="first"),
        lines.mix(table.shuffle(3)),
        table.mix(lines),
        lines.mix(table, table),
    ]


async def test_no_state_fits_another_stream(tmp_path: Path) -> None:
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
    first, tokens = from_iterable(numbers), from_iterable(numbers).map(as_tokens)
    chain = first.shuffle(4).batch(2)
    for saved, loaded, words in (
        (chain, first.shuffle(8).batch(2), "size of shuffle was 4, and is 8;"),
        (chain, first.shuffle(4, seed=1).batch(2), "seed of shuffle was 0, and is 1"),
        (
            chain,
            first.shuffle(4).batch(2, drop_last=True),
            "drop_last of batch was False, and is True",
        ),
        (
            chain,
            first.shuffle(4),
            "it was saved by iterable.shuffle.batch, and this is iterable.shuffle;",
        ),
        (chain, first.batch(2).shuffle(4), "and this is iterable.batch.shuffle"),
        (
            first.mix(first.take(3)),
            first.mix(first.take(4)),
            "stream 1 of mix: count of take was 3, and is 4",
        ),
        (mix({"a": first}), mix({"b": first}), "names of mix was"),
        (first.mix(first), first.mix(first, weights=[1, 2]), "weights of mix was"),
        (tokens.pack(8), tokens.pack(9), "length of pack was 8, and is 9"),
        (
            from_dataset(range(23)),
            from_dataset(range(24)),
            "length of dataset was 23, and is 24",
        ),
    ):
        state = await state_of(saved)
        with pytest.raises(StateMismatchError, match=re.escape(words)):
            loaded.load_state_dict(state)


async def test_a_function_of_another_name_is_a_warning() -> None:
    state = await state_of(from_iterable(range(40)).map(double))
    stream = from_iterable(range(40)).map(str)
    with pytest.warns(UserWarning, match=r"function of map was '.*double', and is 'b"):
        stream.load_state_dict(state)
    assert (await read(stream))[0] == [str(number) for number in range(5, 40)]


async def test_the_data_may_move_and_be_read_otherwise(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    text(tmp_path / "a"), text(tmp_path / "b")
    one = TextDataset("*.txt", store=tmp_path / "a").map(triple, concurrency=2)
    moved = str(tmp_path / "b" / "*.txt")
    other = TextDataset(moved, max_bytes=1 << 20, cache=tmp_path / "c")
    names, state = await read(one, 7)
    stream = other.map(triple, concurrency=9)
    stream.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert names + (await read(stream))[0] == (await read(one))[0]


async def test_other_shards_are_refused(tmp_path: Path) -> None:
    lines = text(tmp_path)
    state = await state_of(lines)
    (tmp_path / "more.txt").write_text("more\n")
    for strict in (True, False):
        lines.load_state_dict(state, strict=strict)
        with pytest.raises(StateMismatchError, match=r"with 8 shards, but .* has 9"):
            await read(lines)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "fetch": "workers"}])
def test_a_loader_refuses_it_when_it_is_loaded(options: Any) -> None:
    first = from_iterable(numbers)
    loader: Any = DataLoader(first.shuffle(4), 5, collate_fn=list, **options)
    other: Any = DataLoader(first.shuffle(8), 5, collate_fn=list, **options)
    with loader:
        next(iter(loader))
        state = json.loads(json.dumps(loader.state_dict()))
    for strict in (True, False):
        with pytest.raises(StateMismatchError, match="shuffle was 4, and is 8"):
            other.load_state_dict(state, strict=strict)


async def test_states_of_different_streams_are_not_merged() -> None:
    states = [
        await state_of(from_iterable(numbers).take(count).shard(rank, 2))
        for rank, count in enumerate((8, 9))
    ]
    with pytest.raises(StateMismatchError, match="different streams: count of take wa"):
        merge_states(states)
