"""Exceptions from a worker: the same type and text, or the text at least."""

import pickle
import threading
from typing import Any, Self

import pytest
import torch

from aioloader._workers.remote_tasks import RemoteError
from aioloader.errors import DatasetError, WorkerError
from failing import OddError


class KeywordError(Exception):
    """Has a constructor with keywords only."""

    def __init__(self, *, code: int, table: torch.Tensor | None = None) -> None:
        super().__init__(f"code {code}")
        self.code = code
        self.table = table


class HoldingError(Exception):
    """Holds what cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("held")
        self.lock = threading.Lock()


class RefusingError(Exception):
    """Refuses to be pickled."""

    def __reduce__(self) -> Any:
        raise RuntimeError("no")


class ChangingError(Exception):
    """Comes back as something else."""

    def __reduce__(self) -> Any:
        return str, ("not an exception",)


class SilentError(Exception):
    """Cannot even be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no")


class ForgetfulError(KeyError):
    """Pickles to its arguments alone."""

    def __reduce__(self) -> Any:
        return type(self), self.args

    def __new__(cls, *args: Any) -> Self:
        return super().__new__(cls, *args)


def raised(error: BaseException) -> BaseException:
    """Return ``error`` with a traceback and a note, as a worker catches it."""
    error.add_note("where it was")
    try:
        raise error
    except type(error) as caught:
        return caught


def crossed(error: BaseException) -> BaseException:
    """Return ``error`` as the loader raises it."""
    remote = RemoteError.of(raised(error), 3)
    copy: RemoteError = pickle.loads(pickle.dumps(remote))
    return copy.raisable()


CROSSING = [
    ValueError("plain"),
    KeyError("key"),
    OSError(2, "No such file", "path"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad byte"),
    OddError(1, 2),
    KeywordError(code=4),
    KeywordError(code=4, table=torch.arange(5000)),
    ValueError("tensor", torch.arange(5000)),
    ForgetfulError("gone"),
    ExceptionGroup("several", [ValueError("x"), KeyError("key")]),
    RefusingError("x"),
    ChangingError("x"),
    DatasetError("m", location="s3://b/k", attempts=3),
    SilentError(),
]


@pytest.mark.parametrize(
    "error", CROSSING, ids=[f"{n} {type(e).__name__}" for n, e in enumerate(CROSSING)]
)
def test_the_type_stays(error: BaseException) -> None:
    """With arguments, attributes, the notes it had, and where it was caught."""
    found = crossed(error)
    assert type(found) is type(error)
    assert repr(found.args) == repr(error.args)
    attributes = {**vars(found), "__notes__": None}
    assert repr(attributes) == repr({**vars(error), "__notes__": None})
    first, last = found.__notes__
    assert first == "where it was"
    name = type(error).__name__
    assert last.startswith(f"Caught {name} in DataLoader worker process 3.\nOriginal ")
    assert "in raised" in last


def test_what_would_end_a_loop_is_a_cause() -> None:
    """Its type is kept there."""
    found = crossed(StopIteration(3))
    assert str(found) == "user code raised StopIteration"
    assert type(found.__cause__) is StopIteration


def test_attributes_that_cannot_cross_stay_behind() -> None:
    """The type and the text are kept."""
    found = crossed(HoldingError())
    assert type(found) is HoldingError
    assert str(found) == "held"
    assert not hasattr(found, "lock")


def test_what_cannot_cross_keeps_its_text() -> None:
    """A WorkerError with torch's phrase, the remote traceback and the notes."""
    error = ExceptionGroup("odd", [OddError(1, 2)])
    found = crossed(error)
    assert type(found) is WorkerError
    assert found.worker == 3
    name = type(error).__name__
    assert str(found).startswith(f"Caught {name} in DataLoader worker process 3.")
    assert "in raised" in str(found)
    assert found.__notes__ == ["where it was"]


def test_endless_tracebacks_are_cut() -> None:
    """The end, which says what it was, is kept."""
    found = crossed(ValueError("x" * 100_000 + "end"))
    assert len(found.__notes__[-1]) < 25_000
    assert "end" in found.__notes__[-1]


def test_the_same_error_raised_twice_has_its_notes_once() -> None:
    """Nothing piles up."""
    remote = RemoteError.of(raised(ValueError("x")), 0)
    assert remote.raisable().__notes__ == remote.raisable().__notes__
