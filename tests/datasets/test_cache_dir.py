"""The cache directory: laws, damage, the bound, failing disks, many users at once."""

import contextlib
import os
import pickle
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader.datasets._stores import cache_dir
from aioloader.datasets._stores.cache_dir import CacheDir
from python_process import python

HEADER = 52
ROOMY = 1 << 30
HOUR = 3600.0
Operation: TypeAlias = tuple[str, int]


@pytest.fixture
def cache(tmp_path: Path) -> CacheDir:
    return CacheDir(tmp_path / "cache", ROOMY)


def files(directory: str | Path) -> list[Path]:
    return sorted(path for path in Path(directory).glob("??/*") if path.is_file())


def total(directory: str | Path) -> int:
    """Return the bytes in all files, which the bound limits."""
    return sum(path.stat().st_size for path in files(directory))


def path_of(cache: CacheDir, key: str) -> Path:
    return Path(cache._path(cache_dir._digest(key)))


def age(path: Path, seconds: float) -> None:
    """Set a file's times this many seconds back."""
    then = time.time() - seconds
    os.utime(path, (then, then))


def contents(key: str, size: int) -> bytes:
    """Return the value of a key, different for each key."""
    return random.Random(key).randbytes(size)


def damage(path: Path, where: int) -> None:
    """Change one byte of an entry, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        raw = bytearray(path.read_bytes())
        raw[where % len(raw)] ^= 1 << where % 8
        path.write_bytes(raw)


def scan(cache: CacheDir) -> None:
    """Measure the directory, as a new process does."""
    CacheDir(cache.directory, cache.max_bytes).put("scanning", b"")


def dead_pid() -> int:
    """Return the number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


# -- laws ---------------------------------------------------------------------------

# Keys are not paths.
KEYS = [
    "", "a", "x" * 10_000, "ü/../\0", "\udcff", "a" * 62, "a'", "/", ".", "s3://b/k"
]  # fmt: skip
operations = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "get", "damage", "reopen", "vanish"]),
        st.integers(0, 9),
    ),
    max_size=40,
)


@given(steps=operations, max_bytes=st.just(ROOMY) | st.integers(1, 9000))
def test_reads_return_what_was_put_within_the_bound(
    steps: list[Operation], max_bytes: int
) -> None:
    """A small or damaged cache may miss; it returns no wrong bytes."""
    with tempfile.TemporaryDirectory() as directory:
        run_and_check(f"{directory}/cache", max_bytes, steps)


def run_and_check(directory: str, max_bytes: int, steps: list[Operation]) -> None:
    """Apply the steps to a cache and to a dict, and compare them."""
    cache, model = CacheDir(directory, max_bytes), dict[str, bytes]()
    for action, number in steps:
        key = KEYS[number]
        match action:
            case "put":
                model[key] = contents(f"{number}", 400 * number)
                cache.put(key, model[key])
            case "damage":
                damage(path_of(cache, key), 13 * number)
                model.pop(key, None)
            case "reopen":
                cache = CacheDir(directory, max_bytes)
            case "vanish":
                shutil.rmtree(directory, ignore_errors=True)
                model.clear()
        data = cache.get(key)
        assert data == model.get(key) or (data is None and max_bytes != ROOMY)
        assert total(directory) <= max_bytes


def test_pickle_repr_and_disk_show_no_keys(cache: CacheDir) -> None:
    """A pickle holds the directory and the bound; file names are hashes."""
    cache.put("https://host/a?X-Amz-Signature=MARKER7secret", b"data")
    copy: CacheDir = pickle.loads(pickle.dumps(cache))
    assert copy.get("https://host/a?X-Amz-Signature=MARKER7secret") == b"data"
    assert repr(copy) == f"CacheDir({cache.directory!r}, max_bytes={ROOMY})"
    assert "MARKER" not in repr(copy) + repr(pickle.dumps(copy))
    for path in Path(cache.directory).rglob("*"):
        assert "MARKER" not in str(path)
        assert path.is_dir() or b"MARKER" not in path.read_bytes()


# -- damage -------------------------------------------------------------------------


