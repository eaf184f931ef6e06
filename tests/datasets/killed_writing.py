"""Writers that are killed, each in a process of its own: before every operation.

A script: the first argument says whether processes are killed or write to the end, the
second is a list of jobs as JSON: format, destination, and the number of the operation
before which the process dies. Children are forked, so that imports are paid for once.
"""

import asyncio
import gc
import importlib
import json
import os
import signal
import sys
from typing import Any

from aioloader.datasets import ParquetWriter, TarWriter
from aioloader.datasets._write import sinks

SAMPLES = 23
LARGE_SAMPLES, LARGE_BYTES = 6, 5 << 20


def samples(destination: str) -> list[dict[str, Any]]:
    """Return what is written: for stores large ones, which are uploaded in parts."""
    if "://" in destination:
        return [
            {"txt": f"{number}", "bin": bytes([number]) * LARGE_BYTES}
            for number in range(LARGE_SAMPLES)
        ]
    return [
        {"txt": f"{number}", "bin": bytes([number]) * 700} for number in range(SAMPLES)
    ]


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


def die_before(number: int) -> None:
    done = 0

    def counted(method: Any) -> Any:
        async def counting(*args: Any) -> Any:
            nonlocal done
            if done == number:
                os.kill(os.getpid(), signal.SIGKILL)
            done += 1
            return await method(*args)

        return counting

    for kind in (sinks.FolderSink, sinks.StoreSink):
        for name in ("open", "read", "put", "swap", "write", "complete"):
            setattr(kind, name, counted(getattr(kind, name)))


def main() -> None:
    is_killed, jobs = sys.argv[1] == "kill", json.loads(sys.argv[2])
    importlib.import_module("pyarrow.parquet")
    gc.freeze()
    ended = []
    for kind, destination, number in jobs:
        pid = os.fork()
        if not pid:
            if is_killed:
                die_before(number)
            asyncio.run(write(kind, destination))
            os._exit(0)
        ended.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    sys.stdout.write(json.dumps(ended))


if __name__ == "__main__":
    main()
