"""``on_error`` and ``retry`` for reads of samples and batches; kinds of indices."""

import asyncio
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, TensorDataset
from torch.utils.data import DataLoader as TorchLoader

from aioloader import SKIP, DataLoader, Failure, Retry, Skip
from aioloader.datasets import from_iterable
from aioloader.errors import FailureBudgetError
from beside import beside
from core.kit import BY, INLINE, WAYS, make, outcomes
from working import AsyncNumbers, Numbers, double, double_async, total_async

# -- on_error, and retry ------------------------------------------------------------


class Alone(Numbers):
    """Reads samples; some are bad."""

    def __init__(self, *bad: int, error: Callable[[], Exception] = OSError) -> None:
        super().__init__(12)
        self.bad = bad
        self.error = error
        self.calls: list[Any] = []

    def read(self, index: int) -> int:
        """Return a sample, or fail."""
        if index in self.bad:
            raise self.error()
        return index

    def __getitem__(self, index: int) -> Any:
        self.calls.append(index)
        return self.read(index)


class AsyncAlone(Alone):
    async def __getitem__(self, index: int) -> Any:
        await asyncio.sleep(0)
        return super().__getitem__(index)


class Batches(Alone):
    def __getitems__(self, indices: list[int]) -> Any:
        self.calls.append(list(indices))
        return [self.read(index) for index in indices]


class AsyncBatches(AsyncAlone):
    async def __getitems__(self, indices: list[int]) -> Any:
        await asyncio.sleep(0)
        self.calls.append(list(indices))
        return [self.read(index) for index in indices]


WHOLE = [Batches, AsyncBatches]
KINDS = [Alone, AsyncAlone, *WHOLE]
ALL_WAYS = [INLINE, *WAYS]
ALL = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
WITHOUT = [ALL[0], [4, 7], ALL[2]]


@pytest.mark.slow
@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("way", ALL_WAYS)
@pytest.mark.parametrize("kind", KINDS)
async def test_skipped_samples_are_not_delivered(kind: Any, way: str, by: str) -> None:
    """``skipped`` lists them; a failed batch read is repeated sample by sample."""
    dataset = kind(1, 4, 5, 6, 7)
    loader = make(way, dataset, on_error="skip", **BY[by])
    assert await outcomes(way, loader) == [[0, 2, 3], ALL[2]]
    assert loader.stats().failures == 5
    assert sorted(failure.index for failure in loader.skipped) == [1, 4, 5, 6, 7]
    assert {(failure.stage, failure.epoch) for failure in loader.skipped} == {
        ("fetch", 0)
    }
    assert {type(failure.error) for failure in loader.skipped} == {OSError}
    # A traceback would keep its frames alive as long as the list.
    assert {failure.error.__traceback__ for failure in loader.skipped} == {None}
    if by == "in process" and kind in WHOLE:
        assert ALL[2] in dataset.calls
        assert 8 not in dataset.calls


