"""What holds for every stream, whatever its shards are made of."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from aioloader import DataLoader
from aioloader.datasets._streams.shards import summary_of
from aioloader.errors import StateMismatchError
from beside import beside
from datasets.shards import (
    EVERY,
    FILES_OF_TABLES,
    NAMES,
    SHARDED,
    Make,
    json_lines,
    name_of,
    names,
    read,
    source_state,
    text,
)

# For all: a server is no leak of the test that is its first.
pytestmark = pytest.mark.usefixtures("server")
MAKES = pytest.mark.parametrize("make", EVERY, ids=lambda make: make.__name__)
FILES = pytest.mark.parametrize(
    "make", [*SHARDED, *FILES_OF_TABLES], ids=lambda make: make.__name__
)
SHARDS = pytest.mark.parametrize("make", SHARDED, ids=lambda make: make.__name__)


@pytest.mark.slow
@MAKES
async def test_all_samples_once_in_order(make: Make, tmp_path: Path) -> None:
    stream = make(tmp_path)
    for _ in range(2):
        assert await names(stream) == NAMES


@pytest.mark.slow
@MAKES
@pytest.mark.parametrize("num_workers", [1, 2])
async def test_workers_share(make: Make, num_workers: int, tmp_path: Path) -> None:
    stream = make(tmp_path, interleave=3)
    for fetch in ("loader", "workers"):
        loader: Any = DataLoader(
            stream, 4, num_workers=num_workers, fetch=fetch, collate_fn=list
        )
        batches: Any = await beside(partial(list, loader))
        found = [name_of(sample) for batch in batches for sample in batch]
        assert sorted(found) == sorted(NAMES)


@pytest.mark.slow
@SHARDS
async def test_the_order_is_a_function_of_seed_and_epoch(
    make: Make, tmp_path: Path
) -> None:
    (tmp_path / "again").mkdir()
    stream = make(tmp_path, shuffle=True, seed=1, interleave=3)
    again = make(tmp_path / "again", shuffle=True, seed=1, interleave=3)
    other = make(tmp_path, shuffle=True, seed=2, interleave=3)
    first, second = await names(stream), await names(stream)
    assert [await names(again), await names(again)] == [first, second]
    assert len({tuple(first), tuple(second), tuple(await names(other))}) == 3
    stream.set_epoch(0)
    assert await names(stream) == await names(stream) == first


@pytest.mark.slow
@MAKES
async def test_as_they_come(make: Make, tmp_path: Path) -> None:
    stream = make(tmp_path, interleave=5, deterministic=False)
    assert sorted(await names(stream)) == sorted(NAMES)
    head, state = await read(stream, 20)
    stream.load_state_dict(state)
    found = [*map(name_of, head), *(await names(stream))]
    assert sorted(found) == sorted(NAMES)


@pytest.mark.slow
@MAKES
@pytest.mark.parametrize("count", [0, 1, 7])
async def test_leaving_early_leaves_nothing(
    make: Make, count: int, tmp_path: Path
) -> None:
    iterator = aiter(make(tmp_path, interleave=2))
    for _ in range(count):
        await anext(iterator)
    for _ in range(2):
        await iterator.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(iterator)


@pytest.mark.slow
@SHARDS
async def test_too_few_shards(make: Make, tmp_path: Path) -> None:
    parts = [make(tmp_path).shard(rank, 11) for rank in range(11)]
    if make in {text, json_lines}:
        assert [name for part in parts for name in await names(part)] == NAMES
        return
    with pytest.raises(ValueError, match=r"8 shards .*11 readers.*use fewer"):
        await names(parts[0])


@FILES
async def test_a_state_of_other_shards(make: Make, tmp_path: Path) -> None:
    stream = make(tmp_path)
    _, state = await read(stream, 3)
    known = source_state(state)["shards"]
    count = known["count"]
    for other, words in (
        ({"count": count + 1}, f"saved with {count + 1} shards, but .* has {count};"),
        (
            {"names": "0"},
            f"saved with {count} shards, but .* has others, of ",
        ),
    ):
        source_state(state)["shards"] = {**known, **other}
        stream.load_position(state)
        with pytest.raises(StateMismatchError, match=words) as caught:
            await names(stream)
        assert caught.value.expected == {**known, **other}
        assert caught.value.found == known


@pytest.mark.parametrize(
    ("one", "other", "are_same"),
    [
        (["a/1.tar", "a/10.tar"], ["s3://b/1.tar", "s3://b/10.tar"], True),
        (["1", "2"], ["https://h/x/1?sig=a", "https://h/x/2?sig=b"], True),
        (["1 a"], ["http://me:secret@h/1%20a"], True),
        (["file:///x/1%20a", "file:///x/b"], ["1 a", "b"], True),
        (["x/1", "x/1"], ["1", "1"], True),
        (["x/1", "x/1"], ["x/1"], False),
        (["x/1", "x/2"], ["x/2", "x/1"], False),
        (["x/1", "y/1"], ["x/1", "x/1"], False),
        (["x/1", "x/2"], ["x/1", "x/3"], False),
        (["12", "3"], ["1", "23"], False),
        (["http://me:a@g/1", "http://h/1"], ["http://g/1", "http://me:b@h/1"], True),
        (["\udcff", "a"], ["x/\udcff", "x/a"], True),
        ([], [], True),
    ],
)
def test_names_of_shards(one: list[str], other: list[str], are_same: bool) -> None:
    assert (summary_of(one) == summary_of(other)) == are_same
    assert summary_of(one)["count"] == len(one)
