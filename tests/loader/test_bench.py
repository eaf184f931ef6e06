"""``aioloader bench``: measurements, the comparison with torch, wrong arguments."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from aioloader import DataLoader
from aioloader._cli.bench import twin_of
from aioloader._cli.main import main
from lifespans import pass_on
from samples import SyncMap
from stateful import Plain

MODULE = """\
import os
import torch
import aioloader

class Numbers:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.tensor(index), {"name": str(index)}

class Speaking(Numbers):
    def __getitem__(self, index):
        os.write(1, b"reading\\n")
        return super().__getitem__(index)

class Awaited(Numbers):
    async def __getitem__(self, index):
        return torch.tensor(index)

loader = aioloader.DataLoader(Numbers(), 4, shuffle=True, num_workers=2)
empty = aioloader.DataLoader([])
torchs = torch.utils.data.DataLoader([1])

class Parts:
    inline = aioloader.DataLoader(Numbers(), 4)

def speaking():
    return aioloader.DataLoader(Speaking(), 4, num_workers=2)

def awaited():
    return aioloader.DataLoader(Awaited(), 4)

def failing():
    raise ValueError("no data here")

async def coroutine():
    return loader

class Broken(Numbers):
    def __getitem__(self, index):
        raise OSError("a bad disk")

broken = aioloader.DataLoader(Broken(), 4)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Write the user's module, and change to its directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("users_train.py").write_text(MODULE)
    yield "users_train"
    sys.modules.pop("users_train", None)


def bench(*arguments: str) -> "subprocess.Popen[str]":
    """Start the command in a process."""
    command = [sys.executable, "-m", "aioloader", "bench", *arguments]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, **pipes)


@pytest.mark.slow
def test_bench_prints_a_comparison_with_torch(module: str) -> None:
    """The output ends: no process keeps the pipe open."""
    process = bench(f"{module}:loader", "--rounds", "2", "--page", "page.html")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("users_train:loader: DataLoader(Numbers, batch_size=4")
    assert lines[2].split() == ["aioloader", "torch", "ratio"]
    titles = ["samples/s", "batches/s", "time to first batch", "wait share"]
    for title, line in zip(titles, lines[3:7], strict=True):
        assert line.startswith(title)
    samples, batches = (float(line.split()[1].replace(",", "")) for line in lines[3:5])
    assert samples == pytest.approx(4 * batches, rel=0.01)
    assert "A guess, measured over only 15 batches." in lines
    assert lines[-1] == "Page: page.html"
    assert "<h2>Timeline</h2>" in Path("page.html").read_text()


