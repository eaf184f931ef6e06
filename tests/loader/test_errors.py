"""Errors keep their type, say where, and do not end the iteration."""

import asyncio
from typing import Any

import pytest
import torch

from aioloader import DataLoader
from core import kit
from core.kit import INLINE, outcomes
from failing import WAYS, OddError, drain, failing, make
from faults.error_table import (
    AsyncSamples,
    AsyncSteps,
    PlainSteps,
    Raiser,
    Samples,
    same,
)
from samples import AsyncMap, SyncMap, collect


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


NOTES = {
    "transform": "stage 'transform' of epoch 0, batch 1, sample index 3",
    "collate_fn": "stage 'collate' of epoch 0, batch 1, sample indices [2, 3]",
}


@pytest.mark.slow
@pytest.mark.parametrize("way", [INLINE, *WAYS])
@pytest.mark.parametrize("base", [Samples, AsyncSamples, PlainSteps, AsyncSteps])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("stage", NOTES)
async def test_transform_and_collate_errors(
    way: str, base: Any, is_async: bool, stage: str
) -> None:
    """Both stages say so."""
    raiser = Raiser(ValueError)
    options: Any = {"batch_size": 2, stage: raiser.later if is_async else raiser}
    found = await outcomes(way, kit.make(way, base(same), **options))
    (error,) = [one for one in found if isinstance(one, ValueError)]
    assert len(found) == 4
    assert NOTES[stage] in error.__notes__[0]


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
@pytest.mark.parametrize("base", [SyncMap, AsyncMap])
async def test_batches_of_a_batch_sampler(way: str, base: Any) -> None:
    """Of any kind; only skipping makes an empty one disappear."""

    async def found(batches: Any) -> list[Any]:
        loop: Any = "caller" if way == "caller" else "thread"
        options: Any = {"transform": lambda pair: pair[1], "collate_fn": torch.tensor}
        return await drain(
            way, DataLoader(base(4), batch_sampler=batches, loop=loop, **options)
        )

    odd = [iter([0, 1]), {2}, (3,), [], torch.tensor([0, 2])]
    assert await found(odd) == [[0, 1], [2], [3], [], [0, 2]]
    assert await found([]) == []
    assert isinstance((await found([7]))[0], TypeError)


async def test_the_error_of_one_loader_leaves_others_alone() -> None:
    """Two at once on the caller's loop."""
    bad = make("caller", failing(AsyncMap, 0, error=lambda: OddError(1, 2)))
    good = make("caller", failing(AsyncMap, error=lambda: OddError(1, 2)))
    found = await asyncio.gather(drain("caller", bad), collect(good))
    assert type(found[0][0]) is OddError
    assert len(found[1]) == 3
