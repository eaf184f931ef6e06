"""The cache directory: laws, damage, and the bound."""

import doctest
import fcntl
import os
import pickle
import shutil
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader.datasets._stores import cache_dir
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

# -- laws ---------------------------------------------------------------------------

operations = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "get", "damage", "reopen", "vanish"]),
        st.integers(0, 9),
    ),
    max_size=40,
)


def test_example() -> None:
    """It gives what it says."""
    assert doctest.testmod(cache_dir) == (0, 2)


@given(steps=operations)
def test_returns_what_was_put(steps: list[Operation]) -> None:
    """With room for all: exactly that; damage and removal make it None."""
    with tempfile.TemporaryDirectory() as directory:
        run_and_check(f"{directory}/cache", ROOMY, steps)


@given(steps=operations, max_bytes=st.integers(1, 9000))
def test_bound_and_truth(steps: list[Operation], max_bytes: int) -> None:
    """With less room: that or None, and never more than the bound, in one process."""
    with tempfile.TemporaryDirectory() as directory:
        run_and_check(f"{directory}/cache", max_bytes, steps)


def run_and_check(directory: str, max_bytes: int, steps: list[Operation]) -> None:
    """Do what is asked to a cache and to a dict."""
    cache, model = CacheDir(directory, max_bytes), dict[str, bytes]()
    for what, number in steps:
        key = f"https://host/{number}?sig=x"
        match what:
            case "put":
                model[key] = contents(key, 400 * number)
                cache.put(key, model[key])
            case "damage":
                damage(path_of(cache, key), 13 * number)
                model.pop(key, None)
            case "reopen":
                cache = CacheDir(directory, max_bytes)
            case "vanish":
                shutil.rmtree(directory, ignore_errors=True)
                model.clear()
        found = cache.get(key)
        assert found == model.get(key) or (found is None and max_bytes != ROOMY)
        assert total(directory) <= max_bytes


@pytest.mark.parametrize("key", ["", "a", "x" * 10_000, "ü/../\0", "\udcff", "a" * 62])
@pytest.mark.parametrize("data", [b"", b"x", b"\0" * 100_000])
def test_any_key_and_any_bytes(cache: CacheDir, key: str, data: bytes) -> None:
    """A key is no path."""
    cache.put(key, data)
    cache.put(key + "'", b"another")
    assert cache.get(key) == data
    assert len(files(cache.directory)) == 2


def test_takes_any_buffer(cache: CacheDir) -> None:
    """As obstore and pyarrow have them; what comes back is bytes."""
    cache.put("a", bytearray(b"abc"))
    cache.put("b", memoryview(b"abcdef").cast("H"))
    assert (cache.get("a"), cache.get("b")) == (b"abc", b"abcdef")
    assert type(cache.get("a")) is bytes


def test_large_pieces_are_read_and_written_in_parts(
    cache: CacheDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the system moves in one call has a limit, and may be less."""
    monkeypatch.setattr(cache_dir, "_MOST", 7)
    cache.put("a", b"0123456789" * 5)
    assert cache.get("a") == b"0123456789" * 5
    with path_of(cache, "a").open("rb") as file:
        assert (
            cache_dir._read_on(file.fileno(), b"xy", 54)[2:12]
            == b"aiolc\r\n\1" + (cache_dir._digest("a")[:2])
        )


def test_refuses_a_bound_that_is_none(tmp_path: Path) -> None:
    """In the constructor."""
    with pytest.raises(ValueError, match="max_bytes must be at least 1, got 0"):
        CacheDir(tmp_path, 0)


def test_pickles_and_shows_no_keys(cache: CacheDir) -> None:
    """What travels is the directory and the bound; the disk holds hashes."""
    cache.put("https://host/a?X-Amz-Signature=MARKER7secret", b"data")
    other: CacheDir = pickle.loads(pickle.dumps(cache))
    assert other.get("https://host/a?X-Amz-Signature=MARKER7secret") == b"data"
    assert repr(other) == f"CacheDir({cache.directory!r}, max_bytes={ROOMY})"
    assert "MARKER" not in repr(other) + repr(pickle.dumps(other))
    for path in Path(cache.directory).rglob("*"):
        assert "MARKER" not in str(path)
        assert path.is_dir() or b"MARKER" not in path.read_bytes()


def test_a_relative_directory_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the process goes elsewhere."""
    monkeypatch.chdir(tmp_path)
    cache = CacheDir("here", ROOMY)
    monkeypatch.chdir("/")
    cache.put("a", b"x")
    assert (tmp_path / "here").is_dir()


# -- damage -------------------------------------------------------------------------


def test_damage_at_every_byte(cache: CacheDir) -> None:
    """One bit is enough; the entry is deleted, and may be put again."""
    data = bytes(range(60))
    cache.put("a", data)
    path = path_of(cache, "a")
    whole = path.read_bytes()
    assert len(whole) == HEADER + len(data)
    for at in range(len(whole)):
        path.write_bytes(
            whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :]
        )
        assert cache.get("a") is None
        assert not path.exists()
    cache.put("a", data)
    assert cache.get("a") == data


