"""The tar parser on sound and on damaged archives, in pieces of any size."""

import pickle
import shutil
import subprocess
import tarfile
import tracemalloc
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader._base.blocks import FailedSample
from aioloader.datasets import tar as archives
from aioloader.datasets._streams.engine import ByteFeed
from aioloader.errors import DatasetError, TruncatedReadError
from datasets.tar_archives import (
    FORMATS,
    URL,
    ZEROS,
    Member,
    archive,
    expected,
    files,
    header,
    member,
    padded,
    pax,
    plain,
    signed,
    walk,
    walked,
)

LONG = "folder/" * 13 + "with.dots/" * 5 + "k" * 60
# Pieces larger than the archive, and pieces smaller than a member.
PIECES = pytest.mark.parametrize("sizes", [[1 << 20], [100]])


def sample(key: str, **fields: bytes) -> dict[str, Any]:
    return {"__key__": key, "__url__": URL, **fields}


def keys(data: bytes, **options: Any) -> list[str]:
    return [sample["__key__"] for sample in walk(data, **options)]


# -- sound archives -----------------------------------------------------------------


@pytest.mark.parametrize("form", ["v7", "oldgnu", "gnu", "ustar", "posix"])
def test_reads_what_gnu_tar_writes(form: str, tmp_path: Path) -> None:
    """Folders come before their files."""
    for name in ["1.jpg", "1.cls", "sub.dir/2.jpg", "sub.dir/2.cls"]:
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode() * 100)
    data = gnu_tar(tmp_path, f"--format={form}", "--sort=name")
    assert walk(data) == expected(data)
    assert keys(data) == ["./1", "./sub.dir/2"]


def gnu_tar(folder: Path, *options: str) -> bytes:
    """Return an archive of the files in ``folder/in``."""
    program = shutil.which("tar")
    if program is None:
        pytest.skip("there is no tar")
    command = [program, "--create", "--file=-", *options, "-C", str(folder / "in"), "."]
    return subprocess.run(command, check=True, capture_output=True).stdout


@pytest.mark.parametrize("form", ["gnu", "posix 0.0", "posix 0.1", "posix 1.0"])
@pytest.mark.parametrize("holes", [2, 40])
def test_a_sparse_member_is_refused(form: str, holes: int, tmp_path: Path) -> None:
    """The error names its sample; those before and after it are read."""
    (tmp_path / "in").mkdir()
    for name in ["1.x", "2.x", "2.y", "3.x"]:
        (tmp_path / "in" / name).write_bytes(name.encode())
    with (tmp_path / "in" / "2.x").open("wb") as file:
        for hole in range(holes):
            file.seek((hole + 1) << 20)
            file.write(b"\xaa" * 4096)
    name, _, version = form.partition(" ")
    options = [f"--format={name}", *[f"--sparse-version={version}"] * bool(version)]
    data = gnu_tar(tmp_path, *options, "--sparse", "--sort=name")
    assert len(data) < 2 << 20
    for sizes in ([1 << 20], [100]):
        first, bad, last = walk(data, sizes)
        assert [first, last] == [sample("./1", x=b"1.x"), sample("./3", x=b"3.x")]
        assert "sample './2'" in str(bad.error)
        assert "member './2.x' is sparse, which is not supported" in str(bad.error)


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        ("a.x a.y b.x", "a b"),
        ("a.x b.x a.y", "a b a"),
        ("a.x README a.y", "a"),
        ("a.x .hidden.x d/.hidden d.e/._a.x a.y", "a"),
        ("__meta__ a.x __meta__/b.x ____/c.x __x__y/d.x", "a __x__y/d"),
        ("./a.x ./a.y a.x /a.x", "./a a /a"),
        ("d.e/a d.e/f.g/b.x.y b.", "d.e/f.g/b b"),
        ("__a.x d/__a__.x __meta__.x", "__a d/__a__ __meta__"),
        ("a/b.x a.b/x a.b", "a/b a"),
    ],
)
def test_members_are_grouped_as_in_webdataset(names: str, groups: str) -> None:
    """Members that are passed over do not end a sample."""
    data = archive([Member(name, name.encode()) for name in names.split()])
    assert keys(data) == groups.split()
    assert walk(data) == expected(data) == walk(data, [100])