@pytest.mark.parametrize("way", ALL_WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transform", [None, double, double_async])
async def test_a_callable_replaces_or_skips_or_raises(
    kind: Any, way: str, transform: Any
) -> None:
    """The function gets each failed sample's place and error."""
    asked: list[Failure] = []

    def decide(failure: Failure) -> Any:
        asked.append(failure)
        if failure.index == 9:
            raise KeyError("no")
        return 100 if failure.index == 5 else SKIP

    loader = make(way, kind(5, 6, 9), on_error=decide, transform=transform)
    factor = 1 if transform is None else 2
    results = await outcomes(way, loader)
    # A replacement is transformed as a sample is.
    assert results[1] == [4 * factor, 100 * factor, 7 * factor]
    assert isinstance(results[2], KeyError)
    places = sorted(
        (failure.stage, failure.batch, failure.position, failure.index)
        for failure in asked
    )
    assert places == [("fetch", 1, 1, 5), ("fetch", 1, 2, 6), ("fetch", 2, 1, 9)]
    assert all(isinstance(failure.error, OSError) for failure in asked)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", WHOLE)
async def test_a_failed_batch_read_is_not_repeated(kind: Any, way: str) -> None:
    """By default, the error of the read is the error of its batch, as in torch."""
    dataset = kind(5, 6)
    results = await outcomes(way, make(way, dataset))
    assert [results[0], results[2]] == [WITHOUT[0], WITHOUT[2]]
    assert isinstance(results[1], OSError)
    assert not any(isinstance(call, int) for call in dataset.calls)


@pytest.mark.parametrize("way", ALL_WAYS)
@pytest.mark.parametrize("kind", KINDS)
async def test_the_budget_counts_each_bad_sample_once(kind: Any, way: str) -> None:
    """Even where a failed batch is read again; the error contains the count."""
    loader = make(way, kind(5, 6), on_error=Skip(at_most=2))
    assert await outcomes(way, loader) == WITHOUT
    loader = make(way, kind(5, 6), on_error=Skip(at_most=1))
    first, error, last = await outcomes(way, loader)
    assert [first, last] == [ALL[0], ALL[2]]
    assert isinstance(error, FailureBudgetError)
    assert error.failures == 2
    assert isinstance(error.__cause__, OSError)


class Partly(Numbers):
    """A share of the samples is bad, at random positions."""

    def __init__(self, share: float, seed: int, n: int = 2000) -> None:
        super().__init__(n)
        self.bad = set(random.Random(seed).sample(range(n), round(share * n)))

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise OSError("bad")
        return index


def unsized(dataset: Partly) -> Any:
    """Return a stream of its samples, of unknown length."""
    return from_iterable(range(dataset.n)).map(dataset.__getitem__)


@pytest.mark.parametrize("is_sized", [True, False])
async def test_a_budget_share_applies_to_the_whole_epoch(is_sized: bool) -> None:
    """Wherever the bad samples are, fewer never raise and more always do."""

    def raises(share: float, seed: int) -> bool:
        dataset: Any = Partly(share, seed)
        dataset = dataset if is_sized else unsized(dataset)
        try:
            list(DataLoader(dataset, 50, on_error=Skip(at_most=0.01)))
        except FailureBudgetError:
            return True
        return False

    def count(share: float) -> int:
        return sum(raises(share, seed) for seed in range(20))

    counts = await beside(lambda: [count(share) for share in (0.008, 0.01, 0.015)])
    assert counts == [0, 0, 20]


@pytest.mark.parametrize("way", ALL_WAYS)
async def test_a_sized_epoch_fails_at_the_first_excess_failure(way: str) -> None:
    """The allowed share is that of this rank's samples."""
    options: Any = {"on_error": Skip(at_most=0.01), "rank": 1, "world_size": 2}
    loader = make(way, Partly(0.02, 0), **options)
    error = next(e for e in await outcomes(way, loader) if isinstance(e, Exception))
    assert isinstance(error, FailureBudgetError)
    assert error.failures == 11
    assert re.search(r"^11 of .* than Skip\(at_most=0.01\) allows of 1,000", str(error))


@pytest.mark.parametrize("way", ALL_WAYS)
async def test_an_unsized_epoch_checks_its_share_at_the_end(way: str) -> None:
    """Failures that chance cannot explain end the epoch earlier."""
    loader = make(way, unsized(Partly(0.04, 0, n=200)), on_error=Skip(at_most=0.01))
    *batches, error = await outcomes(way, loader)
    assert len(batches) == 50
    assert isinstance(error, FailureBudgetError)
    assert (error.failures, error.attempted, loader.epoch) == (8, 200, 1)
    loader = make(way, unsized(Partly(0.5, 0)), on_error=Skip(at_most=0.01))
    errors = [e for e in await outcomes(way, loader) if isinstance(e, Exception)]
    assert isinstance(errors[0], FailureBudgetError)
    assert 1000 <= errors[0].attempted < 1500


@pytest.mark.parametrize("as_read", [lambda dataset: dataset, unsized])
async def test_a_resumed_epoch_has_the_whole_budget(
    as_read: Callable[[Partly], Any],
) -> None:
    """The few samples that are left may use the share of the whole epoch."""
    dataset = Partly(0, 0)
    loader: Any = DataLoader(as_read(dataset), 50, on_error=Skip(at_most=0.01))
    states = await beside(lambda: [loader.state_dict() for _ in loader])
    dataset.bad = {*range(1990, 2000)}
    loader.load_state_dict(states[38])
    assert [len(batch) for batch in await beside(lambda: list(loader))] == [40]


@pytest.mark.parametrize("way", ALL_WAYS)
@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_rank_that_would_lose_a_batch_raises(way: str, is_stream: bool) -> None:
    """Other ranks would wait for the batch; replaced samples avoid the error."""
    bad = {1, 5, 9, 13}  # the first batch of rank 1

    def refuse(number: int) -> int:
        if number in bad:
            raise OSError("bad")
        return number

    stream: Any = from_iterable(range(24)).epoch_length(24) if is_stream else range(24)
    options: dict[str, Any] = {"transform": refuse, "rank": 1, "world_size": 4}
    results = await outcomes(way, make(way, stream, on_error="skip", **options))
    assert isinstance(results[0], FailureBudgetError)
    assert "4 samples of batch 0 of epoch 0 failed" in str(results[0])
    assert "other ranks" in str(results[0])
    loader = make(way, stream, on_error=lambda _failure: -1, **options)
    assert (await outcomes(way, loader))[0] == [-1] * 4


@pytest.mark.parametrize("way", ALL_WAYS)
@pytest.mark.parametrize("kind", KINDS)
async def test_failed_reads_are_retried(way: str, kind: Any) -> None:
    """The third attempt succeeds; a batch counts as one read."""
    errors = [ConnectionResetError(), TimeoutError()]

    class Flaky(kind):  # type: ignore[misc]
        def read(self, index: int) -> int:
            if index == 5 and errors:
                raise errors.pop()
            return index

    dataset = Flaky()
    retry = Retry(max_attempts=3, base_delay=0.0)
    assert await outcomes(way, make(way, dataset, retry=retry)) == ALL
    assert dataset.calls.count([4, 5, 6, 7] if kind in WHOLE else 5) == 3


@pytest.mark.parametrize("way", ALL_WAYS)
@pytest.mark.parametrize("kind", KINDS)
async def test_exhausted_retries_raise_the_last_error(way: str, kind: Any) -> None:
    """Errors that are not transient are not retried."""
    retry = Retry(max_attempts=4, base_delay=0.0)
    for error, attempts in ((OSError, 4), (FileNotFoundError, 1), (ValueError, 1)):
        dataset = kind(0, error=error)
        results = await outcomes(way, make(way, dataset, retry=retry))
        assert type(results[0]) is error
        assert dataset.calls.count(ALL[0] if kind in WHOLE else 0) == attempts


class Short(Batches):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices[:3] if indices[0] == 4 else indices


class AsyncShort(AsyncBatches):
    async def __getitems__(self, indices: list[int]) -> list[int]:
        return Short().__getitems__(indices)


@pytest.mark.parametrize("way", ALL_WAYS)
@pytest.mark.parametrize("kind", [Short, AsyncShort])
async def test_a_batch_read_of_too_few_samples_is_an_error(way: str, kind: Any) -> None:
    """The samples are transformed, so their number matters."""
    results = await outcomes(way, make(way, kind(), transform=int))
    assert [results[0], results[2]] == [ALL[0], ALL[2]]
    assert "__getitems__ returned 3 samples for 4 indices" in str(results[1])
    assert "sample indices [4, 5, 6, 7]" in results[1].__notes__[0]


class OnlyTogether(Batches):
    """The batch read fails; each sample can be read alone."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        if 5 in indices:
            raise OSError("no such batch")
        return indices

    def read(self, index: int) -> int:
        return index


@pytest.mark.parametrize("way", WAYS)
async def test_a_failed_batch_read_skips_no_good_sample(way: str) -> None:
    loader = make(way, OnlyTogether(), on_error="skip")
    assert await outcomes(way, loader) == ALL
    assert loader.stats().failures == 0


# -- tensors as indices -------------------------------------------------------------


ORDER: Any = torch.tensor([3, 1, 4, 0, 5, 9, 2, 6, 8, 7])


PARTS: Any = ORDER.split(3)
INDICES: dict[str, Callable[[], dict[str, Any]]] = {
    "sampler of tensors": lambda: {"sampler": list(ORDER), "batch_size": 3},
    "a batch sampler": lambda: {"batch_sampler": BatchSampler([*ORDER], 3, True)},
    "batches that are tensors": lambda: {"batch_sampler": PARTS},
    "batches of arrays": lambda: {"batch_sampler": [part.numpy() for part in PARTS]},
    "batches of tensors": lambda: {"batch_sampler": [list(part) for part in PARTS]},
    "batches as samples": lambda: {"sampler": PARTS, "batch_size": None},
    "lists as samples": lambda: {
        "sampler": BatchSampler(RandomSampler(range(10)), 3, False),
        "batch_size": None,
    },
    "negative ones": lambda: {"sampler": [torch.tensor(-1), 2], "batch_size": 2},
    "numpy's numbers": lambda: {"sampler": torch.arange(10).numpy(), "batch_size": 4},
    "an empty batch sampler": lambda: {"batch_sampler": []},
}


@pytest.mark.slow
@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", INDICES)
async def test_tensors_are_indices_as_in_torch(case: str, way: str, by: str) -> None:
    """The dataset is in memory; the batches are those of torch's loader."""
    data = TensorDataset(torch.arange(10) * 10, torch.rand(10, 2))
    torch.manual_seed(5)
    theirs: Any = [
        [field.tolist() for field in b] for b in TorchLoader(data, **INDICES[case]())
    ]
    torch.manual_seed(5)
    options: Any = {"batch_size": 1, **INDICES[case](), **BY[by]}
    batches = await outcomes(way, make(way, data, **options))
    assert [[field.tolist() for field in batch] for batch in batches] == theirs


# -- plain datasets that return coroutines ------------------------------------------


class Slotted:
    """Hides an async dataset in a closure."""

    __slots__ = ("_get", "_n")

    def __init__(self, inner: Any) -> None:
        self._n = len(inner)
        self._get: Any = lambda index: inner[index]

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: int) -> Any:
        return self._get(index)