def test_every_other_length(cache: CacheDir) -> None:
    """Cut short as after a power cut, or with something behind it."""
    data = bytes(range(60))
    cache.put("a", data)
    path = path_of(cache, "a")
    whole = path.read_bytes()
    torn = [whole[:length] for length in range(len(whole))]
    torn += [whole + b"\0", bytes(len(whole))]
    torn += [whole[:length] + bytes(len(whole) - length) for length in range(60)]
    for raw in torn:
        path.write_bytes(raw)
        assert cache.get("a") is None
        assert not path.exists()


def test_an_entry_in_the_place_of_another(cache: CacheDir) -> None:
    """Is not taken for it, whole as it is."""
    cache.put("a", b"of a")
    cache.put("b", b"of b")
    shutil.copy(path_of(cache, "a"), path_of(cache, "b"))
    assert (cache.get("a"), cache.get("b")) == (b"of a", None)


# -- the bound ----------------------------------------------------------------------


def filled(tmp_path: Path, count: int = 10) -> CacheDir:
    """Return a full cache; the first entry was used last an hour ago, and so on."""
    cache = CacheDir(tmp_path / "cache", 10 * (1000 + HEADER))
    for number in range(count):
        cache.put(str(number), contents(str(number), 1000))
        age(path_of(cache, str(number)), HOUR - 60 * number)
    return cache


def kept(cache: CacheDir, count: int = 11) -> set[int]:
    """Return which entries are there."""
    every = range(count)
    return {number for number in every if path_of(cache, str(number)).exists()}


def test_least_recently_used_go_first(tmp_path: Path) -> None:
    """And a use counts: 0 was the oldest until it was read."""
    cache = filled(tmp_path)
    assert kept(cache) == set(range(10))
    assert cache.get("0") == contents("0", 1000)
    cache.put("10", b"x" * 1000)
    assert kept(cache) == {0, *range(4, 11)}
    assert total(cache.directory) <= cache.max_bytes * 7 // 8


def test_uses_within_a_minute_are_one(cache: CacheDir) -> None:
    """So a read writes nothing, most of the time; a wrong clock is put right."""
    cache.put("a", b"x")
    path = path_of(cache, "a")
    for old, is_touched in {30.0: False, 90.0: True, -90.0: True}.items():
        age(path, old)
        before = path.stat().st_mtime
        cache.get("a")
        assert (path.stat().st_mtime != before) == is_touched


def test_processes_with_bounds_of_their_own(tmp_path: Path) -> None:
    """The one with less room makes it when it adds; what the other has stays right."""
    large = filled(tmp_path)
    small = CacheDir(large.directory, 5 * (1000 + HEADER))
    small.put("10", b"x" * 1000)
    assert total(large.directory) <= small.max_bytes * 7 // 8
    assert large.get("10") == b"x" * 1000
    assert large.get("0") is None
    for number in range(10):
        large.put(str(number), contents(str(number), 1000))
        assert total(large.directory) <= large.max_bytes
    assert len(kept(large)) > 5


