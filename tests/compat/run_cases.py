"""Run all cases of one package with one engine, and write the records as JSON.

``python -m compat.run_cases PACKAGE ENGINE FOLDER``, in one process or in two, with
the rank in the environment.
"""

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import aioloader
from compat.kit import Kit, plain, quiet, seed


def children() -> list[str]:
    """Return the command lines of this process's children, without helpers."""
    commands = []
    for task in Path("/proc/self/task").iterdir():
        pids: list[str] = []
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended
            pids = (task / "children").read_text().split()
        for pid in pids:
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
            except FileNotFoundError:
                continue
            # multiprocessing's helper stays until its parent ends, with both loaders
            if b"resource_tracker" not in command:
                commands.append(command.decode() or "ended, not waited for")
    return commands


def left_behind(before: list[str]) -> int:
    """Return how many more children there are, after waiting for their end."""
    gc.collect()
    # It reaps children that have ended, as each start of a process does.
    multiprocessing.active_children()
    deadline = time.monotonic() + 10
    while len(children()) > len(before) and time.monotonic() < deadline:
        time.sleep(0.02)
        multiprocessing.active_children()
    return max(0, len(children()) - len(before))


def run(package: str, kit: Kit) -> dict[str, Any]:
    """Return the result of each case, or its traceback."""
    module = importlib.import_module(f"compat.cases.{package}")
    records: dict[str, Any] = {}
    for name, (function, arguments) in module.cases.all.items():
        if name.startswith("pair_") and kit.world == 1:
            continue
        seed()
        before = children()
        start = time.monotonic()
        record: dict[str, Any] = {}
        try:
            with quiet():
                record["gave"] = plain(function(kit, **arguments))
        except BaseException:
            record["raised"] = traceback.format_exc()
        record["left"] = left_behind(before)
        record["seconds"] = time.monotonic() - start
        records[name] = record
        if "raised" in record and kit.world > 1:
            break  # the other process waits for this one
    return records


def main() -> None:
    package, engine, folder = sys.argv[1:]
    rank = int(os.environ.get("RANK", "0"))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    place = Path(folder) / engine
    place.mkdir(parents=True, exist_ok=True)
    if engine == "ours":
        aioloader.warm_up()
    records = run(package, Kit(engine, rank, world, place))
    out = Path(folder) / f"{engine}-{rank}.json"
    out.write_text(json.dumps(records))


if __name__ == "__main__":
    main()
