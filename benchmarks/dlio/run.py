"""What does DLIO report for this loader, compared with torch's?

DLIO, the engine of MLPerf Storage, trains on a simulated accelerator (a step sleeps)
and reports its utilisation, AU: the share of the time after the first step in which it
computes. Each cell is a workload, a cold or a warm page cache, and a number of ranks;
the loaders take turns in it, with the same readers, files and order.
``make dlio`` makes the environment for this script.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import itertools
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from environment import describe  # noqa: E402
from harness import RESULTS, Figures, Metric, Rounds, medians, render, show  # noqa: E402
from meter import MachineMeter  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

BATCH = {"unet3d": 7, "resnet50": 400, "cosmoflow": 1}
FILES = {"unet3d": 84, "resnet50": 6, "cosmoflow": 1000}  # for each rank
QUICK_FILES = {"unet3d": 21, "resnet50": 1, "cosmoflow": 100}
SAMPLES_PER_FILE = {"unet3d": 1, "resnet50": 1251, "cosmoflow": 1}
CACHES = ("cold", "warm")
RANKS = (1, 4)
LOADERS = {
    "torch": None,
    "aioloader": "loaders.DropIn",
    "aioloader threads": "loaders.Threads",
}
METRICS = (
    Metric("au", "AU %", ".2f"),
    Metric("samples", "samples/s", ",.0f"),
    Metric("wait_ms", "wait per step, ms", ".3f", higher=False),
)
PACKAGES = ("dlio_benchmark", "mpi4py", "mpich", "hydra-core")


@dataclass(frozen=True)
class Cell:
    """One cell of the table."""

    workload: str
    cache: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.workload}, {self.cache}, {self.ranks} rank" + "s" * (
            self.ranks > 1
        )


@dataclass(frozen=True)
class Bench:
    """How the cells are run, and where their files are."""

    folder: Path
    files: dict[str, int]
    under: list[str]

    def dlio(self, ranks: int, workload: str, *overrides: str) -> Path:
        """Run DLIO; return the folder of its reports.

        Raises:
            SystemExit: If it fails; with the end of what it printed.
        """
        reports = Path(tempfile.mkdtemp(prefix="reports-", dir=self.folder))
        command = [
            *(str(Path(sys.executable).parent / "mpiexec"), "-n", str(ranks)),
            *(*self.under, sys.executable, str(HERE / "rank.py")),
            *("--config-dir", str(HERE / "configs"), f"workload={workload}_tenth"),
            *(f"hydra.run.dir={reports}", "hydra.output_subdir=null"),
            f"++workload.dataset.data_folder={self.folder / workload}",
            *(f"++workload.{override}" for override in overrides),
        ]
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"DFTRACER_ENABLE": "0"},
            timeout=600,
            check=False,
        )
        if done.returncode or "Traceback" in done.stdout:
            raise SystemExit(f"{shlex.join(command)}\n{done.stdout[-4000:]}")
        return reports

    def generate(self, workload: str) -> None:
        """Make DLIO write the files, unless they exist."""
        ready = self.folder / workload / f"{self.files[workload] * max(RANKS)}.ready"
        if not ready.exists():
            show(f"files of {workload}")
            reports = self.dlio(
                os.cpu_count() or 1,
                workload,
                "workflow.generate_data=True",
                "workflow.train=False",
                f"dataset.num_files_train={self.files[workload] * max(RANKS)}",
            )
            shutil.rmtree(reports)
            os.sync()  # only clean pages can be dropped
            ready.touch()

    def turn(self, cell: Cell) -> dict[str, Figures]:
        """Run one cell with each loader."""
        return {name: self.run(cell, name) for name in LOADERS}

    def run(self, cell: Cell, loader: str) -> Figures:
        """Run one cell with one loader, for one epoch."""
        for path in (self.folder / cell.workload / "train").iterdir():
            settle(path, is_cold=cell.cache == "cold")
        overrides = [
            "workflow.train=True",
            f"dataset.num_files_train={self.files[cell.workload] * cell.ranks}",
        ]
        if name := LOADERS[loader]:
            overrides += [
                f"reader.data_loader_classname={name}",
                "reader.data_loader_sampler=index",
            ]
        machine = MachineMeter()
        reports = self.dlio(cell.ranks, cell.workload, *overrides)
        others = machine.others()
        samples = self.files[cell.workload] * SAMPLES_PER_FILE[cell.workload]
        waits = waits_of(reports, cell, steps=samples // BATCH[cell.workload])
        metric = json.loads((reports / "summary.json").read_text())["metric"]
        shutil.rmtree(reports)
        return {
            "au": metric["train_au_mean_percentage"],
            "samples": metric["train_throughput_mean_samples_per_second"],
            "wait_ms": 1e3 * statistics.mean(waits),
            "others": others,
        }


def settle(path: Path, *, is_cold: bool) -> None:
    """Drop a file from the page cache, or read it into it."""
    with path.open("rb", buffering=0) as file:
        if is_cold:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        else:
            while file.read(1 << 22):
                pass


def waits_of(reports: Path, cell: Cell, steps: int) -> list[float]:
    """Return the seconds that steps waited for data; not the first, as in AU.

    Raises:
        SystemExit: If a rank took fewer steps than there are: DLIO does not notice.
    """
    waits = []
    for rank in range(cell.ranks):
        report = json.loads((reports / f"{rank}_output.json").read_text())
        found = report["1"]["load"]["block1"]
        if len(found) != steps:
            raise SystemExit(f"{cell}: rank {rank} took {len(found)} of {steps} steps")
        waits += found[1:]
    return waits


def judge(rounds: Rounds, cells: list[Cell]) -> list[dict[str, object]]:
    """Compare AU with torch's: at most a point below, and above in most cells."""
    found: list[dict[str, object]] = []
    for ours in list(LOADERS)[1:]:
        gains = {}
        for cell in cells:
            pairs = zip(
                rounds[f"{cell}: {ours}"], rounds[f"{cell}: torch"], strict=True
            )
            gains[cell] = statistics.median(a["au"] - b["au"] for a, b in pairs)
        worst = min(gains, key=lambda cell: gains[cell])
        above = sum(gain > 0 for gain in gains.values())
        found += [
            {
                "text": f"{ours} is {gains[worst]:+.2f} points from torch in AU at "
                f"worst ({worst}), promised -1 at least",
                "measured": gains[worst],
                "met": gains[worst] >= -1,
            },
            {
                "text": f"{ours} is above torch in {above} of {len(cells)} cells, "
                "promised most",
                "measured": above,
                "met": above > len(cells) / 2,
            },
        ]
    return found


