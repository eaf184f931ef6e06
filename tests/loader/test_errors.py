"""Errors keep their type, say where, and do not end the iteration."""

import asyncio
from typing import Any

import pytest
import torch

from aioloader import DataLoader
from failing import WAYS, OddError, drain, failing, make
from samples import AsyncMap, AsyncStream, SyncMap, SyncStream, collect


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("base", [SyncMap, AsyncMap])
async def test_the_type_is_kept_the_place_is_noted_and_it_goes_on(
    way: str, base: Any
) -> None:
    """One batch raises; those before and after it are delivered."""
    dataset = failing(base, 5, error=lambda: OddError(1, 2))
    found = await drain(way, make(way, dataset))
    assert [found[0], found[2]] == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert type(found[1]) is OddError
    assert found[1].__notes__ == [
        "aioloader: in stage 'fetch' of epoch 0, batch 1, sample index 5"
    ]
    assert any(
        frame.name == "__getitem__"
        for frame in __import__("traceback").extract_tb(found[1].__traceback__)
    )


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("base", [SyncMap, AsyncMap, SyncStream, AsyncStream])
@pytest.mark.parametrize("is_async", [False, True])
async def test_transform_and_collate_errors(
    way: str, base: Any, is_async: bool
) -> None:
    """Both stages say so."""

    def bad_transform(item: Any) -> Any:
        if item[1] == 6:
            raise OddError(3, 4)
        return item[1]

    def bad_collate(samples: list[Any]) -> Any:
        raise OddError(5, 6)

    options: dict[str, Any] = {"transform": bad_transform}
    if is_async:

        async def transform(item: Any) -> Any:
            return bad_transform(item)

        async def collate(samples: Any) -> Any:
            return bad_collate(samples)

        options = {"transform": transform}
    found = await drain(way, make(way, base(8), **options))
    assert found[0] == [0, 1, 2, 3]
    assert (
        "stage 'transform' of epoch 0, batch 1, sample index 6" in found[1].__notes__[0]
    )
    collate_fn = collate if is_async else bad_collate
    found = await drain(way, make(way, base(4), collate_fn=collate_fn))
    assert (
        "'collate' of epoch 0, batch 0, sample indices [0, 1, 2, 3]"
        in (found[0].__notes__[0])
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_async", [False, True])
async def test_batch_reads_go_to_collate_as_they_are(way: str, is_async: bool) -> None:
    """As in torch: columns, say, or fewer rows than asked for."""

    class Sync(SyncMap):
        def __getitems__(self, indices: list[int]) -> Any:
            return {"x": torch.tensor(indices[:2]), "y": len(indices)}

    class Async(AsyncMap):
        async def __getitems__(self, indices: list[int]) -> Any:
            return {"x": torch.tensor(indices[:2]), "y": len(indices)}

    dataset: Any = Async(4) if is_async else Sync(4)
    loader = make(way, dataset, collate_fn=lambda found: found["x"] * found["y"])
    assert await drain(way, loader) == [[0, 4]]


@pytest.mark.parametrize("way", WAYS)
async def test_exits_of_a_sampler_reach_the_consumer(way: str) -> None:
    """Exceptions of any kind, and batches of any kind."""

    class Leaving:
        def __iter__(self) -> Any:
            raise SystemExit(4)

    for dataset in (SyncMap(4), AsyncMap(4)):
        loop: Any = "caller" if way == "caller" else "thread"
        options: Any = {"loop": loop, "transform": lambda pair: pair[1]}
        with pytest.raises(SystemExit):
            await drain(way, DataLoader(dataset, sampler=Leaving(), **options))
        odd: Any = [iter([0, 1]), {2}, (3,), torch.tensor([0, 2])]
        loader = DataLoader(dataset, batch_sampler=odd, **options)
        assert await drain(way, loader) == [[0, 1], [2], [3], [0, 2]]
        loader = DataLoader(dataset, batch_sampler=[7], **options)
        assert isinstance((await drain(way, loader))[0], TypeError)


@pytest.mark.parametrize("way", WAYS)
async def test_empty_batches_are_delivered(way: str) -> None:
    """Only skipping makes a batch disappear."""
    for dataset in (SyncMap(4), AsyncMap(4)):
        loop: Any = "caller" if way == "caller" else "thread"
        loader = DataLoader(
            dataset, batch_sampler=[[0], [], [1]], collate_fn=torch.tensor, loop=loop,
            transform=lambda pair: pair[1],
        )  # fmt: skip
        assert await drain(way, loader) == [[0], [], [1]]
        loader = DataLoader(dataset, batch_sampler=[], loop=loop)
        assert await drain(way, loader) == []


@pytest.mark.parametrize("way", WAYS)
async def test_sampler_errors_come_in_their_turn(way: str) -> None:
    """After the batches the sampler gave before."""

    class Sampler:
        def __iter__(self) -> Any:
            yield [0, 1]
            raise OddError(7, 8)

    for dataset in (SyncMap(4), AsyncMap(4)):
        loop: Any = "caller" if way == "caller" else "thread"
        loader = DataLoader(
            dataset,
            batch_sampler=Sampler(),
            loop=loop,
            transform=lambda pair: pair[1],
        )
        found = await drain(way, loader)
        assert found[0] == [0, 1]
        assert type(found[1]) is OddError
        assert len(found) == 2


@pytest.mark.parametrize("way", ["thread", "caller"])
@pytest.mark.parametrize("base", [SyncMap, AsyncMap])
async def test_system_exit_reaches_the_consumer(way: str, base: Any) -> None:
    """Also from the loader's threads, which it does not end."""
    iterator = aiter(make(way, failing(base, 5, error=lambda: SystemExit(3))))
    await anext(iterator)
    with pytest.raises(SystemExit):
        await anext(iterator)
    assert (await anext(iterator)).tolist() == [8, 9, 10, 11]
    await iterator.aclose()


async def test_the_error_of_one_loader_leaves_others_alone() -> None:
    """Two at once on the caller's loop."""
    bad = make("caller", failing(AsyncMap, 0, error=lambda: OddError(1, 2)))
    good = make("caller", failing(AsyncMap, error=lambda: OddError(1, 2)))
    found = await asyncio.gather(drain("caller", bad), collect(good))
    assert type(found[0][0]) is OddError
    assert len(found[1]) == 3