def test_damaged_entries_are_misses(cache: CacheDir) -> None:
    """A flipped bit or another length: the entry is deleted, and can be put again."""
    data = bytes(range(60))
    cache.put("a", data)
    path = path_of(cache, "a")
    whole = path.read_bytes()
    assert len(whole) == HEADER + len(data)
    bits = [(whole[i] ^ 1 << i % 8).to_bytes() for i in range(len(whole))]
    wrong = [whole[:i] + bit + whole[i + 1 :] for i, bit in enumerate(bits)]
    wrong += [whole[:length] for length in range(len(whole))]
    wrong += [whole + b"\0", bytes(len(whole))]
    wrong += [whole[:length] + bytes(len(whole) - length) for length in range(60)]
    for raw in wrong:
        path.write_bytes(raw)
        assert cache.get("a") is None
        assert not path.exists()
    cache.put("a", data)
    assert cache.get("a") == data


# -- the bound ----------------------------------------------------------------------


def filled(tmp_path: Path, count: int = 10) -> CacheDir:
    """Return a full cache; its entries were last used 60 minutes ago, 59, and so on."""
    cache = CacheDir(tmp_path / "cache", 10 * (1000 + HEADER))
    for number in range(count):
        cache.put(str(number), contents(str(number), 1000))
        age(path_of(cache, str(number)), HOUR - 60 * number)
    return cache


def kept(cache: CacheDir, count: int = 11) -> set[int]:
    """Return the numbers of the entries that are left."""
    every = range(count)
    return {number for number in every if path_of(cache, str(number)).exists()}


def test_least_recently_used_entries_are_evicted_first(tmp_path: Path) -> None:
    """A read counts as use: entry 0 was the oldest until then."""
    cache = filled(tmp_path)
    assert kept(cache) == set(range(10))
    assert cache.get("0") == contents("0", 1000)
    cache.put("10", b"x" * 1000)
    assert kept(cache) == {0, *range(4, 11)}
    assert total(cache.directory) <= cache.max_bytes * 7 // 8


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    cache = filled(tmp_path)
    folder = path_of(cache, "0").parent
    names = ["notes.txt", "zz/" + "a" * 62]
    names += [f"{folder.name}/notes.txt", f"{folder.name}/.x.tmp"]
    strangers = [Path(cache.directory, name) for name in names]
    for path in strangers:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 1000)
        age(path, 1e6)
    for number in range(20):
        cache.put(str(number), b"x" * 1000)
    assert all(path.exists() for path in strangers)


def test_temporary_files_of_dead_writers_are_deleted(tmp_path: Path) -> None:
    """After a minute if the writer is dead, after an hour in any case."""
    cache = CacheDir(tmp_path, 10_000)
    cache.put("a", b"x")
    path = path_of(cache, "a")
    writers = {"dead": dead_pid(), "alive": os.getpid(), "none": 999_999_999}
    made = {}
    for who, pid in writers.items():
        for seconds in (0, 90, 7200):
            left = path.with_name(f".{path.name}.{pid}.{seconds:016}.tmp")
            left.write_bytes(b"x" * 100)
            age(left, seconds)
            made[who, seconds] = left
    scan(cache)
    there = {writer for writer, left in made.items() if left.exists()}
    assert there == {("dead", 0), ("alive", 0), ("alive", 90), ("none", 0)}
    assert cache.get("a") == b"x"


# -- where it cannot be stored ------------------------------------------------------


@pytest.fixture
def one_warning() -> Iterator[list[str]]:
    """Expect exactly one warning; its text is in the list afterwards."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
        said += [str(warning.message) for warning in caught]
    assert len(said) == 1
    assert "cannot write the cache in" in said[0] or "cannot read" in said[0]
    assert "MARKER" not in said[0]


def put_many(cache: CacheDir) -> int:
    """Put a megabyte; return the number of entries, all of which are right."""
    keys = [f"{number}?sig=MARKER" for number in range(50)]
    for key in keys:
        cache.put(key, contents(key, 20_000))
    hits = [(key, data) for key in keys if (data := cache.get(key)) is not None]
    assert all(data == contents(key, 20_000) for key, data in hits)
    assert not [path for path in files(cache.directory) if path.suffix == ".tmp"]
    return len(hits)


def test_file_size_limits_pause_storing(tmp_path: Path, one_warning: list[str]) -> None:
    """Earlier entries stay readable, and storing resumes after the pause."""
    cache = CacheDir(tmp_path, ROOMY)
    cache.put("7?sig=MARKER", contents("7?sig=MARKER", 20_000))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        assert put_many(cache) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert put_many(cache) == 1
    assert cache._paused_until > time.monotonic() + 50
    cache._paused_until = 0.0
    assert put_many(cache) == 50


def test_a_read_only_cache_serves_its_entries(tmp_path: Path) -> None:
    """A damaged entry is a miss, although it cannot be deleted."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        cache = CacheDir(directory, ROOMY)
        for key in "ab":
            cache.put(key, b"x")
            age(path_of(cache, key), HOUR)
        damage(path_of(cache, "b"), 60)
        with as_nobody():
            results = [cache.get(key) for key in "abc"]
        assert results == [b"x", None, None]