def test_what_one_process_adds_another_makes_room_for(tmp_path: Path) -> None:
    """All count what is stored."""
    one, two = (CacheDir(tmp_path, 100_000) for _ in range(2))
    for number in range(300):
        (one if number % 2 else two).put(str(number), bytes(1000))
        assert total(tmp_path) <= 100_000
    assert total(tmp_path) > 80_000


def test_small_entries_are_told_of_by_the_dozen(tmp_path: Path) -> None:
    """A process that adds little says little; the bound is passed by no more."""
    max_bytes = 100_000
    caches = [CacheDir(tmp_path, max_bytes) for _ in range(3)]
    for number in range(1200):
        caches[number % 3].put(str(number), bytes(20 + number % 50))
        if not number % 100:
            assert total(tmp_path) <= max_bytes + 3 * (max_bytes // 256)
    assert total(tmp_path) > max_bytes // 2


def test_a_size_that_is_lost_or_lies(tmp_path: Path) -> None:
    """The next scan puts it right."""
    cache = CacheDir(tmp_path, 50_000)
    size = tmp_path / ".aioloader-size"
    for raw in (None, b"", b"\xff" * 1001, b"\xff" * 8, b"\x7f" * 8, b"\0" * (3 << 20)):
        if raw is None:
            size.unlink(missing_ok=True)
        else:
            size.write_bytes(raw)
        for number in range(60):
            cache.put(str(number), bytes(1000))
        for number in range(60):
            CacheDir(tmp_path, 50_000).put(str(number), bytes(1000))
        assert 30_000 < total(tmp_path) <= 50_000
    assert size.stat().st_size == 8


def test_entries_that_nearly_fill_it(tmp_path: Path) -> None:
    """One stays, the newest; one that is larger than the bound is not stored."""
    cache = CacheDir(tmp_path, 10_000)
    for number in range(3):
        cache.put(str(number), bytes(9_500))
        age(path_of(cache, str(number)), 1000 - number)
    assert kept(cache) == {2}
    cache.put("3", bytes(9_990))
    assert kept(cache) == {2}
    CacheDir(tmp_path, ROOMY).put("4", bytes(20_000))
    cache.put("5", bytes(10))
    assert kept(cache) == {5}


def test_while_another_process_makes_room(tmp_path: Path) -> None:
    """What finds no room waits, and is stored."""
    cache = filled(tmp_path)
    with Path(cache.directory, ".aioloader-size").open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        waiting = threading.Thread(target=cache.put, args=["10", b"x" * 1000])
        waiting.start()
        assert kept(cache) == set(range(10))
    waiting.join()
    assert kept(cache) == set(range(3, 11))


def test_readers_go_on_while_an_entry_is_evicted(tmp_path: Path) -> None:
    """An open entry is whole until it is closed."""
    cache = filled(tmp_path)
    with path_of(cache, "0").open("rb") as reader:
        cache.put("10", b"x" * 1000)
        assert not path_of(cache, "0").exists()
        assert reader.read()[HEADER:] == contents("0", 1000)


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    """Whatever is in the directory that is no entry."""
    cache = filled(tmp_path)
    folder = path_of(cache, "0").parent
    names = [
        "notes.txt",
        "zz/" + "a" * 62,
        f"{folder.name}/notes.txt",
        f"{folder.name}/.x.tmp",
    ]
    others = [Path(cache.directory, name) for name in names]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 1000)
        age(path, 1e6)
    for number in range(20):
        cache.put(str(number), b"x" * 1000)
    assert all(path.exists() for path in others)


def test_leftovers_of_dead_writers_go(tmp_path: Path) -> None:
    """Those of the dead after a minute, all after an hour."""
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
    there = {what for what, left in made.items() if left.exists()}
    assert there == {("dead", 0), ("alive", 0), ("alive", 90), ("none", 0)}
    assert cache.get("a") == b"x"
