"""Whole scripts: output, exit status and processes left are those of torch's loader.

Only the line that imports ``DataLoader`` differs. Random numbers of workers are
compared bit for bit, with ``rng="worker"``.
"""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from scripts.running import (
    CASES,
    CELLS,
    COVERAGE,
    KERNEL,
    OURS,
    OURS_BY_WORKER,
    PYTHON,
    THEIRS,
    TORCHRUN,
    Ended,
    begin,
    end,
    run_both,
)
from unit.test_platforms import removal

pytestmark = pytest.mark.slow

# Scripts that draw random numbers in workers.
AUGMENTED = {"mnist_like", "notebook", "seeding"}
RUN = {"notebook": CELLS, "torchrun_ddp": TORCHRUN}
ARGUMENTS = {
    "command_line": (
        *("--size", "30", "--scale", "0.5", "--workers", "2"),
        *("--epochs", "2", "--drop-last"),
    )
}
# These have a test of their own.
SPECIAL = {"covered", "crashing", "interrupted", "pool_in_worker"}
PLAIN = sorted({path.stem for path in CASES.glob("*.py")} - SPECIAL)


def line_of(case: str) -> str:
    """Return the line that imports our loader into a script."""
    return OURS_BY_WORKER if case in AUGMENTED else OURS


@pytest.mark.parametrize("case", PLAIN)
def test_a_script_behaves_as_with_torchs_loader(case: str, tmp_path: Path) -> None:
    """Its output, exit status, number of tracebacks and processes left."""
    theirs, ours = run_both(
        case, tmp_path, line_of(case), RUN.get(case, PYTHON), ARGUMENTS.get(case, ())
    )
    assert theirs.output, theirs.errors
    assert ours.seen == theirs.seen, ours.errors


@pytest.mark.parametrize(
    ("system", "case"),
    [
        *(("windows", case) for case in ("failing", "sampling", "seeding", "streams")),
        *(("macos", case) for case in ("command_line", "curriculum", "mnist_like")),
        *(("macos", case) for case in ("notebook", "tokens", "torchrun_ddp")),
    ],
)
def test_a_script_on_another_system_behaves_as_with_torchs(
    system: str, case: str, tmp_path: Path
) -> None:
    """Our loader lacks the names that the system lacks; torch's does not."""
    (tmp_path / "sitecustomize.py").write_text(removal(system), encoding="utf-8")
    run, arguments = RUN.get(case, PYTHON), ARGUMENTS.get(case, ())
    theirs, ours = (
        end(begin(case, line, tmp_path / name, run, *arguments, **path), tmp_path)
        for name, line, path in (
            ("theirs", THEIRS, {}),
            ("ours", line_of(case), {"PYTHONPATH": str(tmp_path)}),
        )
    )
    assert theirs.output, theirs.errors
    assert ours.seen == theirs.seen, ours.errors


def test_a_notebook_behaves_as_with_torchs_loader(tmp_path: Path) -> None:
    """In a real kernel, which has threads, sockets and a running loop."""
    theirs, ours = run_both("notebook", tmp_path, OURS_BY_WORKER, KERNEL)
    assert "one batch: [" in theirs.output, theirs.errors
    assert ours.seen == theirs.seen, ours.errors


def test_a_worker_may_have_a_pool_of_processes(tmp_path: Path) -> None:
    """A deliberate difference: torch's workers may not have children."""
    theirs, ours = run_both("pool_in_worker", tmp_path)
    threads = "[tensor([285]), tensor([2470])]\n"
    refused = "refused: AssertionError: daemonic processes are not allowed"
    assert theirs.output == f"{threads}{refused} to have children\n"
    assert ours.output == threads * 2
    assert (ours.status, ours.left) == (0, []), ours.errors


def test_a_crash_in_native_code_raises_torchs_error(tmp_path: Path) -> None:
    """Scripts look for its class and its message."""
    # Torch raises in a signal handler, sometimes where the script catches nothing.
    for attempt in range(3):
        (tmp_path / str(attempt)).mkdir()
        theirs, ours = run_both("crashing", tmp_path / str(attempt))
        if theirs.output:
            break
    assert theirs.output == "RuntimeError True\n", theirs.errors
    assert (ours.status, ours.output, ours.left) == (0, theirs.output, []), ours.errors


def test_ctrl_c_ends_a_script_as_with_torchs_loader(tmp_path: Path) -> None:
    """With the user's traceback only, the same exit status, and no process left."""
    runs: list[Ended] = []
    for line in (THEIRS, OURS):
        folder = tmp_path / str(len(runs))
        process = begin("interrupted", line, folder, PYTHON)
        assert process.stdout is not None
        for _ in range(5):
            assert process.stdout.readline() == "a batch\n"
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        runs.append(end(process, folder))
    theirs, ours = runs
    assert theirs.status == -signal.SIGINT
    for ended in runs:
        assert ended.seen[2] == 1, ended.errors
        assert ended.errors.rstrip().endswith("KeyboardInterrupt")
    assert ours.seen == theirs.seen
    noise = [line for line in ours.errors.splitlines() if "aioloader" in line.lower()]
    assert not [line for line in noise if not line.startswith("  File ")]


COVERAGE_SETTINGS = """
[run]
concurrency = multiprocessing, thread
parallel = true
include = covered.py
"""


def test_coverage_sees_lines_that_only_workers_run(tmp_path: Path) -> None:
    settings = tmp_path / "settings"
    settings.write_text(COVERAGE_SETTINGS)
    missing = {}
    for name, line in (("theirs", THEIRS), ("ours", OURS)):
        folder = tmp_path / name
        run = (*COVERAGE, "run", f"--rcfile={settings}")
        ended = end(begin("covered", line, folder, run), folder)
        assert (ended.status, ended.left) == (0, []), ended.errors
        for words in ("combine", "json"):
            command = [*COVERAGE, words, "-q", f"--rcfile={settings}"]
            subprocess.run(command, cwd=folder, check=True)
        report = json.loads((folder / "coverage.json").read_text())
        missing[name] = report["files"]["covered.py"]["missing_lines"]
    assert missing["ours"] == missing["theirs"] == [12]