@PIECES
@pytest.mark.parametrize("twin", ["a.jpg", "a.JPG", "a.__key__", "a.__url__"])
def test_a_repeated_field_fails_its_sample(twin: str, sizes: list[int]) -> None:
    """As in WebDataset; the key and the URL of a sample are fields, too."""
    members = [*files(a__jpg=b"1", a__cls=b"2"), Member(twin, b"3"), *files(b__x=b"4")]
    bad, good = walk(archive(members), sizes)
    assert good == sample("b", x=b"4")
    assert f"member {twin!r} is the second one" in str(bad.error)
    assert bad.error.location == URL


@PIECES
def test_samples_over_the_limit_fail(sizes: list[int]) -> None:
    """For one member or for all together; its other members are passed over."""
    members = files(
        a__x=b"a" * 1000, b__x=b"b" * 1001, b__y=b"b", c__x=b"c" * 600, c__y=b"c" * 401,
        d__x=b"d" * 600, d__y=b"d" * 400,
    )  # fmt: skip
    data = archive(members)
    first, large, many, last = walk(data, sizes, max_sample_bytes=1000)
    assert first == sample("a", x=b"a" * 1000)
    assert last == sample("d", x=b"d" * 600, y=b"d" * 400)
    assert "sample 'b' at byte 1,536" in str(large.error)
    assert "member 'b.x' has 1,001 bytes" in str(large.error)
    assert "max_sample_bytes (1,000)" in str(large.error)
    assert "sample 'c'" in str(many.error)
    assert "member 'c.y' has 401 bytes" in str(many.error)
    offset = walked(data, sizes, [1], max_sample_bytes=1000)[1][1]
    assert (
        walk(data, start=offset)[0]["x"] == b"c" * 600
    )  # and no member of a failed sample


@pytest.mark.parametrize("name", [b"a.x", b"a.y", b"README"])
def test_skipped_members_take_no_memory(name: bytes) -> None:
    """Members that are too large, of a failed sample, or of no sample."""
    piece, count = bytes(1 << 16), 500
    head = member(b"a.y", b"1") * 2 + header(name, len(piece) * count)
    feed, results = ByteFeed(URL, 0), list[Any]()
    pieces = chain([head], repeat(piece, count), [ZEROS, b""])
    most = 1 << 30 if name == b"a.y" else 1 << 20
    tracemalloc.start()
    for step in archives.samples(most, "error", feed):
        if step is None:
            feed.give(next(pieces))
        else:
            results += step[0]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 17
    assert [*map(type, results)] == [FailedSample]
    assert not [*pieces]


def test_old_forms_of_headers_are_read() -> None:
    """No magic, signed sums, blank or unterminated numbers, other prefixes."""
    latin = b"\xfcber.x"
    data = header(b"a.x", b"         12 ", b"\0", tail=b"") + padded(b"x" * 10)
    data += signed(header(latin, 3), signed_bytes=True) + padded(b"old")
    data += header(b"b.x", b"000000000003") + padded(b"new")
    data += header(b"c.x", b"\0" * 12)
    times = b"ustar  \0".ljust(88, b"\0") + b"14000000000"
    data += header(b"d.x", 1, tail=times) + padded(b"d")
    prefix = b"ustar\x0000".ljust(88, b"\0") + b"some/folder"
    data += header(b"e.x", 1, tail=prefix) + padded(b"e")
    old = latin[:-2].decode("utf-8", "surrogateescape")
    assert keys(data + ZEROS) == ["a", old, "b", "c", "d", "some/folder/e"]
    bodies = [b"x" * 10, b"old", b"new", b"", b"d", b"e"]
    assert [fields["x"] for fields in walk(data + ZEROS)] == bodies


