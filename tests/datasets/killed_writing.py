"""Writers that are killed before every operation, each in a separate process.

The script's first argument says whether processes are killed or write to the end; the
second is a list of jobs as JSON: format, destination, and the number of the operation
before which the process dies. Children are forked, so that imports happen once. The
operations of shards are those of their sinks; of files of tokens, those of the system.
"""

import asyncio
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from aioloader._cli import tokenize
from aioloader._cli.main import main as command
from aioloader.datasets import ParquetWriter, TarWriter, TokenWriter
from aioloader.datasets._write import sinks

SAMPLES = 23
OF_SHARDS = [
    (kind, name)
    for kind in (sinks.FolderSink, sinks.StoreSink)
    for name in ("open", "read", "put", "swap", "write", "complete")
]
OF_TOKENS = [(os, name) for name in ("fsync", "replace", "unlink")]
DOCUMENTS = [[*range(1, 1 + number)] for number in range(12)]
TEXTS = [f"document {number}" * number for number in range(12)]
LARGE_SAMPLES, LARGE_BYTES = 6, 5 << 20
SIGKILLED = -signal.SIGKILL
Job = tuple[str, str, int]


def run(mode: str, jobs: Sequence[Job]) -> list[int]:
    """Run this script; return the exit codes of its jobs."""
    command = [sys.executable, __file__, mode, json.dumps(jobs)]
    done = subprocess.run(command, capture_output=True, check=True, timeout=100)
    codes: list[int] = json.loads(done.stdout)
    return codes


def samples(destination: str) -> list[dict[str, Any]]:
    """Return the samples to write: for stores large ones, uploaded in parts."""
    if "://" in destination:
        return [
            {"txt": f"{number}", "bin": bytes([number]) * LARGE_BYTES}
            for number in range(LARGE_SAMPLES)
        ]
    return [{"txt": f"{n}", "bin": bytes([n]) * 700} for n in range(SAMPLES)]


def letters(texts: list[str]) -> list[Any]:
    """Tokenize texts by letters."""
    return [np.array([*map(ord, text)], np.int64) for text in texts]


def write_tokens(kind: Any, destination: str) -> None:
    """Write a file of tokens that is saved often."""
    writer = partial(TokenWriter, save_bytes=40)
    path = f"{destination}/tokens.bin"
    if kind == "tokenize":
        vars(tokenize)["TokenWriter"] = partial(TokenWriter, save_bytes=500)
        source = Path(destination).with_name("texts.txt")
        how = ["--tokenizer", "killed_writing:letters", "--dtype", "uint16", "-q"]
        assert not command(["tokenize", str(source), path, *how, "--eos", "0"])
        return

    async def write_all() -> None:
        async with writer(path, "uint16", format=kind, eos=0) as opened:
            for document in DOCUMENTS[opened.next_sample :]:
                await opened.write(document)

    asyncio.run(write_all())


async def write(kind: str, destination: str) -> None:
    options: Any = {"shard_samples": 2 if "://" in destination else 6}
    writer: Any
    if kind == "tar":
        writer = TarWriter(destination, **options)
    else:
        writer = ParquetWriter(destination, row_group_bytes=1500, **options)
    async with writer:
        for sample in samples(destination)[writer.next_sample :]:
            await writer.write(sample)


def die_before(number: int, operations: list[tuple[Any, str]]) -> None:
    done = 0

    def counted(function: Any) -> Any:
        def counting(*args: Any, **options: Any) -> Any:
            nonlocal done
            if done == number:
                signal.raise_signal(signal.SIGKILL)
            done += 1
            return function(*args, **options)

        return counting

    for owner, name in operations:
        setattr(owner, name, counted(getattr(owner, name)))


def main() -> None:
    is_killed, jobs = sys.argv[1] == "kill", json.loads(sys.argv[2])
    importlib.import_module("pyarrow.parquet")
    gc.freeze()
    ended = []
    for kind, destination, number in jobs:
        pid = os.fork()
        if not pid:
            is_of_tokens = kind not in {"tar", "parquet"}
            if is_killed:
                die_before(number, OF_TOKENS if is_of_tokens else OF_SHARDS)
            if is_of_tokens:
                write_tokens(kind, destination)
            else:
                asyncio.run(write(kind, destination))
            os._exit(0)
        ended.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    sys.stdout.write(json.dumps(ended))


if __name__ == "__main__":
    main()