def test_an_unreadable_cache_warns_once_and_misses(one_warning: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        cache = CacheDir(directory, ROOMY)
        cache.put("a", b"x")
        Path(path_of(cache, "a").parent).chmod(0)
        with as_nobody():
            assert cache.get("a") is None
            assert cache.get("a") is None


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Run the block as a user without privileges."""
    user = os.geteuid()
    if not user:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/none"])
def test_a_directory_that_cannot_be_written_only_warns(
    tmp_path: Path, place: str, one_warning: Any
) -> None:
    """A file has this path, or the file system refuses to create it."""
    (tmp_path / "file").touch()
    cache = CacheDir(tmp_path / place, ROOMY)
    assert put_many(cache) == 0


# -- at once ------------------------------------------------------------------------


HAMMER = """
import itertools, os, random, signal, sys
from aioloader.datasets._stores.cache_dir import CacheDir

directory, max_bytes, workers, lives = sys.argv[1], *map(int, sys.argv[2:])
LARGEST = 40_000

def contents(key):
    draw = random.Random(key)
    return draw.randbytes(draw.randrange(LARGEST))

def check(cache, key):
    data = cache.get(key)
    if data is not None and data != contents(key):
        os._exit(3)
    return data

def work(seed, turns):
    draw, cache = random.Random(seed), CacheDir(directory, max_bytes)
    for _ in turns:
        key = f"key {draw.randrange(150)}"
        if check(cache, key) is None:
            cache.put(key, contents(key))
        os.write(said, b".")
    os._exit(0)

def begin(seed, turns):
    pid = os.fork()
    if not pid:
        try:
            work(seed, turns)
        finally:
            os._exit(4)
    return pid

def size():
    total = 0
    for folder in os.scandir(directory):
        if folder.is_dir():
            for file in os.scandir(folder):
                try:
                    total += file.stat().st_size
                except FileNotFoundError:
                    pass
    return total

def operate(count):
    global most
    while count > 0 and (heard := len(os.read(hears, min(count, 16)))):
        count, most = count - heard, max(most, size())

draw, most = random.Random(0), 0
hears, said = os.pipe()
left = [begin(seed, itertools.count()) for seed in range(workers)]
for seed in range(lives):
    operate(draw.randrange(10, 300))
    killed = left.pop(0)
    os.kill(killed, signal.SIGKILL)
    assert os.waitpid(killed, 0)[1] == signal.SIGKILL
    # The last workers end by themselves; the others only when they are killed.
    is_last = seed >= lives - workers
    left.append(begin(workers + seed, range(500) if is_last else itertools.count()))
os.close(said)
operate(10**9)
assert {os.waitpid(pid, 0)[1] for pid in left} == {0}

cache = CacheDir(directory, max_bytes)
hits = sum(check(cache, f"key {number}") is not None for number in range(150))

# A lock that was held during a fork does not block the child.
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
def test_killed_processes_leave_no_wrong_entries(tmp_path: Path) -> None:
    """Four at a time, fourteen killed: the bound holds, and leftovers are deleted."""
    workers, max_bytes, largest = 4, 1_000_000, 40_000 + HEADER
    ended = python("-c", HAMMER, tmp_path, max_bytes, workers, 14)
    assert not ended.returncode, ended.stderr
    most, hits = map(int, ended.stdout.split())
    # Entries put while a process scans, and files that killed processes left.
    left = sum(path.stat().st_size for path in files(tmp_path) if path.suffix == ".tmp")
    assert most <= max_bytes + workers * (max_bytes // 32 + 2 * largest) + left
    assert hits > 20
    for path in files(tmp_path):
        if path.suffix == ".tmp":
            age(path, 61)
    scan(CacheDir(tmp_path, max_bytes))
    assert not [path for path in files(tmp_path) if path.suffix == ".tmp"]
    assert total(tmp_path) <= max_bytes
