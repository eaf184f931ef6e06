"""What a stream says of itself, to which a state is bound."""

import functools
import json
import operator
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aioloader._order.stream_chains import differences
from aioloader.datasets import (
    SQLDataset,
    Stream,
    TarDataset,
    TextDataset,
    from_iterable,
)
from aioloader.datasets._streams.descriptions import name_of


def numbers() -> Iterator[int]:
    """Yield some numbers."""
    yield from range(100)


class Called:
    """A callable with a state."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, value: int) -> int:
        """Return the sum."""
        return value + self.number

    def method(self, value: int) -> int:
        """Return the value."""
        return value


async def plus(value: int) -> int:
    """Return the next one."""
    return value + 1


def test_names_of_functions_are_stable() -> None:
    """Also of what has no name: without addresses and values."""
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


def test_a_description_has_all_that_determines_the_samples() -> None:
    """And it is ready for JSON."""
    text = TextDataset("s3://b/*.txt", shuffle=True, seed=3, interleave=2)
    tar = TarDataset("https://user:secret@host/a.tar?sig=secret", max_bytes=9)
    stream = (
        text.map(plus, concurrency=3)
        .filter(bool)
        .mix(tar.take(3).skip(1), weights=[2, 1], seed=4)
        .shuffle(10, seed=5)
        .batch(2, drop_last=True)
    )
    found = stream.describe()
    assert json.loads(json.dumps(found)) == found
    assert "secret" not in json.dumps(found)
    here = f"{__name__}.plus"
    order = {"deterministic": True, "interleave": 1, "seed": 0, "shuffle": False}
    taken = {"kind": "take", "count": 3, "of": {"kind": "TarDataset", **order}}
    mapped = {
        "kind": "map",
        "function": here,
        "is_async": True,
        "of": {
            "kind": "TextDataset",
            "encoding": "utf-8",
            **order,
            "interleave": 2,
            "seed": 3,
            "shuffle": True,
        },
    }
    assert found == {
        "kind": "batch",
        "size": 2,
        "drop_last": True,
        "of": {
            "kind": "shuffle",
            "size": 10,
            "seed": 5,
            "of": {
                "kind": "mix",
                "weights": [2.0, 1.0],
                "seed": 4,
                "until": "all",
                "streams": [
                    {"kind": "filter", "function": "builtins.bool", "of": mapped},
                    {"kind": "skip", "count": 1, "of": taken},
                ],
            },
        },
    }


def chains() -> dict[str, Stream[Any]]:
    """Return streams that differ in one thing each from the first."""
    first = from_iterable(numbers)
    return {
        "": first.shuffle(4).batch(2),
        "size of shuffle was 4, and is 5": first.shuffle(5).batch(2),
        "seed of shuffle was 0, and is 1": first.shuffle(4, seed=1).batch(2),
        "drop_last of batch was False, and is True": first.shuffle(4).batch(
            2, drop_last=True
        ),
        "it was saved by iterable.shuffle.batch, and this is iterable.shuffle": (
            first.shuffle(4)
        ),
        "and this is iterable.batch.shuffle": first.batch(2).shuffle(4),
    }


def test_differences_are_named() -> None:
    """The step and its parameter, or both chains."""
    first, *others = chains().items()
    for words, stream in others:
        errors, renamed = differences(first[1].describe(), stream.describe())
        assert any(words in error for error in errors), errors
        assert not renamed
    one, other = (from_iterable(numbers).map(f).describe() for f in (str, int))
    errors, renamed = differences(one, other)
    assert renamed == ["function of map was 'builtins.str', and is 'builtins.int'"]
    assert not errors


def test_differences_within_a_mix_say_in_which_stream() -> None:
    """They are named by their places."""
    mixed = [
        from_iterable(numbers).mix(from_iterable(numbers).take(count)).describe()
        for count in (3, 4)
    ]
    errors, _ = differences(*mixed)
    assert errors == ["stream 1 of mix: count of take was 3, and is 4"]


@pytest.mark.filterwarnings("ignore")
def test_tables_and_values_of_queries() -> None:
    """A value is not shown, but another one makes a difference."""
    pytest.importorskip("adbc_driver_sqlite")
    one, other = (
        SQLDataset(
            "sqlite:///x", "SELECT * FROM t WHERE a = ?", key="id", parameters=[value]
        ).describe()
        for value in ("secret", "other")
    )
    assert "secret" not in str(one)
    assert differences(one, other).errors


def test_another_process_says_the_same() -> None:
    """Hash seeds, addresses of objects and names of the main module do not count."""
    code = (
        "import json\n"
        f"from {__name__} import Called, chains, numbers\n"
        "from aioloader.datasets import from_iterable\n"
        "more = from_iterable(numbers).map(Called(1)).describe()\n"
        "print(json.dumps([*(s.describe() for s in chains().values()), more]))\n"
    )
    root = str(Path(__file__).parents[2])
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join([*sys.path, root]), "PYTHONHASHSEED": "7"},
        capture_output=True,
        check=True,
        text=True,
    )
    more = from_iterable(numbers).map(Called(2)).describe()
    mine = [*(stream.describe() for stream in chains().values()), more]
    assert json.loads(run.stdout) == json.loads(json.dumps(mine))
