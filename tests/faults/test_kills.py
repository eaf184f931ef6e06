"""Workers are killed from outside, again and again: the epoch is what it would be."""

import contextlib
import os
import random
import signal
import time
from typing import Any

import pytest
import torch

from aioloader import DataLoader
from faulty import AsyncFaulty, Faulty, pids_of, pools_of

BATCHES = 200


class Large(AsyncFaulty):
    """Samples that travel in slots."""

    async def __getitem__(self, index: int) -> Any:
        return torch.full((1 << 11,), float(index)), index


def slowly(samples: list[Any]) -> Any:
    """Collate, after 3 ms of work: workers are killed in the middle of it, too."""
    end = time.perf_counter() + 0.003
    while time.perf_counter() < end:
        pass
    return torch.utils.data.default_collate(samples)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (Faulty, {}),
        pytest.param(
            Faulty, {"multiprocessing_context": "forkserver"}, marks=pytest.mark.fuzz
        ),
        (AsyncFaulty, {"concurrency": 16, "fetch": "workers"}),
        (Large, {"concurrency": 16, "fetch": "loader"}),
    ],
    ids=str,
)
def test_workers_under_fire(make: Any, options: dict[str, Any]) -> None:
    """Every sample once, in order, with the augmentations of an undisturbed run."""

    def loader() -> DataLoader[Any]:
        torch.manual_seed(3)
        return DataLoader(
            make(BATCHES * 8),
            8,
            shuffle=True,
            num_workers=2,
            timeout=30,
            collate_fn=slowly,
            **options,
        )

    expected = list(loader())
    # Not by the clock: two kills are so far apart that none hits a batch again. On a
    # busy machine a new worker may not have made one: never two such ones in a row.
    chosen, found, kills = random.Random(4), [], 0
    iterator = iter(loader())
    for number, batch in enumerate(iterator):
        found.append(batch)
        if number % 16 == 8:
            pids = pids_of(pools_of(iterator))
            workers = pools_of(iterator)._dispatcher.workers
            old = [pids[one.number] for one in workers if one.starts < 2]
            with contextlib.suppress(IndexError, ProcessLookupError):
                os.kill(chosen.choice(old), signal.SIGKILL)
                kills += 1
    assert kills > BATCHES / 40
    assert len(found) == len(expected) == BATCHES
    for batch, wanted in zip(found, expected, strict=True):
        assert all(map(torch.equal, batch, wanted))
    assert torch.cat([batch[-1] for batch in found]).sort().values.tolist() == [
        *range(BATCHES * 8)
    ]
