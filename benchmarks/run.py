"""Run every benchmark, one after the other, and write ``RESULTS.md``: ``make bench``.

Each script gets its number of rounds from ``ROUNDS``, so that all take some 2.5 hours;
those of the README's table get five. Other options (``--quick``, ``--all``,
``--rounds``) go to each of them. Those of ``PYTHONS`` run in an environment of their
own, if its Python is named there. A script that fails does not stop the others; the
exit status is that of the first one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROUNDS = {
    "overhead": 5,
    "latency": 5,
    "blocking": 2,
    "service": 2,
    "heartbeat": 2,
    "request_cost": 2,
    "crowd": 2,
    "epochs": 2,
    "autotune": 2,
    "observing": 2,
    "plants": 10,
    "transport": 5,
    "cpu": 1,
    "folder": 5,
    "skew": 1,
    "startup": 1,
    "memory": 1,
    "fork_threads": 1,
    "tar": 1,
    "objects": 1,
    "indexed": 5,
    "streams": 3,
    "stream_steps": 3,
    "stream_tables": 3,
    "pretraining": 3,
    "sql": 2,
    "parquet": 2,
    "bounded": 1,
    "resume": 1,
    "shuffle": 1,
    "shuffle_quality": 1,
    "peers": 1,
    "crossover": 1,
    "growth": 1,
    "device": 1,
    "dlio/run": 3,
}
PYTHONS = {
    "indexed": "AIOLOADER_PEERS",
    "parquet": "AIOLOADER_PEERS",
    "peers": "AIOLOADER_PEERS",
    "shuffle_quality": "AIOLOADER_PEERS",
    "dlio/run": "AIOLOADER_DLIO",
}  # a script, and the variable of the environment that names its Python
HERE = Path(__file__).parent


def command_of(name: str, options: list[str]) -> list[str] | None:
    """Return the command of a script, or None if its packages are not installed."""
    python = os.environ.get(PYTHONS[name]) if name in PYTHONS else sys.executable
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
            print(f"\n{name}: left out: {PYTHONS[name]} names no Python", flush=True)
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
