"""What cannot be pickled is named by its path, with what to do about it."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from aioloader import DataLoader
from aioloader.errors import WorkerStartError

SPAWN: Any = {"num_workers": 1, "multiprocessing_context": "spawn"}


class Rows:
    """A dataset of one sample."""

    __slots__ = ()

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        return index


class Slotted(Rows):
    """Has slots and no dictionary."""

    __slots__ = ("lock",)

    def __init__(self) -> None:
        self.lock = threading.Lock()


class Partly(Rows):
    """Leaves one lock out of its state, and one in."""

    def __init__(self) -> None:
        self.left_out = threading.Lock()
        self.table = {"open": [1, threading.Lock()]}

    def __getstate__(self) -> Any:
        return {"table": self.table}


class Refusing(Rows):
    """Refuses in the turns that are true; without any, always."""

    def __init__(self, turns: list[bool]) -> None:
        self.turns = turns

    def __reduce__(self) -> Any:
        if not self.turns or self.turns.pop(0):
            raise RuntimeError("not me")
        return Rows, ()


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


REFUSALS: list[tuple[str, Any, str]] = [
    ("dataset", Slotted(), "Slotted.lock cannot be pickled"),
    ("dataset", Partly(), "Partly.table['open'][1] cannot be pickled"),
    ("dataset", Refusing([]), "Refusing cannot be pickled"),
    ("dataset", [3, Slotted()], "list[1].lock cannot be pickled"),
    ("transform", closing_over(threading.Lock()), "transform.func.<lock> cannot"),
    (
        "collate_fn",
        functools.partial(max, threading.Lock()),
        "collate_fn.args[0] cannot be pickled",
    ),
    ("worker_init_fn", in_main("function"), "worker_init_fn.<lock> cannot be pickled"),
]


def refusal(part: str, value: Any) -> str:
    """Return the message for a loader whose ``part`` cannot be pickled."""
    options: dict[str, Any] = {"dataset": [1], **SPAWN, part: value}
    with pytest.raises(WorkerStartError) as caught:
        list(DataLoader(**options))
    return str(caught.value)


@pytest.mark.parametrize(
    ("part", "value", "words"),
    REFUSALS,
    ids=[words.split()[0] for *_, words in REFUSALS],
)
def test_the_path_to_the_culprit_is_named(part: str, value: Any, words: str) -> None:
    """From the dataset's class, or the argument's name, down to the object."""
    message = refusal(part, value)
    assert message.startswith(words)
    assert "cannot pickle '_thread.lock' object" in message or "not me" in message
    for way_out in ("open it in the worker", "`__getstate__`", "workers='thread'"):
        assert way_out in message


def test_an_unknown_culprit_leaves_the_original_message() -> None:
    """An error that does not come again, as from a signal handler, is raised itself."""
    message = refusal("dataset", Refusing([True, False, True]))
    assert message.startswith("what the workers need cannot be pickled: not me; ")
    with pytest.raises(RuntimeError, match="not me"):
        list(DataLoader(Refusing([True, False, False]), **SPAWN))


def test_looking_for_the_culprit_changes_nothing() -> None:
    dataset = Partly()
    before = dict(vars(dataset))
    refusal("dataset", dataset)
    assert vars(dataset) == before
