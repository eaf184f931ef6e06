"""What workers share with the loader: mapped files, and what only a child can share."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aioloader import DataLoader
from aioloader.errors import WorkerStartError
from working import asked

SERVED: dict[str, Any] = {"multiprocessing_context": "forkserver"}
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


class Opened:
    """Reads a file that was opened before the fork, in two workers in step."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("rb", buffering=0)
        self.file.seek(1)
        self.both = multiprocessing.Barrier(2)

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[int, bytes]:
        begun = self.file.tell()
        self.both.wait()
        self.file.seek(10 + 10 * index)
        self.both.wait()
        return begun, self.file.read(2)


def test_workers_have_positions_in_open_files(tmp_path: Path) -> None:
    """A seek of one moves no other; the file may have been removed."""
    path = tmp_path / "letters"
    path.write_bytes(bytes(range(100)))
    dataset = Opened(path)
    path.unlink()
    with dataset.file:
        loader: Any = DataLoader(dataset, None, num_workers=2)
        assert list(loader) == [[1, b"\n\x0b"], [1, b"\x14\x15"]]
        assert dataset.file.tell() == 1


VIEWS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda mapped: mapped,
    "part": lambda mapped: mapped[1000:20_000],
    "reshaped": lambda mapped: mapped.reshape(300, 100),
    "transposed": lambda mapped: mapped.reshape(300, 100).T,
    "rows": lambda mapped: mapped.reshape(300, 100)[5:9],
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_mapped_file_is_mapped_again(path: Path, view: str, mode: Any) -> None:
    """Nothing of it is copied: views, offsets and modes hold."""
    mapped = np.memmap(path, np.int32, mode, offset=64)
    array = VIEWS[view](mapped)

    def question(found: Any) -> Any:
        return is_mapped(found), found.tolist(), type(found).__name__, found.mode

    assert asked(array, question, **SERVED) == (True, array.tolist(), "memmap", mode)


@pytest.mark.parametrize("view", ["strided", "private", "empty", "unlinked"])
def test_a_mapped_file_that_cannot_be_mapped_again(path: Path, view: str) -> None:
    """It travels as the array that it is."""
    mapped = np.memmap(path, np.int32, "c" if view == "private" else "r", offset=64)
    if view == "private":
        mapped[0] = 77  # in this process alone
    if view == "unlinked":
        path.unlink()
    array = {"strided": mapped[::3], "empty": mapped[:0]}.get(view, mapped)
    assert asked(array, lambda found: found.tolist(), **SERVED) == array.tolist()


def test_writes_to_a_mapped_file_arrive(path: Path) -> None:
    """With mode r+ it is the file, for all of them."""
    mapped = np.memmap(path, np.int32, "r+", offset=64)

    def question(found: Any) -> Any:
        found[3] = 99
        return int(found[4])

    assert asked(mapped, question, **SERVED) == 4
    assert mapped[3] == 99


SHARED: dict[str, Callable[[], Any]] = {
    "value": lambda: multiprocessing.Value("i", 0),
    "array": lambda: multiprocessing.Array("i", 3),
    "lock": lambda: multiprocessing.get_context("fork").Lock(),
    "tensor": lambda: torch.zeros(3).share_memory_(),  # type: ignore[no-untyped-call]
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED)
def test_what_only_a_child_can_share(name: str) -> None:
    """Workers are forked, and share it; those of the fork server cannot have it."""
    shared = SHARED[name]()

    def question(found: Any) -> Any:
        if name == "value":
            found.value = 5
        elif name != "lock":
            found[1] = 5
        return True

    assert asked(shared, question)
    if name != "lock":
        assert (shared.value if name == "value" else int(shared[1])) == 5
    with pytest.raises(WorkerStartError, match=r"context='fork'"):
        asked(shared, question, **SERVED)
