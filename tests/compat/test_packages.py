"""Each package's cases give the same results with torch's loader and with this one.

The cases are in ``cases/``; a process, or a pair of them, runs all those of a package.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from python_process import reserved_port

HERE = Path(__file__).parent
ALONE = sorted(path.stem for path in (HERE / "cases").glob("[a-z]*.py"))
PAIRS = ["hf_accelerate", "hf_trainer", "lightning_fabric", "lightning_trainer"]


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """Return the environment, with the variables of ``torchrun``."""
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if world > 1:
        variables |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "compat",
        }
    return variables


class StuckError(AssertionError):
    """The processes of an engine did not end."""


class Engine:
    """The processes that run a package's cases with one engine."""

    def __init__(
        self, name: str, package: str, world: int, port: int, folder: Path
    ) -> None:
        folder.mkdir()
        self.name, self.folder = name, folder
        self.processes = []
        for rank in range(world):
            with (folder / f"{name}-{rank}.log").open("wb") as log:
                module = ["-m", "compat.run_cases", package, name, str(folder)]
                process = subprocess.Popen(
                    [sys.executable, *module],
                    env=environment(rank, world, port),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self.processes.append(process)

    def records(self) -> list[Any]:
        """Wait for all processes, and return their records."""
        deadline = time.monotonic() + 200
        for process in self.processes:
            try:
                process.wait(max(0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.stop()
                raise StuckError(f"{self.name} did not end:\n{self.logs()}") from None
        records = []
        for rank in range(len(self.processes)):
            out = self.folder / f"{self.name}-{rank}.json"
            assert out.exists(), (
                f"{self.name}, rank {rank} wrote nothing:\n{self.logs()}"
            )
            records.append(json.loads(out.read_text()))
        return records

    def stop(self) -> None:
        """End running processes; faulthandler writes their stacks to the log."""
        running = [process for process in self.processes if process.poll() is None]
        for process in running:
            process.send_signal(signal.SIGABRT)
        for process in running:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            with contextlib.suppress(ProcessLookupError):  # its workers
                os.killpg(process.pid, signal.SIGKILL)

    def logs(self) -> str:
        """Return the end of each process's log."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{log.name}:\n{log.read_text()[-6000:]}" for log in logs)


def records(package: str, world: int, folder: Path) -> dict[str, list[Any]]:
    """Run the package's cases with both engines, and return each rank's records.

    Torch's loader forks a process with threads of gloo and of the package, so a child
    may inherit a locked lock. Torch's run is only the reference: if it hangs, it is
    repeated once. Ours is not.
    """
    with contextlib.ExitStack() as stack:

        def start(name: str, attempt: int) -> Engine:
            port = stack.enter_context(reserved_port())
            engine = Engine(name, package, world, port, folder / f"{name}-{attempt}")
            stack.callback(engine.stop)
            return engine

        torch, ours = start("torch", 1), start("ours", 1)
        tested = ours.records()
        try:
            reference = torch.records()
        except StuckError as stuck:
            sys.stderr.write(f"{stuck}\n")
            reference = start("torch", 2).records()
        return {"torch": reference, "ours": tested}


def compare(package: str, world: int, folder: Path) -> None:
    """Fail if a case's results differ between torch's loader and ours."""
    both = records(package, world, folder)
    wrong = []
    for rank, (theirs, ours) in enumerate(zip(*both.values(), strict=True)):
        assert theirs, "there are no cases"
        for name in theirs | ours:
            reference, tested = theirs.get(name, {}), ours.get(name, {})
            raised = reference.get("raised") or tested.get("raised")
            if raised:
                engine = "torch's" if reference.get("raised") else "ours"
                wrong.append(f"{name} (rank {rank}) raised with {engine}:\n{raised}")
            elif reference.get("gave") != tested.get("gave"):
                gave = f"torch: {reference.get('gave')}\n ours: {tested.get('gave')}"
                wrong.append(f"{name} (rank {rank}) differs:\n{gave}")
            if tested.get("left", 0) > reference.get("left", 0):
                wrong.append(f"{name} (rank {rank}) left {tested['left']} processes")
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.parametrize("package", ALONE)
def test_cases_agree_in_one_process(package: str, tmp_path: Path) -> None:
    """In one process for each engine."""
    compare(package, 1, tmp_path)


@pytest.mark.parametrize("package", PAIRS)
def test_cases_agree_in_two_processes(package: str, tmp_path: Path) -> None:
    """In a pair of processes (gloo) for each engine."""
    compare(package, 2, tmp_path)
