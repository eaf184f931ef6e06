"""Programs without a main guard, and one-liners, can use workers."""

import textwrap
from pathlib import Path

import pytest

from python_process import python

SCRIPT = """
import dataclasses
import torch
from aioloader import DataLoader

factor = 3

@dataclasses.dataclass
class Batch:
    x: torch.Tensor


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return helper(index)

def helper(index):
    return index * index


def make():
    class Local(Squares):
        def __getitem__(self, index):
            return super().__getitem__(index) + 1
    return Local()

def collate(samples):
    return Batch(torch.tensor(samples))


for epoch in range(2):
    loader = DataLoader(
        make(), 4, num_workers=2, transform=lambda x: factor * x, collate_fn=collate
    )
    batches = list(loader)
    assert all(isinstance(batch, Batch) for batch in batches), batches
    assert [b.x.tolist() for b in batches] == [[3, 6, 15, 30], [51, 78]], batches
print("done")
"""
TASK = """
import asyncio
from aioloader import DataLoader

async def main():
    return [b.tolist() async for b in DataLoader([1, 2, 3], 2, num_workers=2)]

assert asyncio.run(main()) == [[1, 2], [3]]
print("done")
"""
ERROR = """
from aioloader import DataLoader

class MineError(Exception):
    def __init__(self, a, b):
        super().__init__(a + b)

class Bad(list):
    def __getitem__(self, index):
        raise MineError(1, 2)

try:
    list(DataLoader(Bad([1]), num_workers=1))
except MineError as error:
    assert "Caught MineError in DataLoader worker process 0." in error.__notes__[-1]
    print("done")
"""
DROPPED = """
from aioloader import DataLoader

loader = DataLoader(list(range(100)), num_workers=2, persistent_workers=True)
iterator = iter(loader)
next(iterator)
print("done")
"""


def run(*arguments: str, cwd: Path) -> str:
    """Return what a program prints; it must succeed, without any warning."""
    done = python(*arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [SCRIPT, TASK, ERROR, DROPPED],
    ids=["script", "task", "error", "dropped"],
)
def test_one_liners_can_use_workers(program: str, tmp_path: Path) -> None:
    """``python -c``: lambdas, local classes, classes of ``__main__``, no guard."""
    assert run("-c", textwrap.dedent(program), cwd=tmp_path) == "done\n"


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["-W", "error"]], ids=str)
def test_scripts_need_no_main_guard(flags: list[str], tmp_path: Path) -> None:
    """Beside a module of its own; silently to the end."""
    (tmp_path / "beside_it.py").write_text("OFFSET = 10\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import beside_it\n"
        "from aioloader import DataLoader\n"
        "def shift(x):\n    return x + beside_it.OFFSET\n"
        "for epoch in range(2):\n"
        "    loader = DataLoader([1, 2], num_workers=2, transform=shift)\n"
        "    assert [b.item() for b in loader] == [11, 12]\n"
        "print('done')\n"
    )
    assert run(*flags, str(script), cwd=tmp_path) == "done\n"
