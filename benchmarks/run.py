"""Run every benchmark, one after the other: what ``make bench`` calls.

Options are those of the single scripts (``--quick``, ``--all``, ``--rounds``) and go to
each of them. The exit status is that of the first one that fails.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

NAMES = (
    "overhead",
    "latency",
    "blocking",
    "service",
    "heartbeat",
    "request_cost",
    "crowd",
    "epochs",
    "autotune",
    "plants",
    "transport",
    "cpu",
    "skew",
    "startup",
    "memory",
    "fork_threads",
    "tar",
    "objects",
    "sql",
    "parquet",
    "bounded",
    "resume",
    "shuffle",
    "device",
)


def main() -> int:
    """Run the scripts in turn; return the first bad exit status, or 0."""
    here = Path(__file__).parent
    started = time.perf_counter()
    for name in NAMES:
        command = [sys.executable, str(here / f"{name}.py"), *sys.argv[1:]]
        if status := subprocess.call(command):
            return status
    minutes = (time.perf_counter() - started) / 60
    print(f"\nall in {minutes:.1f} minutes; figures in {here / 'results'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
