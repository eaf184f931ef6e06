"""The cache directory where it cannot be stored, and used by many at once."""

import contextlib
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aioloader.datasets._stores.cache_dir import CacheDir
from datasets.caches import (  # noqa: F401  (fixtures too)
    HEADER,
    HOUR,
    ROOMY,
    Operation,
    age,
    cache,
    contents,
    damage,
    dead_pid,
    files,
    path_of,
    scan,
    total,
)

# -- where it cannot be stored ------------------------------------------------------


@pytest.fixture
def one_warning() -> Iterator[list[str]]:
    """Expect that one warning is given, once; gives its text when it is."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
        said += [str(warning.message) for warning in caught]
    assert len(said) == 1
    assert "cannot write the cache in" in said[0] or "cannot read" in said[0]
    assert "MARKER" not in said[0]


def put_many(cache: CacheDir) -> int:
    """Put a megabyte; return how many entries are there, all of which are right."""
    keys = [f"{number}?sig=MARKER" for number in range(50)]
    for key in keys:
        cache.put(key, contents(key, 20_000))
    found = [(key, data) for key in keys if (data := cache.get(key)) is not None]
    assert all(data == contents(key, 20_000) for key, data in found)
    assert not [path for path in files(cache.directory) if path.suffix == ".tmp"]
    return len(found)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of half a megabyte."""
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(small)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as exc:
        pytest.skip(f"may not mount: {exc}")
    yield small
    subprocess.run(["umount", str(small)], check=True)


def test_full_disk(small_disk: Path, one_warning: list[str]) -> None:
    """ENOSPC of a real file system: what was stored before stays to be read."""
    assert 10 < put_many(CacheDir(small_disk / "cache", ROOMY)) < 26


def test_files_may_not_be_so_large(tmp_path: Path, one_warning: list[str]) -> None:
    """EFBIG, after a part was written; storing pauses, then goes on."""
    cache = CacheDir(tmp_path, ROOMY)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        assert put_many(cache) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert put_many(cache) == 0
    assert cache._paused_until > time.monotonic() + 50
    cache._paused_until = 0.0
    assert put_many(cache) == 50


def test_no_permission(one_warning: list[str]) -> None:
    """EACCES: also for root's tests, which give up being root."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o555)
        with as_nobody():
            assert put_many(CacheDir(f"{directory}/cache", ROOMY)) == 0
        assert not list(Path(directory).iterdir())


def test_may_read_only(tmp_path: Path) -> None:
    """A cache that another user fills serves; damage stays where it is."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        cache = CacheDir(directory, ROOMY)
        for key in "ab":
            cache.put(key, b"x")
            age(path_of(cache, key), HOUR)
        damage(path_of(cache, "b"), 60)
        with as_nobody():
            assert (cache.get("a"), cache.get("b"), cache.get("c")) == (
                b"x",
                None,
                None,
            )


def test_may_not_even_read(one_warning: list[str]) -> None:
    """Is a miss, and said once."""
    with tempfile.TemporaryDirectory() as directory:
        cache = CacheDir(directory, ROOMY)
        cache.put("a", b"x")
        Path(path_of(cache, "a").parent).chmod(0)
        with as_nobody():
            assert cache.get("a") is None
            assert cache.get("a") is None


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Be no superuser within the block."""
    user = os.geteuid()
    if not user:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/none"])
def test_no_directory_can_be(
    tmp_path: Path, place: str, one_warning: list[str]
) -> None:
    """A file is in its place, or the file system makes none."""
    (tmp_path / "file").touch()
    cache = CacheDir(tmp_path / place, ROOMY)
    assert put_many(cache) == 0


def test_directory_is_removed(cache: CacheDir) -> None:
    """It is made again, as often as it takes."""
    for _ in range(3):
        cache.put("a", b"x")
        assert cache.get("a") == b"x"
        shutil.rmtree(cache.directory)
        assert cache.get("a") is None


# -- at once ------------------------------------------------------------------------


def test_threads(tmp_path: Path) -> None:
    """Eight, on few keys, with evictions all the time."""
    cache = CacheDir(tmp_path, 60_000)

    def work(seed: int) -> int:
        draw, hits = random.Random(seed), 0
        for _ in range(300):
            key = str(draw.randrange(30))
            found = cache.get(key)
            assert found in {None, contents(key, 5000)}
            hits += found is not None
            if found is None:
                cache.put(key, contents(key, 5000))
        return hits

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(8))) > 0
    # Each thread may add one entry while another one scans.
    assert total(tmp_path) <= 60_000 + 8 * (5000 + HEADER)
    assert not [path for path in files(tmp_path) if path.suffix == ".tmp"]


HAMMER = """
import itertools, os, random, select, signal, sys
from aioloader.datasets._stores.cache_dir import CacheDir

