"""Each package's cases give the same with torch's loader and with this one.

The cases are in ``cases/``; a process, or a pair of them, runs all those of a package.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ALONE = sorted(path.stem for path in (HERE / "cases").glob("[a-z]*.py"))
PAIRS = ["hf_accelerate", "hf_trainer", "lightning_fabric", "lightning_trainer"]


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """Return what ``torchrun`` would set."""
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if world > 1:
        found |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "compat",
        }
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def records(package: str, world: int, folder: Path) -> dict[str, list[Any]]:
    """Run the package's cases with both engines, and return what each rank wrote."""
    started = []
    for engine in ("torch", "ours"):
        port = free_port()
        for rank in range(world):
            log = (folder / f"{engine}-{rank}.log").open("wb")
            module = ["-m", "compat.run_cases", package, engine, str(folder)]
            started.append(
                subprocess.Popen(
                    [sys.executable, *module],
                    env=environment(rank, world, port),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
            log.close()
    try:
        for process in started:
            process.wait(280)
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()
    found: dict[str, list[Any]] = {}
    for engine in ("torch", "ours"):
        found[engine] = []
        for rank in range(world):
            out = folder / f"{engine}-{rank}.json"
            log_text = (folder / f"{engine}-{rank}.log").read_text()[-4000:]
            assert out.exists(), f"{engine}, rank {rank} wrote nothing:\n{log_text}"
            found[engine].append(json.loads(out.read_text()))
    return found


def compare(package: str, world: int, folder: Path) -> None:
    """Fail where a case gave one thing with torch and another with ours."""
    found = records(package, world, folder)
    wrong = []
    for rank, (theirs, ours) in enumerate(zip(*found.values(), strict=True)):
        assert theirs, "there are no cases"
        for name in theirs | ours:
            one, other = theirs.get(name, {}), ours.get(name, {})
            raised = one.get("raised") or other.get("raised")
            if raised:
                who = "torch's" if one.get("raised") else "ours"
                wrong.append(f"{name} (rank {rank}) raised with {who}:\n{raised}")
            elif one.get("gave") != other.get("gave"):
                gave = f"torch: {one.get('gave')}\n ours: {other.get('gave')}"
                wrong.append(f"{name} (rank {rank}) differs:\n{gave}")
            if other.get("left", 0) > one.get("left", 0):
                wrong.append(f"{name} (rank {rank}) left {other['left']} processes")
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.parametrize("package", ALONE)
def test_in_one_process(package: str, tmp_path: Path) -> None:
    """All cases, in one process for each engine."""
    compare(package, 1, tmp_path)


@pytest.mark.parametrize("package", PAIRS)
def test_in_two_processes(package: str, tmp_path: Path) -> None:
    """All cases, in a pair of processes (gloo) for each engine."""
    compare(package, 2, tmp_path)
