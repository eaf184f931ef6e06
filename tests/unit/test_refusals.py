"""What cannot be pickled is named by its path, with what to do about it."""

import functools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from aioloader._workers.pickling_errors import explain


class Slotted:
    """Has slots and no dictionary."""

    __slots__ = ("lock",)

    def __init__(self) -> None:
        self.lock = threading.Lock()


class Partly:
    """Leaves one lock out of its state, and one in."""

    def __init__(self) -> None:
        self.left_out = threading.Lock()
        self.table = {"open": [1, threading.Lock()]}

    def __getstate__(self) -> Any:
        return {"table": self.table}


class Refusing:
    """Refuses by itself."""

    def __reduce__(self) -> Any:
        raise RuntimeError("not me")


def closing_over(lock: Any) -> Callable[[Any], Any]:
    """Return a function that refers to ``lock``."""

    def inner(sample: Any) -> Any:
        with lock:
            return sample

    return functools.partial(inner)


def in_main(name: str) -> Any:
    """Return a function as a script has it, that refers to a global lock."""
    space: dict[str, Any] = {"__name__": "__main__", "lock": threading.Lock()}
    exec("def function(sample): return lock and sample", space)
    return space[name]


FOUND: list[tuple[str, Any, str]] = [
    ("dataset", Slotted(), "Slotted.lock cannot be pickled"),
    ("dataset", Partly(), "Partly.table['open'][1] cannot be pickled"),
    ("dataset", Refusing(), "Refusing cannot be pickled"),
    ("dataset", [3, Slotted()], "list[1].lock cannot be pickled"),
    ("transform", closing_over(threading.Lock()), "transform.func.<lock> cannot"),
    (
        "collate_fn",
        functools.partial(max, threading.Lock()),
        "collate_fn.args[0] cannot be pickled",
    ),
    ("worker_init_fn", in_main("function"), "worker_init_fn.<lock> cannot be pickled"),
]


@pytest.mark.parametrize(
    ("part", "value", "words"), FOUND, ids=[words.split()[0] for *_, words in FOUND]
)
def test_the_path_is_named(part: str, value: Any, words: str) -> None:
    """From the dataset's class, or the argument's name, down to the culprit."""
    shipment = SimpleNamespace(dataset=[1], transform=None)
    setattr(shipment, part, value)
    message = explain(shipment, TypeError("cannot pickle '_thread.lock' object"))
    assert message.startswith(words)
    assert "cannot pickle '_thread.lock' object" in message
    for way_out in ("open it in the worker", "`__getstate__`", "workers='thread'"):
        assert way_out in message


def test_nothing_is_found() -> None:
    """The original words must do; what does not come again is a signal handler's."""
    shipment = SimpleNamespace(dataset=[1], rest=threading.Lock())
    message = explain(shipment, ValueError("why"))
    assert message.startswith("what the workers need cannot be pickled: why; ")
    with pytest.raises(ValueError, match="why"):
        explain(SimpleNamespace(dataset=[1]), ValueError("why"))


def test_nothing_is_changed() -> None:
    """Looking for the culprit leaves the dataset as it is."""
    dataset = Partly()
    before = dict(vars(dataset))
    explain(SimpleNamespace(dataset=dataset), TypeError("x"))
    assert vars(dataset) == before
