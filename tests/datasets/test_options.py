"""Unknown options are an error that names the nearest known one, for every dataset."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from aioloader.datasets import (
    ArrowDataset,
    CSVDataset,
    FileDataset,
    JSONLinesDataset,
    ObjectDataset,
    ParquetDataset,
    SQLDataset,
    SQLRows,
    TarDataset,
    TextDataset,
)
from aioloader.datasets._options import OrderOptions, StoreOptions, StreamOptions
from aioloader.datasets.sharded import ByteStream, ShardedStream, StoredStream

STREAMS: list[Callable[..., Any]] = [
    ArrowDataset,
    CSVDataset,
    JSONLinesDataset,
    ParquetDataset,
    TarDataset,
    TextDataset,
]
ROWS = "sqlite:////no/such/file", "t"


@pytest.mark.parametrize("make", STREAMS)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shufle": True}, r"option 'shufle': did you mean 'shuffle'\?"),
        ({"interleaves": 2}, r"did you mean 'interleave'\?"),
        ({"store_option": {}}, r"did you mean 'store_options'\?"),
        ({"cache_size": 1}, r"did you mean 'cache_bytes'\?"),
        ({"region": "x"}, r"store belong in store_options={'region': \.\.\.}"),
        ({"aws_region": "x"}, r"store belong in store_options={'aws_region': \.\.\.}"),
        ({"client_options": {}}, "belong in store_options"),
        ({"zzz": 1}, "it has cache, cache_bytes, .*deterministic, "),
    ],
)
def test_streams_of_shards(
    make: Callable[..., Any], options: dict[str, Any], words: str
) -> None:
    """In the constructor, by the name of what was to be made."""
    name = make.__name__
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unknown .*{words}"):
        make("a", **options)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda **o: ByteStream("a", o.pop, **o), "ByteStream"),
        (lambda **o: SQLDataset(*ROWS, key="id", **o), "SQLDataset"),
        (lambda **o: SQLRows(*ROWS, key="id", keys=[], **o), "SQLRows"),
        (lambda **o: SQLRows.discover(*ROWS, key="id", **o), "SQLRows.discover"),
        (lambda **o: ObjectDataset("s3://b", [], **o), "ObjectDataset"),
        (lambda **o: ObjectDataset.discover("s3://b", **o), "ObjectDataset.discover"),
        (lambda **o: FileDataset([], **o), "FileDataset"),
        (lambda **o: FileDataset.discover("*", **o), "FileDataset.discover"),
    ],
)
def test_every_dataset(make: Callable[..., Any], name: str) -> None:
    """Whatever is made, and by whichever of its constructors."""
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unknown option 'shufle'"):
        make(shufle=True)


@pytest.mark.parametrize(
    ("make", "option", "nearest"),
    [
        (lambda **o: TextDataset("a", **o), "encodng", "encoding"),
        (lambda **o: JSONLinesDataset("a", **o), "sample_bytes", "max_sample_bytes"),
        (lambda **o: ParquetDataset("a", **o), "null", "nulls"),
        (lambda **o: SQLDataset(*ROWS, key="id", **o), "partition", "partitions"),
        (lambda **o: SQLRows.discover(*ROWS, key="id", **o), "conections", "conne"),
        (lambda **o: ObjectDataset.discover("s3://b", **o), "prefx", "prefix"),
        (lambda **o: FileDataset([], **o), "threads", "num_threads"),
    ],
)
def test_options_of_one_dataset(
    make: Callable[..., Any], option: str, nearest: str
) -> None:
    """Its own keywords are known, beside those it shares."""
    with pytest.raises(TypeError, match=f"{option!r}: did you mean '{nearest}"):
        make(**{option: 1})


def test_a_subclass_adds_its_own() -> None:
    """A class of a user passes keywords on, and its own are known by name."""

    class Mine(TarDataset):
        def __init__(self, *, quality: int = 1, **options: Any) -> None:
            super().__init__("a", **options)
            self.quality = quality

    assert Mine(quality=2, shuffle=True).quality == 2
    with pytest.raises(TypeError, match=r"^Mine\(\) .*'qualty': did you mean 'quality"):
        Mine(qualty=2)


@pytest.mark.parametrize(
    ("shared", "constructors"),
    [
        (OrderOptions, [ShardedStream]),
        (StoreOptions, [StoredStream]),
        (StreamOptions, [StoredStream, ShardedStream]),
    ],
)
def test_typed_options_are_those_of_the_constructors(
    shared: Any, constructors: list[type]
) -> None:
    """What a type checker knows is what is taken, in the same order."""
    taken = [
        name
        for made in constructors
        for name, one in inspect.signature(made).parameters.items()
        if one.kind is one.KEYWORD_ONLY
    ]
    assert list(shared.__annotations__) == taken
