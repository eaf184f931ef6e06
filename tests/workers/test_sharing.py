"""What workers share with the loader: mapped files, shared memory, objects of fork."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aioloader import DataLoader
from aioloader.errors import WorkerStartError
from python_process import python
from working import asked

SERVED: dict[str, Any] = {"multiprocessing_context": "forkserver"}
# The heap of multiprocessing, once made, stays for the life of the process.
KEPT = multiprocessing.Value("i", 0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a file of the numbers below 30,000 after a header of 64 bytes."""
    path = tmp_path / "numbers"
    path.write_bytes(bytes(64) + np.arange(30_000, dtype=np.int32).tobytes())
    return path


def is_mapped(_array: Any) -> bool:
    """Return whether this process maps the file."""
    return "/numbers" in Path("/proc/self/maps").read_text(encoding="utf-8")


class Opened:
    """Two workers read, in step, a file that was opened before the fork."""

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


@pytest.mark.usefixtures("fork_is_default")
def test_workers_have_their_own_position_in_a_file(tmp_path: Path) -> None:
    """A seek moves no other position; the file may have been removed."""
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
def test_a_mapped_file_is_mapped_in_workers(path: Path, view: str, mode: Any) -> None:
    """It is not copied; views, offsets and modes are kept."""
    mapped = np.memmap(path, np.int32, mode, offset=64)
    array = VIEWS[view](mapped)

    def question(sent: Any) -> Any:
        return is_mapped(sent), sent.tolist(), type(sent).__name__, sent.mode

    assert asked(array, question, **SERVED) == (True, array.tolist(), "memmap", mode)


@pytest.mark.parametrize("view", ["strided", "private", "empty", "unlinked"])
def test_an_array_that_cannot_be_mapped_is_copied(path: Path, view: str) -> None:
    mapped = np.memmap(path, np.int32, "c" if view == "private" else "r", offset=64)
    if view == "private":
        mapped[0] = 77  # in this process alone
    if view == "unlinked":
        path.unlink()
    array = {"strided": mapped[::3], "empty": mapped[:0]}.get(view, mapped)
    assert asked(array, lambda sent: sent.tolist(), **SERVED) == array.tolist()


def test_writes_of_workers_reach_a_mapped_file(path: Path) -> None:
    """With mode r+, for all processes."""
    mapped = np.memmap(path, np.int32, "r+", offset=64)

    def question(sent: Any) -> Any:
        sent[3] = 99
        return int(sent[4])

    assert asked(mapped, question, **SERVED) == 4
    assert mapped[3] == 99


def zeros() -> torch.Tensor:
    return torch.zeros(3).share_memory_()  # type: ignore[no-untyped-call,no-any-return]


def parameter() -> torch.Tensor:
    """Return the parameter of a shared module."""
    module: Any = torch.nn.Linear(3, 1, bias=False).share_memory()
    weight: torch.Tensor = module.weight
    return weight.detach()[0]


SERVED_CONTEXT = multiprocessing.get_context("forkserver")
SHARED: dict[str, Callable[[], Any]] = {
    "tensor": zeros,
    "view": lambda: zeros()[1:],
    "parameter": parameter,
    "value": lambda: SERVED_CONTEXT.Array("i", 3),
    "raw": lambda: SERVED_CONTEXT.RawArray("i", 3),
}


class Shared:
    """Has a shared object twice, and many more; a worker reads and writes it."""

    def __init__(self, shared: Any) -> None:
        self.shared, self.again = shared, [shared]
        self.many = [zeros() for _ in range(70)]

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        self.many[index - 1][0] += self.shared[0]
        self.shared[1] = self.again[0][0] + 1
        return int(self.shared[0])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("kind", SHARED)
def test_shared_objects_stay_shared_with_workers(kind: str, method: Any) -> None:
    """Both sides see writes, also with persistent workers, as in torch."""
    dataset = Shared(SHARED[kind]())
    options: Any = {"num_workers": 1, "persistent_workers": True}
    with DataLoader(dataset, None, multiprocessing_context=method, **options) as loader:
        for number in range(1, 4):
            dataset.shared[0] = number
            assert list(loader) == [number]
            assert dataset.shared[1] == number + 1
    assert dataset.many[-1][0] == 1 + 2 + 3


NAMED = """
import torch
from aioloader import DataLoader
torch.multiprocessing.set_sharing_strategy("file_system")
class Rows:
    epoch = torch.zeros(1).share_memory_()
    def __len__(self): return 1
    def __getitem__(self, index): return self.epoch.add_(1).item()
for method in "forkserver", "spawn":
    rows = Rows()
    rows.epoch = torch.tensor([3]).share_memory_()
    options = dict(persistent_workers=True, multiprocessing_context=method)
    with DataLoader(rows, None, num_workers=1, **options) as loader:
        print([*loader, *loader], rows.epoch.item())
"""


@pytest.mark.slow
def test_a_tensor_that_is_shared_by_name_stays_shared() -> None:
    """With torch's strategy ``"file_system"``."""
    assert python("-c", NAMED, check=True).stdout == "[4, 5] 5\n" * 2


def test_a_tensor_from_a_file_is_mapped_if_shared(tmp_path: Path) -> None:
    """``torch.from_file``; otherwise it is copied."""

    def add(sent: Any) -> Any:
        sent += 1
        return sent.tolist()

    for shared, after in (True, 1), (False, 0):
        name = str(tmp_path / str(shared))
        Path(name).write_bytes(bytes(12))
        tensor = torch.from_file(name, shared=shared, size=3)
        assert asked(tensor, add, **SERVED) == [1.0] * 3
        assert tensor.tolist() == [after] * 3


OF_A_CHILD: dict[str, Callable[[], Any]] = {
    "value": lambda: multiprocessing.get_context("fork").Value("i", 0),
    "array": lambda: multiprocessing.get_context("fork").Array("i", 3),
    "lock": lambda: multiprocessing.get_context("fork").Lock(),
}


@pytest.mark.usefixtures("fork_is_default")
@pytest.mark.slow
@pytest.mark.parametrize("name", OF_A_CHILD)
def test_objects_of_fork_are_shared_by_forked_workers(name: str) -> None:
    """Workers of the fork server cannot have them."""
    shared = OF_A_CHILD[name]()

    def question(sent: Any) -> Any:
        if name == "value":
            sent.value = 5
        elif name != "lock":
            sent[1] = 5
        return True

    assert asked(shared, question)
    if name != "lock":
        assert (shared.value if name == "value" else int(shared[1])) == 5
    with pytest.raises(WorkerStartError, match=r"context='fork'"):
        asked(shared, question, **SERVED)
