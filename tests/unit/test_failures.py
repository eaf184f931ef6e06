"""`Skip` and `SKIP`: the policies for failed samples."""

import pickle
from typing import Any

import pytest

from aioloader import SKIP, Skip


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
def test_wrong_skips_raise(options: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Skip(**options)


def test_skips_compare_by_value_and_can_be_pickled() -> None:
    skip = Skip(at_most=0.01, instead=abs)  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(skip)) == skip
    assert repr(skip) == "Skip(at_most=0.01, instead=<built-in function abs>)"


def test_skip_marker_is_a_singleton() -> None:
    assert pickle.loads(pickle.dumps(SKIP)) is SKIP
