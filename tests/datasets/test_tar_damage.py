"""The tar parser on damaged archives: what it says, and what it must not deliver."""

import io
import pickle
import random
import tarfile
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioloader._order.blocks import Bad
from aioloader.errors import DatasetError, TruncatedReadError
from datasets.tar_archives import (
    FORMATS,
    URL,
    ZEROS,
    Member,
    archive,
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

LONG = "n" * 150


def the_error(data: bytes, **options: Any) -> DatasetError:
    """Return what stands at the end, the same whatever the pieces."""
    results = walk(data, **options)
    assert plain(walk(data, [100], **options)) == plain(results)
    error = results[-1].error
    assert isinstance(error, DatasetError)
    assert error.location == URL
    assert URL in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), str(error))
    return error


def flipped(data: bytes, at: int, mask: int = 0x01) -> bytes:
    """Return ``data`` with one byte changed."""
    return data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]


def test_a_wrong_checksum_ends_the_shard() -> None:
    """The sample before may lack members, so it is lost too; earlier ones are not."""
    data = archive(files(a__x=b"1", b__x=b"2", b__y=b"3", c__x=b"4"))
    whole = walk(flipped(data, 4 * 1024 - 1024 + 5))
    assert [found["__key__"] for found in whole[:-1]] == ["a"]
    text = str(the_error(flipped(data, 3 * 1024 + 5)))
    assert "is damaged at byte 3,072, after member 'b.y'" in text
    assert "wrong checksum" in text
    assert "sample 'b' at byte 1,024 is lost" in text


def test_what_is_no_tar_archive() -> None:
    """The message has a guess; a short file is one that was cut."""
    text = str(the_error(b"\x1f\x8b\x08" + b"packed" * 100))
    assert "damaged at byte 0" in text
    assert "is it a tar archive, and not compressed?" in text
    assert isinstance(the_error(b"short"), TruncatedReadError)


def test_nothing_is_read_after_damage() -> None:
    """Not even what looks sound."""
    data = b"\xff" * 512 + member(b"a.x", b"1") + ZEROS
    for sizes in ([1 << 20], [len(data) - 2000]):
        (bad,) = walk(data, sizes)
        assert isinstance(bad, Bad)


def test_the_offset_before_damage_is_that_of_the_sample_it_cost() -> None:
    """So that it is told again to whoever resumes before it."""
    data = archive(files(a__x=b"1", b__x=b"2"))[:2048] + b"\xff" * 512
    (before, at), (bad, _) = walked(data, limits=[1])
    assert (len(before), at) == (1, 1024)
    assert plain(walk(data, at=at)) == plain(bad)
    assert "sample 'b' at byte 1,024 is lost" in str(bad[0].error)


ONE = member(b"a.x", b"x" * 1000)
SPARSE = signed(header(b"a.z", 0, b"S")[:482] + b"\1" + bytes(29))
LONG_NAME = member(b"././@LongLink", b"a" * 150 + b"\0", b"L")


@pytest.mark.parametrize(
    ("data", "expected", "received", "what"),
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
def test_a_cut_is_told(data: bytes, expected: int, received: int, what: str) -> None:
    """With the member, and how much of it is here; its sample is lost."""
    error = the_error(data)
    assert isinstance(error, TruncatedReadError)
    assert (error.expected, error.received) == (expected, received)
    assert f"ends within {what}" in str(error)
    assert isinstance(walk(data)[-1], Bad)
    assert not any(isinstance(found, dict) for found in walk(data))


def test_a_cut_amid_what_is_spoiled() -> None:
    """Two errors: the one of the sample, and the one of the shard."""
    data = member(b"a.x", b"1" * 2000)
    large, cut = walk(data[:1500], max_sample_bytes=1000)
    assert "has 2,000 bytes" in str(large.error)
    assert "988 of 2,000 bytes at byte 512" in str(cut.error)


HUGE = header(b"././@LongLink", (1 << 20) + 1, b"L")


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (ZEROS[:512] + member(b"a.x", b"1"), "a lone block of zeros"),
        (ZEROS + member(b"a.x", b"1") + ZEROS, "other bytes after them"),
        (ZEROS + b"rest", "other bytes after them"),
        (ONE + ZEROS * 3 + ONE, "other bytes after them"),
        (LONG_NAME + ZEROS, "zeros where a member must follow"),
        (HUGE + bytes(1 << 21), "PAX header of 1,048,577 bytes, over 1 MiB"),
        (header(b"a.x", b"0000000000z\0"), "for an octal number"),
        (header(b"a.x", b"-0000000001\0"), "a negative number, -1"),
        (header(b"a.x", b"\xff" * 12), "a negative number, -1"),
        (header(b"a.x", b"\xc0" + bytes(11)), "a negative number"),
        (pax({"size": "-5"}) + header(b"a.x", 0), "for a size in a PAX header"),
        (pax({"size": "9" * 5000}) + header(b"a.x", 0), "for a size in a PAX header"),
        (member(b"x", b"path=a.x\n", b"x"), "a broken PAX record at byte 0"),
        (member(b"x", b"99 path=a.x\n", b"x"), "a broken PAX record at byte 0"),
        (member(b"x", b"1 path=a.x\n", b"x"), "a broken PAX record at byte 0"),
        (member(b"x", b"12 path=a.x\n3 \n+4 \n", b"x"), "PAX record at byte 15"),
        (member(b"x", b"12 path=a.x\n0 \n", b"x"), "PAX record at byte 12"),
        (member(b"x", b"12 path=a.x\n00", b"x"), "PAX record at byte 12"),
        (member(b"x", b"1" * 5000 + b" path=a.x\n", b"x"), "PAX record at byte 0"),
        (header(b"x", b"0000000000z\0", b"x") + ONE, "for an octal number"),
        (signed(ONE[:512])[:148] + b"badsum\0 " + ONE[156:], "wrong checksum"),
    ],
)
def test_damage_is_told(data: bytes, what: str) -> None:
    """Of what should be there, and what is."""
    text = str(the_error(data + ZEROS))
    assert "is damaged at byte " in text
    assert what in text


@dataclass(frozen=True)
class Edit:
    """What happens to the bytes from ``at`` to ``stop`` of an archive."""

    at: int
    stop: int
    instead: bytes

    def made(self, data: bytes) -> bytes:
        """Return ``data`` with this done to it."""
        return data[: self.at] + self.instead + data[self.stop :]


@st.composite
def edits(draw: st.DrawFn, data: bytes) -> Edit:
    """Return one flip, deletion, insertion or cut."""
    at = draw(st.integers(0, len(data) - 1))
    blocks = st.integers(1, 8).map(lambda count: count * 512)
    count = draw(blocks | st.integers(1, 3000))
    kind = draw(st.sampled_from(["flip", "delete", "insert", "zeros", "truncate"]))
    if kind == "flip":
        return Edit(at, at + 1, bytes([data[at] ^ draw(st.integers(1, 255))]))
    if kind == "delete":
        return Edit(at, min(at + count, len(data)), b"")
    if kind == "truncate":
        return Edit(at, len(data), b"")
    noise = bytes(count) if kind == "zeros" else random.Random(count).randbytes(count)
    return Edit(at, at, noise)


# Bytes of bodies are never zero, and no two names differ by what makes up for another
# difference: what moves a header's bytes into a body, or mixes two headers, is seen.
NAMES = [f"{key}.{field}" for key in "abcdefg" for field in ("x", "xx")]


@st.composite
def fuzzed(draw: st.DrawFn) -> tuple[bytes, Edit]:
    """Return a sound archive and something that happens to it."""
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    extra = draw(st.sampled_from(["", LONG + "/"]))
    rng = random.Random(draw(st.integers(0, 99)))
    whole = [
        Member(
            extra + name,
            bytes(
                rng.choices(range(1, 256), k=rng.choice([0, 1, 511, 512, 1024, 1500]))
            ),
            mtime=rng.choice([0, 0.5]),
        )
        for name in sorted(names)
    ]
    data = archive(whole, draw(st.sampled_from(list(FORMATS)[extra != "" :])))
    return data, draw(edits(data))


def touched(data: bytes, edit: Edit) -> tuple[bool, set[str]]:
    """Return whether a name without a checksum was hit, and whose bodies were."""
    hit: set[str] = set()
    is_name_hit = False
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for info in tar:
            own = info.offset_data - 512
            if edit.at < own and edit.stop >= info.offset:
                is_name_hit = True
            # The zeros at the end of a header are as good as the body's beginning.
            begin = own + len(data[own : own + 512].rstrip(b"\0"))
            is_flip = len(edit.instead) == edit.stop - edit.at
            if edit.at <= info.offset_data + info.size and edit.stop >= (
                info.offset_data if is_flip else begin
            ):
                hit.add(info.name)
    return is_name_hit, hit


@settings(max_examples=200)
@given(fuzzed(), st.sampled_from([1 << 20, 512, 300]))
def test_damage_delivers_nothing_wrong(case: tuple[bytes, Edit], size: int) -> None:
    """Each field has its bytes, unless they, or a name without checksum, were hit."""
    data, edit = case
    bodies = {
        (found["__key__"], field): body
        for found in walk(data)
        for field, body in found.items()
    }
    is_name_hit, hit = touched(data, edit)
    damaged = edit.made(data)
    results = walk(damaged, [size])
    assert plain(results) == plain(walk(damaged))
    assert not any(isinstance(found, Bad) for found in results[:-1])
    if is_name_hit:
        return
    for found in results:
        if not isinstance(found, Bad):
            for field, body in found.items():
                name = f"{found['__key__']}.{field}"
                assert name in hit or body == bodies[found["__key__"], field]


@settings(max_examples=150)
@given(st.integers(0, 10**6), st.integers(1, 255), st.sampled_from(list(FORMATS)))
def test_a_flip_in_a_header_is_seen(at: int, mask: int, form: str) -> None:
    """All samples before it come, and nothing from it on."""
    names = [f"{key}.{field}" for key in "abcd" for field in ("x", "y")]
    data = archive([Member(name, b"body" * 100) for name in names], form)
    number, place = divmod(at % (len(names) * 512), 512)
    changed = flipped(data, number * 1024 + place, mask)
    whole, results = walk(data), walk(changed, [1000])
    if results == whole:
        # Another way to write the same number; the rest of it is not read.
        assert 148 <= place < 156
    else:
        assert results[:-1] == whole[: max(0, (number - 1) // 2)]
        assert isinstance(results[-1], Bad)


@given(st.binary(max_size=3000), SIZES := st.lists(st.integers(1, 900), min_size=1))
def test_any_bytes_are_read_to_an_end(data: bytes, sizes: list[int]) -> None:
    """Nothing is raised, whatever is fed, and the pieces do not matter."""
    assert plain(walk(data, sizes)) == plain(walk(data))


RECORDS = b"12 path=a.x\n", b"9 size=1\n", b"path=", b"0 ", b"12", b" ", b"\n", b"\0"
BLOCKS = st.one_of(
    st.binary(min_size=512, max_size=512).map(signed),
    st.builds(
        header,
        st.binary(max_size=99),
        st.integers(0, 2000) | st.binary(min_size=12, max_size=12),
        st.sampled_from([bytes([kind]) for kind in b"0\0001257LKxXgSDZ"]),
    ),
    st.builds(
        lambda key, value, kind: pax({key: value}, kind),
        st.sampled_from(["path", "size", "GNU.sparse.map", "mtime"]),
        st.text(max_size=20) | st.integers(0, 3000).map(str),
        st.sampled_from([b"x", b"g"]),
    ),
    st.lists(st.sampled_from(RECORDS), max_size=6).map(
        lambda records: member(b"x", b"".join(records), b"x")
    ),
    st.binary(max_size=600).map(padded),
    st.just(ZEROS[:512]),
)


@settings(max_examples=150)
@given(st.lists(BLOCKS, max_size=8), SIZES)
def test_any_headers_are_read_to_an_end(blocks: list[bytes], sizes: list[int]) -> None:
    """So it is with headers whose checksum is right, and nothing else."""
    data = b"".join(blocks)
    whole = plain(walk(data, max_sample_bytes=1000))
    assert plain(walk(data, sizes, max_sample_bytes=1000)) == whole
