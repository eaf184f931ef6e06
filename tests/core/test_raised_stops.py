"""CancelledError, StopIteration and StopAsyncIteration of user code are errors.

Each belongs to one sample or batch: it ends no reader, no epoch and no consumer.
``faults/test_error_table`` raises them; here they are skipped, or come indirectly.
"""

import asyncio
from typing import Any

import pytest

from core.kit import BY, INLINE, WAYS, make, outcomes
from faults.error_table import (
    AsyncGenerated,
    AsyncSamples,
    AsyncSteps,
    Generated,
    PlainSteps,
    Raiser,
    Samples,
    Wrapped,
)

pytestmark = pytest.mark.slow

STOPS = [asyncio.CancelledError, StopIteration, StopAsyncIteration]
GOOD = [[0, 1], [4, 5], [6, 7]]  # sample 3 is bad
WITHOUT = [[0, 1], [2], [4, 5], [6, 7]]


class Awaits(AsyncSamples):
    """Awaits a cancelled task, the most common source of a CancelledError."""

    async def __getitem__(self, index: int) -> Any:
        if index == 3:
            task = asyncio.ensure_future(asyncio.sleep(0))
            task.cancel()
            await task
        return index


async def run(
    way: str, dataset: Any, **options: Any
) -> tuple[list[Any], list[BaseException], Any]:
    """Return the batches, the errors, and the loader."""
    loader = make(way, dataset, batch_size=2, **options)
    results = await outcomes(way, loader)
    errors = [result for result in results if isinstance(result, BaseException)]
    return [result for result in results if result not in errors], errors, loader


def check(errors: list[BaseException], kind: type[BaseException]) -> None:
    """Check that there is one ordinary error, which names the exception raised."""
    (error,) = errors
    assert isinstance(error, OSError if kind is OSError else RuntimeError), repr(error)
    texts = [repr(error), repr(error.__cause__), *getattr(error, "__notes__", ())]
    assert kind.__name__ in " ".join(texts)


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dataset", [Samples, AsyncSamples, Awaits, Wrapped])
async def test_a_stop_of_a_read_is_an_error(dataset: Any, way: str, by: str) -> None:
    """The batch fails, or ``on_error`` skips the sample."""
    for stop in STOPS if by == "in process" and dataset is not Awaits else STOPS[:1]:
        batches, errors, _ = await run(way, dataset(Raiser(stop)), **BY[by])
        assert batches == GOOD
        check(errors, stop)
        options = {"on_error": "skip", **BY[by]}
        batches, errors, loader = await run(way, dataset(Raiser(stop)), **options)
        assert (batches, errors) == (WITHOUT, [])
        assert loader.stats().failures == 1


@pytest.mark.parametrize("way", [INLINE, *WAYS])
@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("stream", [PlainSteps, AsyncSteps])
@pytest.mark.parametrize("stop", [asyncio.CancelledError, OSError])
async def test_a_stream_can_continue(stop: Any, stream: Any, by: str, way: str) -> None:
    """A stream is read further after a sample failed or was cancelled."""
    if by != "in process" and (stream is PlainSteps or way == "caller"):
        pytest.skip("each worker would read all")
    batches, errors, _ = await run(way, stream(Raiser(stop)), **BY[by])
    check(errors, stop)
    rest = [label for batch in batches for label in batch]
    assert [label for label in rest if label > 4] == [5, 6, 7]
    options = {"on_error": "skip", **BY[by]}
    batches, errors, loader = await run(way, stream(Raiser(stop)), **options)
    rest = [label for batch in batches for label in batch]
    assert (rest, errors) == ([0, 1, 2, 4, 5, 6, 7], [])
    assert [failure.index for failure in loader.skipped] == [3]


class Unbegun:
    """A stream that cannot be opened."""

    def __iter__(self) -> Any:
        raise StopIteration


@pytest.mark.parametrize("way", [INLINE, *WAYS])
async def test_a_stop_raised_by_iter_names_the_dataset(way: str) -> None:
    _, (error,), _ = await run(way, Unbegun())
    assert str(error) == "the dataset raised StopIteration"


IN_WORKERS = {"num_workers": 1, "fetch": "workers"}


@pytest.mark.parametrize(
    ("way", "options"),
    [*((way, {}) for way in (INLINE, *WAYS)), ("for", IN_WORKERS)],
    ids=[INLINE, *WAYS, "processes"],
)
@pytest.mark.parametrize("stream", [Generated, AsyncGenerated])
@pytest.mark.parametrize("stop", [*STOPS, OSError])
async def test_an_error_that_ends_a_generator_is_never_skipped(
    stop: Any, stream: Any, way: str, options: dict[str, Any]
) -> None:
    """A skipped error would end the epoch early."""
    raiser = Raiser(stop)
    batches, errors, _ = await run(way, stream(raiser), on_error="skip", **options)
    assert batches == GOOD[:1]
    check(errors, stop)
