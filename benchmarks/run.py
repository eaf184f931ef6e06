"""Run every benchmark, one after the other, and write ``RESULTS.md``: ``make bench``.

Each script gets its number of rounds from ``ROUNDS``, so that all take about an hour;
other options (``--quick``, ``--all``, ``--rounds``) go to each of them. Those of
``BESIDE`` run with the Python that ``AIOLOADER_PEERS`` names, if it is set. A script
that fails does not stop the others; the exit status is that of the first one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROUNDS = {
    "overhead": 2,
    "latency": 2,
    "blocking": 3,
    "service": 3,
    "heartbeat": 3,
    "request_cost": 3,
    "crowd": 3,
    "epochs": 3,
    "autotune": 3,
    "observing": 3,
    "plants": 3,
    "transport": 2,
    "cpu": 2,
    "skew": 1,
    "startup": 1,
    "memory": 1,
    "fork_threads": 1,
    "tar": 2,
    "objects": 1,
    "streams": 5,
    "stream_steps": 5,
    "stream_tables": 5,
    "sql": 2,
    "parquet": 3,
    "bounded": 1,
    "resume": 2,
    "shuffle": 2,
    "shuffle_quality": 1,
    "peers": 2,
    "crossover": 3,
    "growth": 3,
    "device": 3,
}
BESIDE = {"parquet", "peers", "shuffle_quality"}
HERE = Path(__file__).parent


def command_of(name: str, options: list[str]) -> list[str] | None:
    """Return the command of a script, or None if its packages are not installed."""
    python = os.environ.get("AIOLOADER_PEERS") if name in BESIDE else sys.executable
    if not python:
        return None
    chosen = "--quick" in options or "--rounds" in options
    rounds = [] if chosen else ["--rounds", str(ROUNDS[name])]
    return [python, str(HERE / f"{name}.py"), *rounds, *options]


def run_all(options: list[str]) -> int:
    """Run the scripts in turn; return the first bad exit status, or 0."""
    failed: dict[str, int] = {}
    for name in ROUNDS:
        command = command_of(name, options)
        if command is None:
            print(
                f"\n{name}: left out, for AIOLOADER_PEERS names no Python", flush=True
            )
        elif status := subprocess.call(command):
            failed[name] = status
            print(f"\n{name}: FAILED with {status}", flush=True)
    if failed:
        print(f"\nfailed: {', '.join(failed)}")
    return next(iter(failed.values()), 0)


def main() -> int:
    options = sys.argv[1:]
    started = time.perf_counter()
    status = run_all(options)
    print(f"\nall in {(time.perf_counter() - started) / 60:.1f} minutes", flush=True)
    if "--quick" in options:
        return status
    page = [sys.executable, str(HERE / "results_page.py"), "--plots"]
    return subprocess.call(page) or status


if __name__ == "__main__":
    sys.exit(main())
