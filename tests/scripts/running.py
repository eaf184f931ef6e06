"""Run a script twice: as it is, and with its import of ``DataLoader`` replaced."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from faulty import await_gone, session

CASES = Path(__file__).parent / "cases"
THEIRS = "from torch.utils.data import DataLoader\n"
OURS = "from aioloader import DataLoader\n"
# One line, so that all other lines keep their numbers.
OURS_BY_WORKER = (
    "import functools, aioloader; "
    'DataLoader = functools.partial(aioloader.DataLoader, rng="worker")\n'
)
SECONDS = 120
# Programs that run scripts; the path of the script is appended.
PYTHON = (sys.executable,)
COVERAGE = (sys.executable, "-m", "coverage")
KERNEL = (sys.executable, str(Path(__file__).with_name("kernel.py")))
CELLS = (sys.executable, str(Path(__file__).with_name("cells.py")))
TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run"),
    *("--standalone", "--nproc-per-node=2"),
)


@dataclass(frozen=True)
class Ended:
    """How a script ended.

    Attributes:
        status: The exit status.
        output: What it printed.
        errors: What it printed to standard error.
        left: Processes of its session that still ran 20 seconds later.
        folder: Its working directory.
    """

    status: int
    output: str
    errors: str
    left: list[int]
    folder: Path

    @property
    def seen(self) -> tuple[int, str, int, list[int]]:
        """Return what both runs must share; of errors, the number of tracebacks."""
        tracebacks = self.errors.count("Traceback (most recent call last)")
        return self.status, self.output, tracebacks, self.left


def begin(
    case: str,
    line: str,
    folder: Path,
    run: tuple[str, ...],
    *arguments: str,
    **environment: str,
) -> "subprocess.Popen[str]":
    """Start a script in a session of its own.

    Args:
        case: The name of the script.
        line: The line that imports the loader.
        folder: The working directory.
        run: The program that runs it.
        arguments: Arguments of the script.
        environment: Additional environment variables.
    """
    source = (CASES / f"{case}.py").read_text(encoding="utf-8")
    assert source.count(THEIRS) == 1
    folder.mkdir()
    script = folder / f"{case}.py"
    script.write_text(source.replace(THEIRS, line), encoding="utf-8")
    return start(script, run, *arguments, **environment)


def start(
    script: Path, run: tuple[str, ...], *arguments: str, **environment: str
) -> "subprocess.Popen[str]":
    """Start a file in its folder, in a session of its own."""
    return subprocess.Popen(
        [*run, str(script), *arguments],
        cwd=script.parent,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(process: "subprocess.Popen[str]", folder: Path) -> Ended:
    """Wait until a script has ended; list and kill processes that it left."""
    try:
        output, errors = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)
        output, errors = process.communicate()
        errors += f"\nhung for {SECONDS} s"
    left = await_gone(session(process.pid))
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return Ended(process.returncode, output, errors, left, folder)


def run_both(
    case: str,
    folder: Path,
    line: str = OURS,
    run: tuple[str, ...] = PYTHON,
    arguments: tuple[str, ...] = (),
) -> tuple[Ended, Ended]:
    """Run a script with torch's loader and with ours, at the same time."""
    started = [
        (begin(case, import_line, folder / name, run, *arguments), folder / name)
        for name, import_line in (("theirs", THEIRS), ("ours", line))
    ]
    theirs, ours = (end(*process) for process in started)
    return theirs, ours