@pytest.mark.parametrize("step", [0, 2])
def test_steps_and_waits_add_up_to_the_time(
    step: int, module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The share of waiting is the time that the steps leave."""
    name = f"{module}:Parts.inline"
    assert main(["bench", name, "--rounds", "1", "--step", str(step)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rates, waits = lines[4].split()[1:3], lines[6].split()[2:4]
    for rate, wait in zip(rates, waits, strict=True):
        worked = float(rate.replace(",", "")) * step / 1000
        assert float(wait.rstrip("%")) / 100 == pytest.approx(1 - worked, abs=0.001)


@pytest.mark.slow
def test_an_interruption_leaves_no_process(module: str) -> None:
    process = bench(f"{module}:speaking", "--step", "60000")
    assert process.stdout is not None
    assert process.stdout.readline() == "reading\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.endswith("\ninterrupted\n")


def test_async_is_not_compared(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    """If the page cannot be written, the results are still printed."""
    Path("a").mkdir()
    few = ("--rounds", "1", "--batches", "8", "--page", "a")
    assert main(["bench", f"{module}:awaited", *few]) == 1
    out, err = capsys.readouterr()
    assert err.startswith("aioloader bench: error: [Errno")
    assert out.splitlines()[2].split() == ["aioloader"]
    assert re.search(r"Not compared .*: Awaited is read by coroutines, which", out)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("users_train", "name the loader like train:loader, got 'users_train'"),
        ("users_trein:loader", "there is no module 'users_trein' in "),
        ("users_train.data:loader", "there is no module 'users_train.data' in "),
        ("users_train:other", "module 'users_train' has no 'other'"),
        ("users_train:empty", "users_train:empty gives no batch; give it"),
        ("users_train:torchs", "is a DataLoader of torch, and no aioloader.DataLoader"),
        ("users_train:coroutine", "is a coroutine: make the loader in a plain func"),
        ("users_train:Numbers", "the result of users_train:Numbers() is a Numbers of"),
    ],
)
def test_a_wrong_loader_name_is_explained(
    name: str, said: str, module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["bench", name])
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("failing", "users_train:failing() raised ValueError: no data here"),
        ("broken", "users_train:broken raised OSError: a bad disk"),
    ],
)
def test_an_error_of_user_code_has_its_traceback(
    name: str, said: str, module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last line names the function."""
    assert main(["bench", f"{module}:{name}"]) == 1
    err = capsys.readouterr().err
    assert err.endswith(f"aioloader bench: error: {said}\n")
    assert "Traceback" in err
    assert "users_train.py" in err


def test_a_failing_import_in_the_module_is_named(
    module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("users_train.py").write_text("import nowhere_to_be_found")
    assert main(["bench", f"{module}:loader"]) == 1
    said = "raised ModuleNotFoundError: No module named 'nowhere_to_be_found'"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [["--step", "-1"], ["--seconds", "inf"], ["--batches", "0"], ["--page", "no/x"]],
)
def test_wrong_arguments_exit_with_status_2(wrong: list[str], module: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["bench", f"{module}:loader", *wrong])
    assert exit_.value.code == 2


def twin(**arguments: Any) -> tuple[Any, list[str]]:
    """Return the batches of torch's loader, and the notes."""
    made, notes = twin_of(DataLoader(arguments.pop("dataset", range(10)), **arguments))
    assert type(made) is torch.utils.data.DataLoader
    return [batch.tolist() for batch in made], notes


def test_torchs_twin_delivers_the_same_batches() -> None:
    batches = [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert twin(batch_size=4, drop_last=True) == (batches, [])
    sampler = [[1, 2], [3]]
    assert twin(batch_sampler=sampler, timeout=3, num_workers=1) == (sampler, [])
    assert twin(dataset=torch.arange(9), batch_size=None, sampler=[5])[0] == [5]
    generator = torch.Generator().manual_seed(7)
    loader = DataLoader(range(10), 5, shuffle=True, generator=generator)
    ours = [batch.tolist() for batch in loader]
    generator.manual_seed(7)
    made, _ = twin_of(loader)
    assert made is not None
    assert [batch.tolist() for batch in made] == ours


class Signing(SyncMap):
    """Creates a file for each process that reads."""

    def __init__(self, folder: Path) -> None:
        super().__init__(8)
        self.folder = folder

    def __getitem__(self, index: int) -> Any:
        (self.folder / str(os.getpid())).touch()
        return super().__getitem__(index)


@pytest.mark.slow
@pytest.mark.parametrize(("persists", "processes"), [(True, 2), (False, 4)])
def test_torchs_workers_persist_if_ours_do(
    persists: bool, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No worker is left at the end."""
    users: Any = ModuleType("users_made")
    dataset = Signing(tmp_path)
    users.loader = DataLoader(dataset, num_workers=1, persistent_workers=persists)
    monkeypatch.setitem(sys.modules, "users_made", users)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["bench", "users_made:loader", "--rounds", "2"]) == 0
    assert len(list(tmp_path.iterdir())) == processes
    assert not multiprocessing.active_children()


def test_the_twin_is_torchs_even_if_its_class_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the loader would be compared with itself."""
    monkeypatch.setattr(torch.utils.data, "DataLoader", DataLoader)
    assert not isinstance(twin_of(DataLoader(range(10)))[0], DataLoader)


class Pairs:
    """Numbers that are read a batch at a time."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        raise NotImplementedError

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [10 * index for index in indices]


@pytest.mark.parametrize(
    ("dataset", "batches"),
    [
        (range(3), [[0, -1], [-2]]),
        (Pairs(), [[0, -10], [-20, -30]]),
        (Plain(3), [[0, -1], [-2]]),
    ],
)
def test_the_twin_transforms_in_its_collate_fn(dataset: Any, batches: Any) -> None:
    results, notes = twin(dataset=dataset, batch_size=2, transform=lambda x: -x)
    assert results == batches
    said = "transform; its collate_fn applies it to each sample."
    assert notes == [f"Not in torch's DataLoader: {said}"]


def test_notes_name_the_options_that_torch_lacks() -> None:
    threads: Any = {"num_workers": 1, "workers": "thread", "prefetch_factor": 3}
    notes = twin(batch_size=4, on_error="skip", timeout=9, **threads)[1]
    notes += twin(prefetch_factor=3)[1]
    assert notes == [
        f"Not in torch's DataLoader: {said}"
        for said in (
            "workers='thread'; its workers are processes.",
            "on_error='skip'; it ends with the first sample that fails.",
            "prefetch_factor=3; without workers it makes no batch ahead.",
        )
    ]


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (DataLoader([1], transform=pass_on), "transform is async, and torch cannot"),
        (DataLoader([1], collate_fn=pass_on), "collate_fn is async, and torch cannot"),
    ],
)
def test_async_functions_have_no_twin(loader: DataLoader[Any], reason: str) -> None:
    made, notes = twin_of(loader)
    assert made is None
    assert notes[0].startswith(f"Not compared with torch's DataLoader: {reason}")
