"""Errors in worker processes: the user's own, with notes; skipped, or replaced."""

import threading
import traceback
from typing import Any

import pytest

from aioloader import SKIP, DataLoader, Failure, Skip
from aioloader.datasets import from_iterable
from aioloader.errors import FailureBudgetError, WorkerError
from failing import OddError, drain
from working import AsyncNumbers, Numbers, first

WAYS = ["for", "async"]


class Bad(Numbers):
    """Fails at some indices."""

    def __init__(self, *bad: int, error: Any = LookupError) -> None:
        super().__init__()
        self.bad = bad
        self.error = error

    def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            raise self.error(f"at {index}")
        return index


class AsyncBad(AsyncNumbers):
    def __init__(self, *bad: int, error: Any = LookupError) -> None:
        super().__init__(12)
        self.inner = Bad(*bad, error=error)

    async def __getitem__(self, index: int) -> Any:
        return self.inner[index]


class RowStream:
    """An iterator that fails once and continues."""

    def __init__(self, bad: int) -> None:
        self.bad = bad
        self.row = -1

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        self.row += 1
        if self.row == self.bad:
            raise LookupError("bad row")
        if self.row == 8:
            raise StopIteration
        return self.row


def make(dataset: Any, **options: Any) -> Any:
    return DataLoader(dataset, **{"batch_size": 4, "num_workers": 2, **options})


@pytest.mark.slow
@pytest.mark.parametrize("dataset", [Bad, AsyncBad])
async def test_errors_keep_their_type_and_gain_notes(dataset: Any) -> None:
    """Stage, batch, index, worker and remote traceback."""
    outcomes = await drain("async", make(dataset(5)))
    error: Any = outcomes[1]
    assert type(error) is LookupError
    assert error.args == ("at 5",)
    text = "".join(traceback.format_exception(error))
    assert "stage 'fetch' of epoch 0, batch 1, sample index 5" in text
    assert "Caught LookupError in DataLoader worker process" in text
    assert "in __getitem__" in error.__notes__[-1]


def odd(_message: str) -> Exception:
    """Return an exception with an odd constructor."""
    return OddError(1, 2)


def unsendable(message: str) -> Exception:
    """Return an exception that cannot be pickled."""
    error = RuntimeError(message)
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    return error


class PrefixedError(Exception):
    """Its constructor adds a prefix, which a copy by its arguments would repeat."""

    def __init__(self, message: str) -> None:
        super().__init__(f"bad sample: {message}")


class KeywordError(Exception):
    """Its text is made of its attributes, and one of them is a lock."""

    def __init__(self, *, name: str) -> None:
        self.name, self.lock = name, threading.Lock()

    def __str__(self) -> str:
        return f"bad {self.name}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (odd, OddError, str(OddError(1, 2))),
        (unsendable, RuntimeError, "at 1"),
        (PrefixedError, PrefixedError, "bad sample: at 1"),
        (lambda message: KeywordError(name=message), KeywordError, "bad at 1"),
    ],
    ids=["odd", "not", "prefixed", "keyword"],
)
async def test_exceptions_keep_their_text(error: Any, kind: Any, text: str) -> None:
    """Whatever their constructor does, also if they cannot be pickled."""
    caught, *rest = await drain("for", make(Bad(1, error=error)))
    assert str(caught) == text
    assert type(caught).__name__ == kind.__name__
    told = "".join(traceback.format_exception(caught))
    assert "in DataLoader worker process" in told
    assert rest == [[4, 5, 6, 7], [8, 9, 10, 11]]


class Stubborn(int):
    """An index that cannot be pickled."""

    def __reduce_ex__(self, _protocol: Any) -> Any:
        raise TypeError("cannot pickle me")


def test_a_request_that_cannot_be_sent_is_an_error() -> None:
    """The next batch arrives."""
    sampler: Any = [0, 1, Stubborn(2), 3, 4]
    iterator = iter(DataLoader(Numbers(), 1, sampler=sampler, num_workers=2))
    assert [next(iterator).item() for _ in range(2)] == [0, 1]
    with pytest.raises(TypeError, match="cannot pickle me"):
        next(iterator)
    assert [batch.item() for batch in iterator] == [3, 4]


