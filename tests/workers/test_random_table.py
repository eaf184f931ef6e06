"""The guide's table of where random draws are equal to the bit: each cell is a test."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import seed as seed_python
from typing import Any

import numpy as np
import pytest
import torch

from aioloader import DataLoader
from loader.states import left_at
from working import Drawing, draw, draw_own

GUIDE = Path(__file__).parents[2] / "docs/guides/workers.md"
MANY_WORKERS = "ignore:This DataLoader will create:UserWarning"


class Own(Drawing):
    """Draws from the generators of the batch."""

    def __getitem__(self, index: int) -> Any:
        return index, draw_own()


class AsyncDrawing(Drawing):
    """Draws from the global generators, by coroutines."""

    async def __getitem__(self, index: int) -> Any:
        return index, draw()


class AsyncOwn(Drawing):
    """Draws from the generators of the sample."""

    async def __getitem__(self, index: int) -> Any:
        return index, draw_own()


KINDS: dict[str, tuple[Callable[[int], Any], dict[str, Any]]] = {
    "none": (Drawing, {"num_workers": 0}),
    "processes": (Drawing, {"num_workers": 2}),
    "threads*": (Own, {"num_workers": 2, "workers": "thread"}),
    "threads": (Drawing, {"num_workers": 2, "workers": "thread"}),
    "coroutines in workers*": (AsyncOwn, {"num_workers": 2}),
    "coroutines without workers": (AsyncDrawing, {"num_workers": 0}),
}
# Options of the run to compare with, by the column's head.
OTHERS: dict[str, dict[str, Any]] = {
    "same run again": {},
    "another number of workers": {"num_workers": 1},
    "`num_workers=0` and 2": {"num_workers": 0},
    "another `world_size`": {"world_size": 2},
    "resumed": {"resumed": True},
}


def cells() -> Iterator[Any]:
    """Yield kind of workers, ``rng``, column and content of all cells."""
    lines = GUIDE.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| workers |"))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[start:]]
    rows = rows[: rows.index([])]
    heads = rows[0][2:]
    assert heads == list(OTHERS)
    assert {row[0] for row in rows[2:]} == set(KINDS)
    for kind, rng, *contents in rows[2:]:
        for head, content in zip(heads, contents, strict=True):
            yield pytest.param(kind, rng, head, content, id=f"{kind}-{rng}-{head}")


def drawn(
    make: Any, *, world_size: int = 1, resumed: bool = False, **options: Any
) -> dict[int, list[float]]:
    """Return the draws of each sample in a run, as in a new process."""
    draws_of: dict[int, list[float]] = {}
    for rank in range(world_size):
        seed()
        ranks = {"rank": rank, "world_size": world_size}
        loader = partial(DataLoader[Any], make(24), 4 // world_size, **ranks, **options)
        state = left_at(loader(), 3) if resumed else {}
        seed()
        with loader() as made:
            made.load_state_dict(state)
            for indices, draws in made:
                pairs = zip(indices.tolist(), draws.tolist(), strict=True)
                draws_of.update(pairs)
    return draws_of


def seed() -> None:
    """Seed all global generators, as a script does."""
    torch.manual_seed(0)
    seed_python(0)
    np.random.seed(0)


@pytest.mark.slow
@pytest.mark.filterwarnings(MANY_WORKERS)
@pytest.mark.filterwarnings("ignore:rng=:UserWarning")
@pytest.mark.parametrize(("kind", "rng", "head", "content"), [*cells()])
def test_each_cell_is_true(kind: str, rng: str, head: str, content: str) -> None:
    """It compares a run with another one, for each sample of both."""
    make, options = KINDS[kind]
    options = {**options, "rng": None if rng == "default" else rng.strip('`"')}
    if content == "refused":
        with pytest.raises(ValueError, match="cannot seed the random numbers of"):
            drawn(make, **options)
        return
    if not content:
        assert kind == "none" or "num_workers=0" in head
        return
    compared = {**options, **OTHERS[head]}
    if kind == "none" and "num_workers=0" in head:
        compared["num_workers"] = 2
    first, second = drawn(make, **options), drawn(make, **compared)
    assert {"yes": True, "no": False}[content] == all(
        first[index] == draws for index, draws in second.items()
    )
    assert len(first) == 24
    assert len(second) == (12 if head == "resumed" else 24)
