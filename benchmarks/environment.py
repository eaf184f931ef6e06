"""What a result depends on: hardware, versions, commit, date and command."""

from __future__ import annotations

import compileall
import datetime
import importlib.metadata
import importlib.util
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

_PACKAGES = (
    "torch",
    "numpy",
    "obstore",
    "spdl",
    "uvloop",
    "urllib3",
    "anyio",
    "pillow",
    "opencv-python-headless",
    "webdataset",
    "pyarrow",
    "adbc-driver-manager",
    "asyncpg",
    "psycopg",
    "torchdata",
    "litdata",
    "mosaicml-streaming",
    "grain",
    "ray",
    "tensorflow-cpu",
)


def compile_package() -> None:
    """Compile aioloader's modules, as pip does with those of peers when it installs.

    A checkout has no bytecode where ``PYTHONDONTWRITEBYTECODE`` is set: every fresh
    process would compile for 50 ms.
    """
    spec = importlib.util.find_spec("aioloader")
    for folder in (spec and spec.submodule_search_locations) or ():
        compileall.compile_dir(folder, quiet=1)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", *words],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor()


def _gpu() -> str | None:
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def _scheduling() -> str:
    """Name the priority that ``nice`` or ``chrt`` may have set."""
    names = {os.SCHED_FIFO: "FIFO", os.SCHED_RR: "RR"}
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    normal = f"nice {nice}" if nice else "normal"
    return names.get(os.sched_getscheduler(0), normal)


def describe() -> dict[str, object]:
    """Describe this machine, these packages and this run."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(
            ["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]
        ),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "gpu": _gpu(),
        "cores": os.cpu_count(),
        "memory_gib": round(
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        ),
        "scheduling": _scheduling(),
        "load_average": os.getloadavg(),
        "aioloader": _version("aioloader"),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted": bool(_git("status", "--porcelain", "--", "../src")),
        "packages": {package: _version(package) for package in _PACKAGES},
    }
