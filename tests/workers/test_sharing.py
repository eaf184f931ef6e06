"""What workers share with the loader: mapped files, and what only a child can share."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aioloader import DataLoader
from working import Numbers, asked, first

# The heap of multiprocessing, once made, stays for the life of the process.
KEPT = multiprocessing.Value("i", 0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a file of the numbers below 30,000 behind a head of 64 bytes."""
    path = tmp_path / "numbers"
    path.write_bytes(bytes(64) + np.arange(30_000, dtype=np.int32).tobytes())
    return path


def is_mapped(_array: Any) -> bool:
    """Tell whether this process maps the file."""
    return "/numbers" in Path("/proc/self/maps").read_text(encoding="utf-8")


VIEWS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda mapped: mapped,
    "part": lambda mapped: mapped[1000:20_000],
    "reshaped": lambda mapped: mapped.reshape(300, 100),
    "transposed": lambda mapped: mapped.reshape(300, 100).T,
    "rows": lambda mapped: mapped.reshape(300, 100)[5:9],
}


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_mapped_file_is_mapped_again(path: Path, view: str, mode: Any) -> None:
    """Nothing of it is copied: views, offsets and modes hold."""
    mapped = np.memmap(path, np.int32, mode, offset=64)
    array = VIEWS[view](mapped)

    def question(found: Any) -> Any:
        return is_mapped(found), found.tolist(), type(found).__name__, found.mode

    assert asked(array, question) == (True, array.tolist(), "memmap", mode)


@pytest.mark.parametrize("view", ["strided", "private", "empty", "unlinked"])
def test_a_mapped_file_that_cannot_be_mapped_again(path: Path, view: str) -> None:
    """It travels as the array that it is."""
    mapped = np.memmap(path, np.int32, "c" if view == "private" else "r", offset=64)
    if view == "private":
        mapped[0] = 77  # in this process alone
    if view == "unlinked":
        path.unlink()
    array = {"strided": mapped[::3], "empty": mapped[:0]}.get(view, mapped)
    assert asked(array, lambda found: found.tolist()) == array.tolist()


def test_writes_to_a_mapped_file_arrive(path: Path) -> None:
    """With mode r+ it is the file, for all of them."""
    mapped = np.memmap(path, np.int32, "r+", offset=64)

    def question(found: Any) -> Any:
        found[3] = 99
        return int(found[4])

    assert asked(mapped, question) == 4
    assert mapped[3] == 99


SHARED: dict[str, Callable[[], Any]] = {
    "value": lambda: multiprocessing.Value("i", 0),
    "array": lambda: multiprocessing.Array("i", 3),
    "lock": lambda: multiprocessing.get_context("fork").Lock(),
    "tensor": lambda: torch.zeros(3).share_memory_(),  # type: ignore[no-untyped-call]
}


@pytest.mark.parametrize("name", SHARED)
def test_what_only_a_child_can_share(name: str) -> None:
    """Workers are forked from here then, with one warning; it is shared."""
    shared = SHARED[name]()

    def question(found: Any) -> Any:
        if name == "value":
            found.value = 5
        elif name != "lock":
            found[1] = 5
        return True

    with pytest.warns(
        UserWarning, match="what only a forked child can share"
    ) as caught:
        assert asked(shared, question)
    assert len(caught) == 1
    if name != "lock":
        assert (shared.value if name == "value" else int(shared[1])) == 5


def test_forking_was_meant() -> None:
    """With the context there is no warning."""
    counter = multiprocessing.Value("i", 0)

    def count(_sample: Any) -> Any:
        with counter:
            counter.value += 1

    loader: Any = DataLoader(
        Numbers(),
        num_workers=2,
        transform=count,
        collate_fn=first,
        multiprocessing_context="fork",
    )
    assert len(list(loader)) == 12
    assert counter.value == 12