directory, max_bytes, workers, lives = sys.argv[1], *map(int, sys.argv[2:])
LARGEST = 40_000

def contents(key):
    draw = random.Random(key)
    return draw.randbytes(draw.randrange(LARGEST))

def check(cache, key):
    found = cache.get(key)
    if found is not None and found != contents(key):
        os._exit(3)
    return found

def work(seed, said, turns):
    draw, cache = random.Random(seed), CacheDir(directory, max_bytes)
    for _ in turns:
        key = f"key {draw.randrange(150)}"
        if check(cache, key) is None:
            cache.put(key, contents(key))
        os.write(said, b".")
    os._exit(0)

def begin(seed, mortal):
    hears, said = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            work(seed, said, itertools.count() if mortal else range(500))
        finally:
            os._exit(4)
    os.close(said)
    return pid, hears

def size():
    found = 0
    for folder in os.scandir(directory):
        if folder.is_dir():
            for file in os.scandir(folder):
                try:
                    found += file.stat().st_size
                except FileNotFoundError:
                    pass
    return found

draw, begun, most = random.Random(0), 0, 0
left = {}  # by what is heard from it: process, and operations until it is killed
ended = []
while len(ended) < lives:
    while len(left) < workers and begun < lives:
        # The last of them live to the end; the others would go on for ever.
        mortal = begun < lives - workers
        pid, hears = begin(begun, mortal)
        left[hears] = [pid, draw.randrange(10, 300) if mortal else 10 ** 9]
        begun += 1
    for hears in select.select(list(left), [], [])[0]:
        heard = len(os.read(hears, 16))
        left[hears][1] -= heard
        if left[hears][1] <= 0:
            os.kill(left[hears][0], signal.SIGKILL)
        if not heard or left[hears][1] <= 0:
            os.close(hears)
            status = os.waitpid(left.pop(hears)[0], 0)[1]
            ended.append(os.waitstatus_to_exitcode(status))
    most = max(most, size())
assert set(ended) == {-signal.SIGKILL, 0}, ended
assert ended.count(0) == workers, ended

cache = CacheDir(directory, max_bytes)
hits = sum(check(cache, f"key {number}") is not None for number in range(150))

# A lock that was held when a process was forked does not hold its child up.
with cache._lock:
    pid = os.fork()
    if not pid:
        cache.put("forked", b"x")
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
assert cache.get("forked") == b"x"
print(most, hits)
"""


@pytest.mark.slow
def test_processes_that_are_killed(tmp_path: Path) -> None:
    """Four at a time, fourteen killed: no wrong bytes, the bound, nothing left."""
    workers, max_bytes, largest = 4, 1_000_000, 40_000 + HEADER
    ended = subprocess.run(
        [sys.executable, "-c", HAMMER, tmp_path, str(max_bytes), str(workers), "18"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert not ended.returncode, ended.stderr
    most, hits = map(int, ended.stdout.split())
    # What each puts while one scans, and what the killed ones left unfinished.
    left = sum(path.stat().st_size for path in files(tmp_path) if path.suffix == ".tmp")
    assert most <= max_bytes + workers * (max_bytes // 256 + 2 * largest) + left
    assert hits > 20
    for path in files(tmp_path):
        if path.suffix == ".tmp":
            age(path, 61)
    scan(CacheDir(tmp_path, max_bytes))
    assert not [path for path in files(tmp_path) if path.suffix == ".tmp"]
    assert total(tmp_path) <= max_bytes