def test_sizes_over_8_gb_are_known() -> None:
    """In base 256 and in PAX; the bodies are missing, and errors name their sizes."""
    size = 9 << 30
    wide = header(b"a.x", b"\x80" + size.to_bytes(11))
    for data in (wide, pax({"size": str(size)}) + header(b"a.x", 0)):
        large, cut = walk(data)
        assert "has 9,663,676,416 bytes" in str(large.error)
        assert (cut.error.expected, cut.error.received) == (size, 0)
        (cut,) = walk(data, max_sample_bytes=size)
        assert (cut.error.expected, cut.error.received) == (size, 0)


@PIECES
def test_small_sizes_may_have_the_form_of_large_ones(sizes: list[int]) -> None:
    data = header(b"a.x", b"\x80" + (3).to_bytes(11)) + padded(b"one")
    data += pax({"size": "3", "mtime": "1.5"}) + header(b"b.x", 0) + padded(b"two")
    data += pax({"linkpath": "b", "path": "c/ü.x", "size": ""})
    data += member(b"cut.y", b"three") + ZEROS
    names = {"a": b"one", "b": b"two", "c/ü": b"three"}
    assert walk(data, sizes) == [sample(key, x=body) for key, body in names.items()]


def test_global_headers_apply_to_all_later_members() -> None:
    """Those of git hold only a comment."""
    comment = pax({"comment": "0123abc"}, b"g")
    data = comment + member(b"a.x", b"1") + comment + member(b"a.y", b"2")
    assert walk(data + comment + ZEROS) == [sample("a", x=b"1", y=b"2")]
    assert walk(comment + ZEROS) == walk(comment + ZEROS[:512]) == []
    named = pax({"path": "b.z"}, b"g") + member(b"a.x", b"1")
    own = pax({"path": "c.z"}) + member(b"a.x", b"2") + ZEROS
    assert walk(named + own) == [sample("b", z=b"1"), sample("c", z=b"2")]


