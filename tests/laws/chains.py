"""Random chains of steps over every format, as values with a readable repr."""

import functools
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from datasets.shards import (
    DATABASES,
    EVERY,
    FILES_OF_TABLES,
    SHARDED,
    Make,
    iterable,
    map_style,
    name_of,
    sqlite,
)

# Starting a server takes long, and SQLite has the same row formats.
MAKES: list[Make] = [make for make in EVERY if make not in DATABASES] + [sqlite]
_SHUFFLED: list[Make] = [*SHARDED, *FILES_OF_TABLES, sqlite, map_style]


def upper(sample: Any) -> str:
    """Return a sample's name, marked; a list's joins the names of its samples."""
    if isinstance(sample, list):
        return "+".join(map(upper, sample))
    return f"<{name_of(sample)}>"


async def awaited(sample: Any) -> str:
    return upper(sample)


def is_kept(sample: Any) -> bool:
    return sum(map(ord, upper(sample))) % 3 > 0


def refused(sample: Any) -> Any:
    if sum(map(ord, upper(sample))) % 7 == 3:
        raise ValueError(f"no {upper(sample)}")
    return sample


def several(sample: Any) -> Any:
    """Yield zero to two samples for each sample."""
    for number in range(sum(map(ord, upper(sample))) % 3):
        yield f"{upper(sample)}{number}"


async def several_awaited(sample: Any) -> list[Any]:
    return [*several(sample)]


def codes(texts: list[str]) -> list[list[int]]:
    return [[*map(ord, text)] for text in texts]


def tokens_of(sample: Any) -> list[int]:
    return [*map(ord, upper(sample))]


def text_of(sample: Any) -> str:
    """Return the text of a packed sample, with its labels."""
    texts = (sample[name].tolist() for name in ("input_ids", "labels"))
    return "|".join("".join(chr(max(code, 32)) for code in text) for text in texts)


@functools.cache
def made(make: Make, options: tuple[tuple[str, Any], ...]) -> Any:
    """Return the source of a format; its files are written once."""
    folder = tempfile.TemporaryDirectory()
    stream = make(Path(folder.name), **dict(options))
    _FOLDERS.append(folder)
    return stream


_FOLDERS: list[Any] = []


# Each step, with the strategy for its argument.
STEPS: dict[str, tuple[Callable[[Any, Any], Any], st.SearchStrategy[Any]]] = {
    "map": (lambda stream, _: stream.map(upper), st.none()),
    "map async": (lambda s, n: s.map(awaited, concurrency=n), st.integers(1, 9)),
    "fail": (lambda stream, _: stream.map(refused), st.none()),
    "filter": (lambda stream, _: stream.filter(is_kept), st.none()),
    "shuffle": (lambda stream, size: stream.shuffle(size), st.integers(1, 20)),
    "skip": (lambda stream, count: stream.skip(count), st.integers(0, 3)),
    "take": (lambda stream, count: stream.take(count), st.integers(1, 40)),
    "repeat": (lambda stream, times: stream.repeat(times), st.integers(1, 2)),
    "batch": (lambda stream, size: stream.map(upper).batch(size), st.integers(1, 4)),
    "unbatch": (lambda stream, size: stream.batch(size).unbatch(), st.integers(1, 4)),
    "flat_map": (lambda stream, _: stream.flat_map(several), st.none()),
    "flat_map async": (
        lambda stream, n: stream.flat_map(several_awaited, concurrency=n),
        st.integers(1, 9),
    ),
    "tokenize": (
        lambda stream, size: stream.map(upper).tokenize(codes, batch=size),
        st.integers(1, 9),
    ),
    "pack": (
        lambda stream, n: stream.map(tokens_of).pack(n, last="pad").map(text_of),
        st.integers(1, 40),
    ),
    "best fit": (
        lambda stream, n: (
            stream.map(tokens_of).pack(20, "best_fit", window=n).map(text_of)
        ),
        st.integers(1, 20),
    ),
    "mix": (
        lambda stream, weights: stream.map(upper).mix(
            made(iterable, ()).shuffle(3), weights=weights
        ),
        st.sampled_from([[1, 1], [1, 4], [3, 1]]),
    ),
}
_LENGTH = "epoch_length"


@dataclass(frozen=True)
class Chain:
    """A stream, described.

    Attributes:
        make: Name of the maker of its shards.
        options: Arguments of the source.
        steps: Names and arguments of its steps.
    """

    make: str
    options: tuple[tuple[str, Any], ...]
    steps: tuple[tuple[str, Any], ...]

    def stream(self) -> Any:
        make = next(maker for maker in MAKES if maker.__name__ == self.make)
        stream = made(make, self.options)
        for name, argument in self.steps:
            if name == _LENGTH:
                stream = stream.epoch_length(argument)
            else:
                stream = STEPS[name][0](stream, argument)
        return pickle.loads(pickle.dumps(stream))  # as in a new process

    @property
    def has_length(self) -> bool:
        """Whether it ends with ``epoch_length``."""
        return any(name == _LENGTH for name, _ in self.steps)


@st.composite
def chains(draw: st.DrawFn, *, most: int = 3, without: tuple[str, ...] = ()) -> Chain:
    make = draw(st.sampled_from(MAKES))
    options: dict[str, Any] = {}
    if make in _SHUFFLED:
        options["shuffle"] = draw(st.booleans())
        options["interleave"] = draw(st.integers(1, 5))
    names = draw(
        st.lists(
            st.sampled_from([key for key in STEPS if key not in without]), max_size=most
        )
    )
    steps = [(name, _hashable(draw(STEPS[name][1]))) for name in names]
    if draw(st.integers(0, 3)) == 0:
        steps.append((_LENGTH, draw(st.integers(10, 90))))
    return Chain(make.__name__, tuple(sorted(options.items())), tuple(steps))


def _hashable(argument: Any) -> Any:
    return tuple(argument) if isinstance(argument, list) else argument
