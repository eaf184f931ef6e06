"""Shards of tar files for the stream benchmarks, and the object server for them.

A sample is one member of 20,000 bytes of noise that starts with its number, eight bytes
of little-endian: nothing can be compressed, and every epoch can be checked. The server
is the tests' ``ObjectServer`` in a separate process, because it costs as much
CPU as a client; it maps the files and copies them from the page cache.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import mmap
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterator

SHARDS = 8
SAMPLES = 1_536  # per shard: 32 MB, and 24 batches
SAMPLE_BYTES = 20_000
NUMBER_BYTES = 8
BYTES_PER_SECOND = 30e6
# name of the file that has the server's URL, and seconds before each answer
LATENCIES = {"near": 0.02, "far": 0.1}


def sample(number: int) -> bytes:
    """Make the body of a sample."""
    noise = os.urandom(SAMPLE_BYTES - NUMBER_BYTES)
    return number.to_bytes(NUMBER_BYTES, "little") + noise


def number_of(body: bytes | memoryview) -> int:
    """Read the number of a sample, and check that it is whole."""
    assert len(body) == SAMPLE_BYTES
    return int.from_bytes(body[:NUMBER_BYTES], "little")


def numbers(shards: int) -> int:
    """Return how many samples the first shards have."""
    return shards * SAMPLES


def paths(folder: str, shards: int = SHARDS) -> list[str]:
    """Name the first shards."""
    return [str(Path(folder) / f"{shard}.tar") for shard in range(shards)]


def urls(folder: str, which: str, shards: int = SHARDS) -> list[str]:
    """Return addresses of the first shards on the ``near`` or the ``far`` server."""
    root = (Path(folder) / which).read_text()
    return [f"{root}/{shard}.tar" for shard in range(shards)]


def write(folder: str) -> None:
    """Write all shards."""
    for shard, path in enumerate(paths(folder)):
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
            for place in range(SAMPLES):
                member = tarfile.TarInfo(f"{shard:03}{place:06}.bin")
                member.size = SAMPLE_BYTES
                tar.addfile(member, io.BytesIO(sample(shard * SAMPLES + place)))


class ShardServer:
    """A server in a separate process; leaving the ``with`` block stops it."""

    def __init__(self, folder: str, latency: float) -> None:
        self._command = [sys.executable, __file__, folder, str(latency)]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.communicate()  # its stdin ends, and so does it


@contextlib.contextmanager
def serve() -> Iterator[str]:
    """Write the shards, run both servers, and yield their folder."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        write(folder)
        for name, latency in LATENCIES.items():
            server = stack.enter_context(ShardServer(folder, latency))
            (Path(folder) / name).write_text(server.url)
        yield folder


def mapped(path: str) -> mmap.mmap:
    """Map a file."""
    with Path(path).open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def main() -> None:
    from served import ObjectServer  # noqa: PLC0415

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("latency", type=float)
    args = parser.parse_args()
    objects = {Path(path).name: mapped(path) for path in paths(args.folder)}
    with ObjectServer(
        objects, latency=args.latency, bytes_per_second=BYTES_PER_SECOND
    ) as server:
        print(server.url, flush=True)
        sys.stdin.read()  # ends with the parent


if __name__ == "__main__":
    main()