def test_unknown_members_and_links_are_passed_over(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links have no bodies, and the first one of a process is logged."""
    monkeypatch.setattr(archives, "_LOGGED", [])
    data = header(b"l.jpg", 1000, b"1") + header(b"l.y", 1000, b"2")
    for kind in (b"V", b"D", b"M", b"Z"):
        data += member(b"v.x", b"v" * 700, kind)
    data += member(b"a.x", b"1", b"7") + ZEROS
    assert walk(data) == walk(data) == [sample("a", x=b"1")]
    (said,) = caplog.messages
    assert "member 'l.jpg' is a link" in said
    assert "tar --dereference" in said


def test_a_sample_in_two_places_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All images, then all labels: each sample lacks a field. Equal ones lack none."""
    monkeypatch.setattr(archives, "_LOGGED", [])
    twice = member(b"a.x", b"1") + member(b"b.x", b"2") + member(b"a.x", b"3")
    assert len(walk(twice + ZEROS)) == 3
    assert not caplog.messages
    apart = twice + member(b"b.y", b"4") + ZEROS
    assert walk(apart)[1::2] == [sample("b", x=b"2"), sample("b", y=b"4")]
    assert len(walk(apart)) == 4
    (said,) = caplog.messages
    assert "sample 'b' at byte 3,072" in said
    assert "tar --sort=name" in said


def test_only_the_last_byte_ends_an_archive() -> None:
    """Until then, other bytes may follow the zeros; the last sample does not wait."""
    data = member(b"a.x", b"1") + ZEROS
    whole = [sample("a", x=b"1")], 1024
    assert walked(data + b"\0", [len(data), 1]) == [whole]
    samples, (bad, _) = walked(data + b"x", [len(data), 1])
    assert samples == whole
    assert "other bytes after them" in str(bad[0].error)


KEYS = st.sampled_from(["a", "b", "d/c", "__meta__/a", LONG, "ü/ключ", "d.e/.f"])
ENDS = st.sampled_from([".x", ".y", ".Z", ".x.Ünï", "", "/"])
OTHERS = [tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE]
KINDS = st.sampled_from([tarfile.REGTYPE] * 9 + [*OTHERS, tarfile.CHRTYPE])
ANY_SIZES = st.lists(st.integers(1, 6000), min_size=1, max_size=8)
LIMITS = st.lists(st.integers(1, 5), max_size=8).map(lambda limits: [*limits, 2])


@st.composite
def members(draw: st.DrawFn) -> Member:
    """Return a member with one of a few names, so that samples have several members."""
    kind = draw(KINDS)
    size = draw(st.sampled_from([0, 1, 511, 512, 513, 2000]))
    body = bytes([draw(st.integers(0, 255))]) * size
    name = draw(KEYS) + draw(ENDS).replace("/", "q" if kind == tarfile.REGTYPE else "/")
    mtime = draw(st.sampled_from([0, 1.5]))
    return Member(name, body if kind == tarfile.REGTYPE else b"", kind, mtime)


@pytest.mark.slow
@given(st.lists(members(), max_size=12), st.sampled_from([*FORMATS]), ANY_SIZES, LIMITS)
def test_pieces_limits_and_resuming_change_nothing(
    made: list[Member], form: str, sizes: list[int], limits: list[int]
) -> None:
    """Samples equal tarfile's; each offset leads to the rest of them."""
    data = archive(made, form)
    whole, taken = plain(walk(data)), 0
    assert [FailedSample if isinstance(x, tuple) else x for x in whole] == expected(
        data
    )
    for block, offset in walked(data, sizes, limits):
        assert plain(block) == whole[taken : (taken := taken + len(block))]
        assert plain(walk(data, start=offset)) == whole[taken:]
    assert taken == len(whole)


# -- damaged archives ---------------------------------------------------------------


def the_error(data: bytes, **options: Any) -> DatasetError:
    """Return the error at the end, which must not depend on the pieces."""
    results = walk(data, **options)
    assert plain(walk(data, [100], **options)) == plain(results)
    error = results[-1].error
    assert isinstance(error, DatasetError)
    assert error.location == URL
    assert URL in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), str(error))
    return error


def flipped(data: bytes, i: int, mask: int = 0x01) -> bytes:
    return data[:i] + bytes([data[i] ^ mask]) + data[i + 1 :]


def test_a_wrong_checksum_ends_the_shard() -> None:
    """The sample before may lack members: it is lost, too, also after a resume."""
    data = flipped(archive(files(a__x=b"1", b__x=b"2", b__y=b"3", c__x=b"4")), 3077)
    (first, offset), (bad, _) = walked(data, limits=[1])
    assert (first, offset) == ([sample("a", x=b"1")], 1024)
    assert plain(walk(data, start=offset)) == plain(bad)
    text = str(the_error(data))
    assert "is damaged at byte 3,072, after member 'b.y'" in text
    assert "wrong checksum" in text
    assert "sample 'b' at byte 1,024 is lost" in text


def test_other_files_are_no_tar_archives() -> None:
    """The error suggests a reason; a short file is truncated."""
    text = str(the_error(b"\x1f\x8b\x08" + b"packed" * 100))
    assert "damaged at byte 0" in text
    assert "is it a tar archive, and not compressed?" in text
    assert isinstance(short := the_error(b"short"), TruncatedReadError)
    assert "its first header (is it a tar archive, and not compressed?)" in str(short)
    # Nothing after the damage is read.
    data = b"\xff" * 512 + member(b"a.x", b"1") + ZEROS
    assert [len(walk(data, [size])) for size in (1 << 20, 600)] == [1, 1]


ONE = member(b"a.x", b"x" * 1000)
SPARSE = signed(header(b"a.z", 0, b"S")[:482] + b"\1" + bytes(29))
LONG_NAME = member(b"././@LongLink", b"a" * 150 + b"\0", b"L")