class Fragile:
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> Any:
    raise LookupError("not here")


@pytest.mark.parametrize("is_sent", [False, True])
def test_a_batch_that_cannot_be_sent_is_an_error(is_sent: bool) -> None:
    """Or not unpickled. The error says why; the next batch arrives."""

    def collate(samples: list[Any]) -> Any:
        bad = Fragile() if is_sent else (sample for sample in samples)
        return bad if samples[0] == 4 else samples

    iterator = iter(make(Numbers(), collate_fn=collate))
    assert next(iterator) == [0, 1, 2, 3]
    words = "could not be unpickled" if is_sent else "cannot pickle"
    with pytest.raises((WorkerError, TypeError), match=words) as caught:
        next(iterator)
    if is_sent:
        assert type(caught.value.__cause__) is LookupError
    else:
        assert "stage 'send' of epoch 0, batch 1" in caught.value.__notes__[0]
    assert next(iterator) == [8, 9, 10, 11]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
async def test_on_error_decides_in_the_worker(way: str) -> None:
    """It replaces, skips or raises."""

    def decide(failure: Failure) -> Any:
        if failure.index == 1:
            return -1
        if failure.index == 2:
            return SKIP
        raise KeyError("no")

    loader = make(Bad(1, 2, 9), on_error=decide)
    outcomes = await drain(way, loader)
    assert outcomes[:2] == [[0, -1, 3], [4, 5, 6, 7]]
    assert type(outcomes[2]) is KeyError
    assert {failure.index for failure in loader.skipped} >= {1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("limit", [2, 0.1])
async def test_the_failure_budget_counts_all_workers(way: str, limit: float) -> None:
    """One failure too many raises, in whichever worker it is."""
    loader = make(Bad(0, 4, 8), on_error=Skip(at_most=limit))
    outcomes = await drain(way, loader)
    error = next(outcome for outcome in outcomes if isinstance(outcome, Exception))
    assert isinstance(error, FailureBudgetError)
    assert error.failures == (3 if limit == 2 else 2)
    assert isinstance(error.__cause__, LookupError)
    fresh = make(Bad(0, 4), on_error=Skip(at_most=2))
    assert await drain(way, fresh) == [[1, 2, 3], [5, 6, 7], [8, 9, 10, 11]]
    ahead = make(AsyncBad(0, 4, 8), on_error=Skip(at_most=0.26), num_workers=1)
    assert await drain(way, ahead) == [[1, 2, 3], [5, 6, 7], [9, 10, 11]]


@pytest.mark.parametrize("fetch", ["loader", "workers"])
async def test_a_stream_continues_after_a_skipped_failure(fetch: Any) -> None:
    """Its iterator may fail for one sample and return the next."""
    loader = make(RowStream(2), num_workers=1, on_error="skip", fetch=fetch)
    assert await drain("async", loader) == [[0, 1, 3], [4, 5, 6, 7]]
    assert [failure.index for failure in loader.skipped] == [2]


def test_closing_an_iteration_leaves_others_their_policy() -> None:
    """A worker that reads makes batches of both with one maker."""
    stream = from_iterable(range(20)).map(Bad(18).__getitem__)
    options: Any = {"num_workers": 1, "fetch": "workers", "persistent_workers": True}
    loader = make(stream, on_error="skip", **options)
    with loader:
        first, second = iter(loader), iter(loader)
        next(first), next(second)
        first.close()
        assert [batch.tolist() for batch in second][-1] == [16, 17, 19]


def test_too_many_workers_are_a_warning() -> None:
    """With torch's message, from the constructor."""
    with pytest.warns(UserWarning, match="This DataLoader will create 400 worker"):
        DataLoader(Numbers(), num_workers=400)
    DataLoader(Numbers(), num_workers=400, workers="thread")


def test_a_collate_function_may_return_anything() -> None:
    """A number, or None."""
    assert list(make(Numbers(3), batch_size=1, collate_fn=first)) == [0, 1, 2]
    assert list(make(Numbers(3), batch_size=1, collate_fn=lambda _: None)) == [None] * 3
