"""What tests of the cache directory share."""

import contextlib
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import TypeAlias

import pytest

from aioloader.datasets._stores import cache_dir
from aioloader.datasets._stores.cache_dir import CacheDir

HEADER = 52
ROOMY = 1 << 30
HOUR = 3600.0
Operation: TypeAlias = tuple[str, int]


@pytest.fixture
def cache(tmp_path: Path) -> CacheDir:
    """Return a cache with room."""
    return CacheDir(tmp_path / "cache", ROOMY)


def files(directory: str | Path) -> list[Path]:
    """Return all files of the cache but the one with the size."""
    return sorted(path for path in Path(directory).glob("??/*") if path.is_file())


def total(directory: str | Path) -> int:
    """Return what the bound is about."""
    return sum(path.stat().st_size for path in files(directory))


def path_of(cache: CacheDir, key: str) -> Path:
    """Return where an entry is."""
    return Path(cache.path(cache_dir._digest(key)))


def age(path: Path, seconds: float) -> None:
    """Let a file be that old."""
    then = time.time() - seconds
    os.utime(path, (then, then))


def contents(key: str, size: int) -> bytes:
    """Return what belongs to a key: no two keys have the same."""
    return random.Random(key).randbytes(size)


def damage(path: Path, where: int) -> None:
    """Change one byte of an entry, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        raw = bytearray(path.read_bytes())
        raw[where % len(raw)] ^= 1 << where % 8
        path.write_bytes(raw)


def scan(cache: CacheDir) -> None:
    """Let a process begin that does not know the size."""
    Path(cache.directory, ".aioloader-size").unlink()
    CacheDir(cache.directory, cache.max_bytes).put("scanning", b"")


def dead_pid() -> int:
    """Return the number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid
