"""The tar parser on sound archives: formats, grouping, cuts, resumption."""

import io
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

from aioloader._order.blocks import Bad
from aioloader.datasets import _tar as tar_walk
from aioloader.datasets._engine import Feed
from aioloader.datasets._tar import samples
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
MEMBERS = [
    Member("a.jpg", b"jpg" * 300),
    Member("a.CLS", b"7"),
    Member("folder", kind=tarfile.DIRTYPE),
    Member("folder/b.seg.png", b"png" * 171, mtime=12.5),
    Member("folder/b.json"),
    Member("link.jpg", kind=tarfile.SYMTYPE),
    Member("folder/hard.jpg", kind=tarfile.LNKTYPE),
    Member("fifo.jpg", kind=tarfile.FIFOTYPE),
    Member("device.jpg", kind=tarfile.CHRTYPE),
    Member(f"{LONG}.x", b"long" * 128),
    Member("übung/ключ.Ünï", b"unicode", mtime=0.1),
    Member("last.x", b"x" * 511),
]


def sample(key: str, **fields: bytes) -> dict[str, Any]:
    """Return the sample with these fields."""
    return {"__key__": key, "__url__": URL, **fields}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("size", [1 << 20, 4096, 1000, 512, 7, 1])
def test_reads_what_tarfile_writes(form: str, size: int) -> None:
    """Every kind of member, in every format, whatever the pieces."""
    data = archive(MEMBERS, form)
    assert [found["__key__"] for found in expected(data)] == [
        "a", "folder/b", LONG, "übung/ключ", "last"
    ]  # fmt: skip
    assert walk(data, [size]) == expected(data)


@pytest.mark.parametrize("form", ["v7", "oldgnu", "gnu", "ustar", "posix"])
def test_reads_what_gnu_tar_writes(form: str, tmp_path: Path) -> None:
    """With folders as they are found, before their files."""
    for name in ["1.jpg", "1.cls", "sub.dir/2.jpg", "sub.dir/2.cls"]:
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode() * 100)
    data = gnu_tar(tmp_path, f"--format={form}", "--sort=name")
    assert walk(data) == expected(data)
    assert [found["__key__"] for found in walk(data)] == ["./1", "./sub.dir/2"]


def gnu_tar(folder: Path, *options: str) -> bytes:
    """Return an archive of the files in ``folder/in``."""
    program = shutil.which("tar")
    if program is None:
        pytest.skip("there is no tar")
    command = [program, "--create", "--file=-", *options, "-C", str(folder / "in"), "."]
    return subprocess.run(command, check=True, capture_output=True).stdout


@pytest.mark.parametrize(
    "options",
    [
        ["--format=gnu"],
        ["--format=posix", "--sparse-version=0.0"],
        ["--format=posix", "--sparse-version=0.1"],
        ["--format=posix", "--sparse-version=1.0"],
    ],
)
@pytest.mark.parametrize("holes", [2, 40])
def test_a_sparse_member_is_refused(
    options: list[str], holes: int, tmp_path: Path
) -> None:
    """The sample names it; those before and after it come whole."""
    (tmp_path / "in").mkdir()
    for name in ["1.x", "2.x", "2.y", "3.x"]:
        (tmp_path / "in" / name).write_bytes(name.encode())
    with (tmp_path / "in" / "2.x").open("wb") as file:
        for hole in range(holes):
            file.seek((hole + 1) << 20)
            file.write(b"\xaa" * 4096)
    data = gnu_tar(tmp_path, *options, "--sparse", "--sort=name")
    assert len(data) < 2 << 20
    for sizes in ([1 << 20], [100]):
        first, bad, last = walk(data, sizes)
        assert first == sample("./1", x=b"1.x")
        assert last == sample("./3", x=b"3.x")
        assert "sample './2'" in str(bad.error)
        assert "member './2.x' is sparse, which is not supported" in str(bad.error)


def test_a_sparse_map_may_go_on(tmp_path: Path) -> None:
    """By hand, for the file system may know no holes."""
    block = header(b"2.x", 700, b"S", tail=b"ustar  \0")
    block = signed(block[:482] + b"\1" + block[483:])
    further = bytes(504) + b"\1" + bytes(7), bytes(512)
    data = member(b"1.x", b"one") + block + b"".join(further) + padded(b"h" * 700)
    data += member(b"2.y", b"skipped") + member(b"3.x", b"three") + ZEROS
    first, bad, last = walk(data)
    assert isinstance(bad, Bad)
    assert [first, last] == [sample("1", x=b"one"), sample("3", x=b"three")]


@pytest.mark.parametrize(
    ("names", "keys"),
    [
        (["a.x", "a.y", "b.x"], ["a", "b"]),
        (["a.x", "b.x", "a.y"], ["a", "b", "a"]),
        (["a.x", "README", "a.y"], ["a"]),
        (["a.x", ".hidden.x", "d/.hidden", "d.e/._a.x", "a.y"], ["a"]),
        (
            ["__meta__", "a.x", "__meta__/b.x", "____/c.x", "__x__y/d.x"],
            ["a", "__x__y/d"],
        ),
        (["./a.x", "./a.y", "a.x", "/a.x"], ["./a", "a", "/a"]),
        (["d.e/a", "d.e/f.g/b.x.y", "b."], ["d.e/f.g/b", "b"]),
        (["__a.x", "d/__a__.x", "__meta__.x"], ["__a", "d/__a__", "__meta__"]),
        (["a/b.x", "a.b/x", "a.b"], ["a/b", "a"]),
    ],
)
def test_groups_as_webdataset_does(names: list[str], keys: list[str]) -> None:
    """What is passed over does not end a sample."""
    data = archive([Member(name, name.encode()) for name in names])
    assert [found["__key__"] for found in walk(data)] == keys
    assert walk(data) == expected(data) == walk(data, [100])


@pytest.mark.parametrize("twin", ["a.jpg", "a.JPG", "a.__key__", "a.__url__"])
def test_a_field_twice_spoils_the_sample(twin: str) -> None:
    """As WebDataset has it; the names of what a sample tells are fields too."""
    members = [*files(a__jpg=b"1", a__cls=b"2"), Member(twin, b"3"), *files(b__x=b"4")]
    for sizes in ([1 << 20], [100]):
        bad, good = walk(archive(members), sizes)
        assert good == sample("b", x=b"4")
        assert f"member {twin!r} is the second one" in str(bad.error)
        assert bad.error.location == URL


@pytest.mark.parametrize("sizes", [[1 << 20], [100]])
def test_a_large_sample_is_passed_over(sizes: list[int]) -> None:
    """Be it for one member or for all; its other members go with it."""
    members = files(
        a__x=b"a" * 1000, b__x=b"b" * 1001, b__y=b"b", c__x=b"c" * 600, c__y=b"c" * 401,
        d__x=b"d" * 600, d__y=b"d" * 400,
    )  # fmt: skip
    one, two, three, four = walk(archive(members), sizes, max_sample_bytes=1000)
    assert one == sample("a", x=b"a" * 1000)
    assert four == sample("d", x=b"d" * 600, y=b"d" * 400)
    assert "sample 'b' at byte 1,536" in str(two.error)
    assert "member 'b.x' has 1,001 bytes" in str(two.error)
    assert "max_sample_bytes (1,000)" in str(two.error)
    assert "sample 'c'" in str(three.error)
    assert "member 'c.y' has 401 bytes" in str(three.error)


@pytest.mark.parametrize("name", [b"a.x", b"a.y", b"README"])
def test_what_is_passed_over_takes_no_memory(name: bytes) -> None:
    """Be it too large, of a sample that is spoiled, or of none."""
    piece, count = bytes(1 << 16), 500
    head = member(b"a.y", b"1") * 2 + header(name, len(piece) * count)
    feed = Feed(URL, 0)
    pieces = chain([head], repeat(piece, count), [ZEROS, b""])
    found: list[Any] = []
    tracemalloc.start()
    for step in samples(1 << 30 if name == b"a.y" else 1 << 20, "error", feed):
        if step is None:
            feed.give(next(pieces))
        else:
            found += step[0]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 17
    (bad,) = found
    assert isinstance(bad, Bad)
    assert not [*pieces]


def test_old_headers() -> None:
    """Without a magic, with signed sums, blank or unended numbers, other prefixes."""
    latin = b"\xfcber.x"
    data = header(b"a.x", b"         12 ", b"\0", tail=b"") + padded(b"x" * 10)
    data += signed(header(latin, 3), signed_bytes=True) + padded(b"old")
    data += header(b"b.x", b"000000000003") + padded(b"new")
    data += header(b"c.x", b"\0" * 12)
    times = b"ustar  \0".ljust(88, b"\0") + b"14000000000"
    data += header(b"d.x", 1, tail=times) + padded(b"d")
    prefix = b"ustar\x0000".ljust(88, b"\0") + b"some/folder"
    data += header(b"e.x", 1, tail=prefix) + padded(b"e")
    found = walk(data + ZEROS)
    assert [one["__key__"] for one in found] == [
        "a", latin[:-2].decode("utf-8", "surrogateescape"), "b", "c", "d",
        "some/folder/e",
    ]  # fmt: skip
    assert [one["x"] for one in found] == [b"x" * 10, b"old", b"new", b"", b"d", b"e"]


def test_sizes_over_8_gb() -> None:
    """In base 256 and in PAX; the bodies are not here, and their sizes are told."""
    size = 9 << 30
    wide = header(b"a.x", b"\x80" + size.to_bytes(11))
    for data in (wide, pax({"size": str(size)}) + header(b"a.x", 0)):
        large, cut = walk(data)
        assert "has 9,663,676,416 bytes" in str(large.error)
        assert (cut.error.expected, cut.error.received) == (size, 0)
        (cut,) = walk(data, max_sample_bytes=size)
        assert (cut.error.expected, cut.error.received) == (size, 0)


def test_small_numbers_in_other_forms() -> None:
    """The forms of large sizes, with bodies that are here."""
    data = header(b"a.x", b"\x80" + (3).to_bytes(11)) + padded(b"one")
    data += pax({"size": "3", "mtime": "1.5"}) + header(b"b.x", 0) + padded(b"two")
    data += pax({"linkpath": "b", "path": "c/ü.x", "size": ""})
    data += member(b"cut.y", b"three")
    assert (
        walk(data + ZEROS)
        == walk(data + ZEROS, [10])
        == [
            sample("a", x=b"one"),
            sample("b", x=b"two"),
            sample("c/ü", x=b"three"),
        ]
    )


def test_global_headers() -> None:
    """They hold for all members after them; those of git say nothing of members."""
    comment = pax({"comment": "0123abc"}, b"g")
    data = comment + member(b"a.x", b"1") + comment + member(b"a.y", b"2")
    assert walk(data + comment + ZEROS) == [sample("a", x=b"1", y=b"2")]
    assert walk(comment + ZEROS) == walk(comment + ZEROS[:512]) == []
    named = pax({"path": "b.z"}, b"g") + member(b"a.x", b"1")
    own = pax({"path": "c.z"}) + member(b"a.x", b"2") + ZEROS
    assert walk(named + own) == [sample("b", z=b"1"), sample("c", z=b"2")]


def test_unknown_members_are_passed_over() -> None:
    """Volume labels, dumped folders and sorts to come have bodies, links have none."""
    data = header(b"l.x", 1000, b"1") + header(b"l.y", 1000, b"2")
    for kind in (b"V", b"D", b"M", b"Z"):
        data += member(b"v.x", b"v" * 700, kind)
    assert walk(data + member(b"a.x", b"1", b"7") + ZEROS) == [sample("a", x=b"1")]


def test_the_first_link_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample may lack a field because of it; once per process is enough."""
    monkeypatch.setattr(tar_walk, "_MENTIONED", [])
    data = header(b"a.jpg", 0, b"2") + member(b"a.cls", b"1") + header(b"b.x", 0, b"1")
    assert walk(data + ZEROS) == walk(data + ZEROS) == [sample("a", cls=b"1")]
    (said,) = caplog.messages
    assert "member 'a.jpg' is a link" in said
    assert "tar --dereference" in said


@pytest.mark.parametrize("end", [ZEROS[:512], ZEROS, ZEROS * 9, bytes(1030)])
def test_ends(end: bytes) -> None:
    """One block of zeros is enough; more may follow."""
    data = member(b"a.x", b"1")
    assert walk(data + end) == walk(data + end, [100]) == [sample("a", x=b"1")]
    assert walk(end) == []


def test_only_the_last_byte_ends_an_archive() -> None:
    """Until then other bytes may follow the zeros; the sample need not wait."""
    data = member(b"a.x", b"1") + ZEROS
    whole = [sample("a", x=b"1")], 1024
    assert walked(data + b"\0", [len(data), 1]) == [whole]
    found, (bad, _) = walked(data + b"x", [len(data), 1])
    assert found == whole
    assert "other bytes after them" in str(bad[0].error)


def test_a_piece_may_be_any_buffer() -> None:
    """As stores, maps and arrays give them."""
    data = member(b"a.x", b"1" * 1000) + ZEROS
    for piece in (
        data,
        bytearray(data),
        memoryview(data),
        io.BytesIO(data).getbuffer(),
    ):
        feed = Feed(URL, 0)
        reading = samples(1 << 20, "error", feed)
        assert next(reading) is None
        feed.give(piece)
        step = next(reading)
        assert step is not None
        ((found,), _) = step
        assert type(found["x"]) is bytes
        assert found == sample("a", x=b"1" * 1000)


def test_a_sample_comes_when_the_next_begins() -> None:
    """Not only when the piece after it, or the body that follows, is here."""
    first, second = member(b"a.x", b"1"), member(b"b.x", b"2" * 5000)
    feed = Feed(URL, 0)
    reading = samples(1 << 20, "error", feed)
    assert next(reading) is None
    feed.give(first)
    assert next(reading) is None
    feed.give(second[:512])
    assert next(reading) == ([sample("a", x=b"1")], len(first))


KEYS = st.sampled_from(["a", "b", "d/c", "__meta__/a", LONG, "ü", "d.e/.f"])
ENDS = st.sampled_from([".x", ".y", ".Z", ".x.y", "", "/"])
KINDS = st.sampled_from([tarfile.REGTYPE] * 5 + [tarfile.DIRTYPE, tarfile.SYMTYPE])


@st.composite
def members(draw: st.DrawFn) -> Member:
    """Return any member, of a few names, so that samples have several."""
    kind = draw(KINDS)
    size = draw(st.sampled_from([0, 1, 511, 512, 513, 2000]))
    body = bytes([draw(st.integers(0, 255))]) * size
    name = draw(KEYS) + draw(ENDS).replace("/", "q" if kind == tarfile.REGTYPE else "/")
    mtime = draw(st.sampled_from([0, 1.5]))
    return Member(name, body if kind == tarfile.REGTYPE else b"", kind, mtime)


ARCHIVES = st.builds(
    archive, st.lists(members(), max_size=12), st.sampled_from(list(FORMATS))
)
SIZES = st.lists(st.integers(1, 6000), min_size=1, max_size=8)
LIMITS = st.lists(st.integers(1, 5), max_size=8).map(lambda limits: [*limits, 2])


@given(ARCHIVES, SIZES, LIMITS)
def test_cuts_change_nothing(data: bytes, sizes: list[int], limits: list[int]) -> None:
    """Whatever the pieces, and whenever samples are taken, they are tarfile's."""
    whole = walk(data)
    reduced = [Bad if isinstance(found, Bad) else found for found in whole]
    assert reduced == expected(data)
    assert plain(walk(data, sizes, limits)) == plain(whole)


@given(ARCHIVES, st.integers(1, 5000), st.integers(1, 5))
def test_resumes_at_each_offset(data: bytes, size: int, limit: int) -> None:
    """What is read from there on is what was not taken yet."""
    whole, taken = plain(walk(data)), 0
    for block, at in walked(data, [size], [limit]):
        taken += len(block)
        assert plain(walk(data, at=at)) == whole[taken:]
    assert taken == len(whole)


@pytest.mark.parametrize("form", ["gnu", "pax"])
def test_an_offset_is_that_of_the_first_header(form: str) -> None:
    """A long name and PAX records come before the header that they tell of."""
    data = archive([Member(f"{LONG}{i}.x", b"1") for i in range(3)], form)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        begins = [info.offset for info in tar]
    offsets = [at for block, at in walked(data, limits=[1]) if block]
    assert offsets[:2] == begins[1:]
    assert begins[1] - begins[0] > 1024
    assert data[offsets[2] :].strip(b"\0") == b""


def test_offsets_of_spoiled_samples_leave_nothing_of_them() -> None:
    """A parser that resumes behind one does not take its rest for a sample."""
    large = files(a__x=b"1", b__x=b"2" * 11, b__y=b"3", c__x=b"4")
    data = archive(large)
    at = walked(data, limits=[1], max_sample_bytes=10)[1][1]
    (rest,) = walk(data, at=at)
    assert rest == sample("c", x=b"4")