def table(rounds: Rounds, cells: list[Cell]) -> str:
    """Format one line per cell: AU, and the wait per step, of each loader."""
    head = ["dlio", *(f"{name}: AU %" for name in LOADERS)]
    lines = [head + [f"{name}: wait, ms" for name in LOADERS]]
    for cell in cells:
        middles = [medians(rounds[f"{cell}: {name}"]) for name in LOADERS]
        line = [str(cell), *(f"{one['au']:.2f}" for one in middles)]
        lines.append(line + [f"{one['wait_ms']:.3f}" for one in middles])
    return render(lines)


def report(rounds: Rounds, cells: list[Cell], seconds: float) -> dict[str, object]:
    """Print the table and the promises; return the contents of the JSON file."""
    text = (__doc__ or "").splitlines()[0]
    print(f"\n{text}\n\n{table(rounds, cells)}")
    others = [f["others"] for figures in rounds.values() for f in figures]
    print(f"other processes used {statistics.median(others):.2f} cores meanwhile")
    found = judge(rounds, cells)
    for verdict in found:
        print(f"{'met' if verdict['met'] else 'MISSED'}: {verdict['text']}")
    environment = describe()
    command = shlex.join(["python", "benchmarks/dlio/run.py", *sys.argv[1:]])
    packages = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {
        "question": "dlio",
        "text": text,
        "environment": environment | {"command": command, "peers": packages},
        "seconds": seconds,
        "metrics": [asdict(metric) for metric in METRICS],
        "targets": found,
        "medians": {name: medians(figures) for name, figures in rounds.items()},
        "rounds": rounds,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, help="default 5")
    parser.add_argument("--quick", action="store_true", help="one small round")
    parser.add_argument("--all", action="store_true", help="no more than without")
    parser.add_argument("--only", choices=FILES, help="one workload; keeps no results")
    parser.add_argument("--data", type=Path, help="folder that keeps the files")
    parser.add_argument(
        "--under", default="", help="put before each rank, as 'nice -n -10'"
    )
    args = parser.parse_args()
    args.rounds = args.rounds or (1 if args.quick else 5)
    return args


@contextlib.contextmanager
def folder_of(args: argparse.Namespace) -> Iterator[Path]:
    """Return the folder for files and reports: the given one, or one for this run."""
    if args.data:
        args.data.mkdir(parents=True, exist_ok=True)
        yield args.data.resolve()
    else:
        with tempfile.TemporaryDirectory(prefix="dlio-") as name:
            yield Path(name)


def main() -> None:
    """Run all cells, round after round."""
    args = parse()
    workloads = [args.only] if args.only else list(FILES)
    cells = [Cell(*one) for one in itertools.product(workloads, CACHES, RANKS)]
    rounds: Rounds = {f"{cell}: {name}": [] for cell in cells for name in LOADERS}
    started = time.perf_counter()
    with folder_of(args) as folder:
        files = QUICK_FILES if args.quick else FILES
        bench = Bench(folder, files, shlex.split(args.under))
        for workload in workloads:
            bench.generate(workload)
        for number, cell in itertools.product(range(args.rounds), cells):
            show(f"round {number + 1}: {cell}")
            for name, figures in bench.turn(cell).items():
                rounds[f"{cell}: {name}"].append(figures)
    show("")
    kept = report(rounds, cells, time.perf_counter() - started)
    if not args.quick and not args.only:
        (RESULTS / "dlio.json").write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