class SlottedBatches(Slotted):
    __slots__ = ()

    def __getitems__(self, indices: list[int]) -> Any:
        async def read() -> list[Any]:
            return [await self._get(index) for index in indices]

        return read()


class Half(Slotted):
    """Returns coroutines for some samples only, as a cache does."""

    __slots__ = ()

    def __getitem__(self, index: int) -> Any:
        return index if index % 3 == 0 else self._get(index)


@pytest.mark.slow
@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [Slotted, SlottedBatches, Half])
async def test_plain_reads_may_return_coroutines(kind: Any, way: str, by: str) -> None:
    """The loader detects them by the returned values."""
    loader = make(way, kind(AsyncNumbers(12)), **BY[by])
    assert await outcomes(way, loader) == ALL
    assert await outcomes(way, loader) == ALL


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [Slotted, SlottedBatches])
async def test_returned_coroutines_are_processed_further(kind: Any, way: str) -> None:
    """Their values are transformed, collated, and skipped where they fail."""

    class Bad(AsyncNumbers):
        async def __getitem__(self, index: int) -> Any:
            if index == 5:
                raise OSError("no sample")
            return await super().__getitem__(index)

    dataset = kind(Bad(12))
    loader: DataLoader[Any] = make(way, dataset, transform=double, on_error="skip")
    expected = [[0, 2, 4, 6], [8, 12, 14], [16, 18, 20, 22]]
    assert await outcomes(way, loader) == expected
    loader = make(way, kind(AsyncNumbers(12)), collate_fn=total_async)
    assert await outcomes(way, loader) == [6, 22, 38]
