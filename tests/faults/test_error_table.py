"""What happens when user code raises: one outcome per place, however it is run.

The tables are those of ``docs/guides/errors.md``.
"""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from aioloader import DataLoader
from aioloader.errors import WorkerDiedError
from faults.error_table import (
    BATCHES,
    KINDS,
    MODES,
    PLACES,
    Mode,
    PlainSteps,
    Raiser,
    Samples,
    drained,
    drained_async,
    loader_of,
)

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "errors.md"
# What is delivered; None stands for the error.
FOLLOWS: dict[str, list[Any]] = {
    "the next batch": [BATCHES[0], None, *BATCHES[2:]],
    "the epoch has ended": [BATCHES[0], None],
    "no batch comes": [None],
    "all batches came before": [*BATCHES, None],
}
EXITS = {"KeyboardInterrupt", "SystemExit"}
STOPS = (StopIteration, StopAsyncIteration, GeneratorExit, asyncio.CancelledError)
# The rows of the page for exceptions that it does not name.
CLASSES = {
    "ValueError": "Exception",
    "LockedError": "Exception",
    "OwnError": "BaseException",
}


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the table after a heading, without its head."""
    text = PAGE.read_text(encoding="utf-8").split(heading)[1]
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert table is not None
    lines = table[0].splitlines()[2:]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


ARRIVES = {
    name: (here, in_worker)
    for raised, here, in_worker in rows("## What arrives")
    for name in re.findall(r"`(\w+)`", raised)
}
ROWS = {place: (end, follows) for place, end, _, follows in rows("## Where it was")}


def test_the_page_has_exactly_the_places_of_the_table() -> None:
    assert set(ROWS) == set(PLACES.values())


def runs_in_worker(place: str, way: Mode) -> bool:
    """Tell whether the code of a place runs in a worker process."""
    is_reading = place.startswith("stream") and not way.is_async
    is_ours = "sampler" in place or place == "Device.transform" or is_reading
    return way.in_processes and not is_ours


def check(place: str, kind: str, way: Mode, outcomes: list[Any]) -> None:
    """Compare the outcomes with the page, and the error with the raised one."""
    end, follows = ROWS[PLACES[place]]
    shown = [type(o) if isinstance(o, BaseException) else o for o in outcomes]
    if f"`{kind}`" in end:
        assert shown in ([[0, 1]], [[0, 1], [2]], [[0, 1], [2], *BATCHES[2:]])
        return
    arrives = ARRIVES[CLASSES.get(kind, kind)][runs_in_worker(place, way)]
    types = {
        "itself": KINDS[kind],
        "`RuntimeError`": RuntimeError,
        "`WorkerDiedError`": WorkerDiedError,
    }
    wanted = [types[arrives] if o is None else o for o in FOLLOWS[follows]]
    if kind in EXITS:  # raised when it arrives; iteration stops there
        wanted, shown = (
            [types[arrives]],
            shown[-1:]
            if len(shown) == 1
            else [outcome for outcome in shown if isinstance(outcome, type)],
        )
    assert shown == wanted, kind
    (error,) = [o for o in outcomes if isinstance(o, BaseException)]
    if types[arrives] is RuntimeError:
        assert type(error.__cause__) is KINDS[kind]
        assert f"raised {kind}" in str(error)


def cells(*, awaits: bool) -> list[Any]:
    """Return the cells of some modes; ``make fuzz`` has those with processes."""
    return [
        pytest.param(
            place,
            name,
            id=f"{place}-{name}",
            marks=[pytest.mark.fuzz] if "fork" in name or "process" in name else [],
        )
        for place in PLACES
        for name, way in MODES.items()
        if way.awaits is awaits and way.fits(place)
    ]


@pytest.mark.parametrize(("place", "name"), cells(awaits=False))
def test_for_has_the_documented_outcome(place: str, name: str) -> None:
    """Each kind of exception, with a loader of its own."""
    way = MODES[name]
    for kind in KINDS:
        with loader_of(place, kind, way) as loader:
            check(place, kind, way, drained(loader))


@pytest.mark.parametrize(("place", "name"), cells(awaits=True))
async def test_async_for_has_the_documented_outcome(place: str, name: str) -> None:
    way = MODES[name]
    for kind in KINDS:
        with loader_of(place, kind, way) as loader:
            check(place, kind, way, await drained_async(loader))


FUNCTIONS = ["__getitem__", "transform", "collate_fn"]
IN_PROCESSES = [
    *((place, kind) for place in PLACES for kind in ("GeneratorExit", "OwnError")),
    *((place, kind) for place in FUNCTIONS for kind in ("CancelledError", *EXITS)),
]


@pytest.mark.parametrize(("place", "kind"), sorted(IN_PROCESSES))
@pytest.mark.parametrize("name", ["fork", "fork, async"])
def test_processes_have_the_documented_outcome(
    name: str, place: str, kind: str
) -> None:
    """Some cells of the table."""
    way = MODES[name]
    if way.fits(place):
        with loader_of(place, kind, way) as loader:
            check(place, kind, way, drained(loader))


class Unsaved(Samples):
    """A dataset whose state cannot be saved."""

    def state_dict(self) -> Any:
        return self.check(3)

    def load_state_dict(self, state: Any) -> None:
        """Do nothing."""


class UnsavedSampler(Unsaved):
    """A sampler whose state cannot be saved."""

    def __iter__(self) -> Any:
        return iter(range(len(self)))


class UnsavedSteps(PlainSteps):
    """An iterator whose state cannot be saved."""

    state_dict, load_state_dict = Unsaved.state_dict, Unsaved.load_state_dict


@pytest.mark.parametrize("kind", STOPS)
@pytest.mark.parametrize("options", [{}, {"prefetch_factor": 2}, {"num_workers": 1}])
def test_batches_arrive_though_the_state_cannot_be_saved(
    kind: type[BaseException], options: dict[str, Any]
) -> None:
    """``state_dict()`` raises the error."""
    unsaved = UnsavedSampler(Raiser(kind))
    steps = UnsavedSteps(Raiser(kind))
    cases: list[dict[str, Any]] = [
        {"dataset": unsaved},
        {"dataset": Samples(), "sampler": unsaved},
        {"dataset": steps},
    ]
    for case in cases:
        loader: Any = DataLoader(batch_size=2, **options, **case)
        next(iter(loader))
        with loader, pytest.raises(RuntimeError, match=kind.__name__) as caught:
            loader.state_dict()
        said = [str(caught.value), *getattr(caught.value, "__notes__", ())]
        assert "in the state_dict() of Unsaved" in "".join(said)
