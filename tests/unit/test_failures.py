"""What is said of failed samples."""

import pickle
from typing import Any

import pytest

from aioloader import SKIP, Skip
from aioloader._base.failures import parts_of


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"at_most": -1}, ValueError, "got -1"),
        ({"at_most": 1.5}, ValueError, "got 1.5"),
        ({"at_most": float("nan")}, ValueError, "got nan"),
        ({"at_most": 1.0}, ValueError, "pass 1, a share below 1.0, or None"),
        ({"at_most": True}, TypeError, "got True"),
        ({"at_most": "2"}, TypeError, "got '2'"),
        ({"instead": 3}, TypeError, "must be callable, got 3"),
    ],
)
def test_skips_are_checked(options: Any, error: type[Exception], words: str) -> None:
    """Wrong ones raise, with the value in the message."""
    with pytest.raises(error, match=words):
        Skip(**options)


def test_skips_are_values() -> None:
    """They are equal if their parts are, show them, and can be sent to processes."""
    skip = Skip(at_most=0.01, instead=abs)  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(skip)) == skip
    assert repr(skip) == "Skip(at_most=0.01, instead=<built-in function abs>)"
    assert parts_of(skip) == (skip.instead, 0.01)
    assert parts_of(Skip()) == ("skip", None)


def test_skip_is_one_object() -> None:
    """The marker survives a pickle as itself."""
    assert pickle.loads(pickle.dumps(SKIP)) is SKIP