@pytest.mark.parametrize(
    ("data", "expected", "received", "words"),
    [
        (ONE + header(b"a.y", 700)[:100], 512, 100, "the header after member 'a.x'"),
        (ONE[:512], 1000, 0, "member 'a.x'"),
        (ONE[:1000], 1000, 488, "member 'a.x'"),
        (ONE[:1511], 1000, 999, "member 'a.x'"),
        (ONE[:1512], 1024, 1000, "member 'a.x'"),
        (ONE[:1535], 1024, 1023, "member 'a.x'"),
        (member(b"README", b"r" * 600)[:700], 600, 188, "member 'README'"),
        (ONE + LONG_NAME[:600], 151, 88, "the long name or PAX header"),
        (ONE + LONG_NAME[:700], 512, 188, "the long name or PAX header"),
        (ONE + LONG_NAME, 512, 0, "the header after member 'a.x'"),
        (ONE + LONG_NAME + ONE[:9], 512, 9, "the header after member 'a.x'"),
        (ONE + ZEROS[:600], 512, 88, "the header after member 'a.x'"),
        (ONE + SPARSE, 512, 0, "the header after member 'a.z'"),
        (ONE + pax({"mtime": "1.5"}), 512, 0, "the header after member 'a.x'"),
    ],
)
def test_a_cut_names_its_member(
    data: bytes, expected: int, received: int, words: str
) -> None:
    """The error has the bytes received; the sample is lost."""
    error = the_error(data)
    assert isinstance(error, TruncatedReadError)
    assert (error.expected, error.received) == (expected, received)
    assert f"ends within {words}" in str(error)
    assert not any(isinstance(sample, dict) for sample in walk(data))


def test_a_cut_in_a_failed_sample_is_a_second_error() -> None:
    data = member(b"a.x", b"1" * 2000)
    large, cut = walk(data[:1500], max_sample_bytes=1000)
    assert "has 2,000 bytes" in str(large.error)
    assert "988 of 2,000 bytes at byte 512" in str(cut.error)


def broken(records: bytes) -> bytes:
    """Return a PAX header with these records."""
    return member(b"x", records, b"x")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (ZEROS[:512] + member(b"a.x", b"1"), "a lone block of zeros"),
        (ZEROS + member(b"a.x", b"1") + ZEROS, "other bytes after them"),
        (ONE + ZEROS * 3 + ONE, "other bytes after them"),
        (LONG_NAME + ZEROS, "zeros where a member must follow"),
        (
            header(b"././@LongLink", (1 << 20) + 1, b"L") + bytes(1 << 21),
            "PAX header of 1,048,577 bytes, over 1 MiB",
        ),
        (header(b"a.x", b"0000000000z\0"), "for an octal number"),
        (header(b"a.x", b"-0000000001\0"), "a negative number, -1"),
        (header(b"a.x", b"\xff" * 12), "a negative number, -1"),
        (header(b"a.x", b"\xc0" + bytes(11)), "a negative number"),
        (pax({"size": "-5"}) + header(b"a.x", 0), "for a size in a PAX header"),
        (pax({"size": "9" * 5000}) + header(b"a.x", 0), "for a size in a PAX header"),
        (broken(b"path=a.x\n"), "a broken PAX record at byte 0"),
        (broken(b"99 path=a.x\n"), "a broken PAX record at byte 0"),
        (broken(b"1 path=a.x\n"), "a broken PAX record at byte 0"),
        (broken(b"12 path=a.x\n3 \n+4 \n"), "PAX record at byte 15"),
        (broken(b"12 path=a.x\n0 \n"), "PAX record at byte 12"),
        (broken(b"12 path=a.x\n00"), "PAX record at byte 12"),
        (broken(b"1" * 5000 + b" path=a.x\n"), "PAX record at byte 0"),
        (header(b"x", b"0000000000z\0", b"x") + ONE, "for an octal number"),
        (signed(ONE[:512])[:148] + b"badsum\0 " + ONE[156:], "wrong checksum"),
    ],
)
def test_damage_names_its_place(data: bytes, words: str) -> None:
    text = str(the_error(data + ZEROS))
    assert "is damaged at byte " in text
    assert words in text
