"""Lines and packed shards: damage is told with its place, and nothing else is lost.

JSON lines give the same samples with and without orjson: those of ``json``.
"""

import bz2
import contextlib
import functools
import gzip
import itertools
import json
import lzma
import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from aioloader._order.blocks import Bad
from aioloader.datasets import JSONLinesDataset, TarDataset, TextDataset, _engine, _json
from aioloader.datasets._json import JSONDecoder
from aioloader.datasets._stores.unpack import unpacker_of
from aioloader.datasets.lines import samples, without_end
from aioloader.errors import DatasetError
from datasets.shards import check_resumes, read
from datasets.tar_archives import Member, archive, steps

PACKERS: dict[str, Any] = {
    "gz": gzip.compress,
    "zst": zstandard.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
}


async def outcomes(stream: Any) -> list[Any]:
    return (await read(stream, errors=DatasetError))[0]


class Raw:
    def __init__(self, *, at_once: bool) -> None:
        self._at_once = at_once

    def one(self, line: bytes) -> list[bytes]:
        return [line]

    def is_plain(self, piece: Any) -> bool:
        return True

    def many(
        self, lines: Sequence[bytes], longest: int, *, is_plain: bool
    ) -> list[bytes] | None:
        return list(map(without_end, lines)) if self._at_once else None


@given(
    lines=st.lists(st.binary(max_size=12).filter(lambda b: b"\n" not in b)),
    cuts=st.lists(st.integers(0, 200)),
    is_closed=st.booleans(),
    limit=st.integers(1, 5),
    at_once=st.booleans(),
)
def test_lines_whatever_the_pieces(
    lines: list[bytes], cuts: list[int], is_closed: bool, limit: int, at_once: bool
) -> None:
    data = b"\n".join(lines) + (b"\n" if is_closed else b"")
    make = functools.partial(samples, Raw(at_once=at_once), 100)
    bounds = [0, *sorted(cut for cut in cuts if 0 < cut < len(data)), len(data)]
    sizes = [stop - start for start, stop in itertools.pairwise(bounds) if stop > start]
    found: list[bytes] = []
    for block, at in steps(make, data, [*sizes, 1], [limit]):
        found += block
        assert at == len(data) or data[at - 1 : at] == b"\n"
        assert found == expected_of(data[:at])
    assert found == expected_of(data)


def expected_of(data: bytes) -> list[bytes]:
    return (
        [line.removesuffix(b"\r") for line in data.removesuffix(b"\n").split(b"\n")]
        if data
        else []
    )


async def test_bad_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\r\n\n  \n{"a": \n"\xff"\n[2]')
    found = await outcomes(JSONLinesDataset(str(path)))
    assert (found[0], found[-1]) == ({"a": 1}, [2])
    assert [type(one) for one in found[1:-1]] == [DatasetError, DatasetError]
    assert str(path) in str(found[1])
    assert "the line at byte 14 is damaged" in str(found[1])
    assert "byte 21" in str(found[2])


async def test_text_of_another_encoding(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("grün\nrot".encode("latin-1"))
    assert (await read(TextDataset(str(path), encoding="latin-1")))[0] == [
        "grün",
        "rot",
    ]
    found = await outcomes(TextDataset(str(path)))
    assert "'utf-8' codec can't decode" in str(found[0])
    assert found[1] == "rot"
    with pytest.raises(LookupError):
        TextDataset(str(path), encoding="klingon")


def damaged_tar(path: Path) -> None:
    """Write a shard that is damaged behind 1,100 samples and one that it costs."""
    damaged = bytearray(archive(Member(f"{place}.txt") for place in range(1200)))
    damaged[1101 * 512] = 0xFF
    path.write_bytes(gzip.compress(damaged) if path.suffix == ".gz" else damaged)


def damaged_lines(path: Path) -> None:
    path.write_text("\n".join([*map(str, range(1100)), "{"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "write"),
    [
        (TarDataset, "a.tar", damaged_tar),
        (TarDataset, "a.tar.gz", damaged_tar),
        (JSONLinesDataset, "a.jsonl", damaged_lines),
    ],
)
async def test_damage_is_told_once(
    kind: Any, name: str, write: Any, tmp_path: Path
) -> None:
    """From a state behind it there is nothing; one before it leads to it again."""
    write(tmp_path / name)

    def stream() -> Any:
        return kind(str(tmp_path / name), max_bytes=1 << 18)

    whole = [*map(str, await outcomes(stream()))]
    assert len(whole) == 1101
    assert "is damaged" in whole[-1]
    for count in (0, 1, 600, 1023, 1024, 1025, len(whole) - 1, len(whole)):
        head, state = await read(stream(), count, errors=DatasetError)
        rest, end = await read(stream(), 0, state, errors=DatasetError)
        assert end == state
        rest, _ = await read(stream(), state=state, errors=DatasetError)
        assert [*map(str, head + rest)] == whole


@pytest.mark.parametrize("length", [3, 900])
async def test_a_state_at_any_line(length: int, tmp_path: Path) -> None:
    """Of short lines, cut from one piece in several blocks, or long ones of several."""
    lines = [f"{at:0{length}}" for at in range(2500)]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    stream = TextDataset(f"{tmp_path}/a.txt", max_bytes=1 << 18)
    stops = (0, 1, 144, 145, 146, 1023, 1024, 1025, 2300, 2499, 2500)
    await check_resumes(stream, lines, stops)


@pytest.mark.slow
async def test_a_line_of_a_gigabyte(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with path.open("wb") as file:
        file.write(b"first\n")
        file.truncate(1 << 30)
        file.seek(0, os.SEEK_END)
        file.write(b"\nlast")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = await outcomes(TextDataset(str(path), max_sample_bytes=1 << 20))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert (found[0], found[2]) == ("first", "last")
    assert "the line at byte 6 has 1,073,741,818 bytes, over" in str(found[1])
    assert grown < 200_000  # KB


@pytest.mark.parametrize("ending", PACKERS)
@pytest.mark.slow
async def test_a_bomb_is_unpacked_by_the_piece(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.txt.{ending}"
    pack = PACKERS[ending]
    path.write_bytes(pack(bytes(300 << 20) + b"\nlast"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = await outcomes(TextDataset(str(path), max_sample_bytes=1 << 20))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert found[1] == "last"
    assert grown < 150_000  # KB


@pytest.mark.slow
@pytest.mark.parametrize("ending", PACKERS)
async def test_packed_shards_that_are_damaged(ending: str, tmp_path: Path) -> None:
    """The checksum tells, at the latest at the end; the next shard comes."""
    data = bytearray(PACKERS[ending](os.urandom(3000).hex().encode()))
    for place in range(30, len(data) - 8, 211):
        damaged = bytearray(data)
        damaged[place] ^= 0x55
        (tmp_path / f"a.txt.{ending}").write_bytes(damaged)
        (tmp_path / f"b.txt.{ending}").write_bytes(PACKERS[ending](b"fine"))
        found = await outcomes(TextDataset(f"{tmp_path}/{{a,b}}.txt.{ending}"))
        assert found[-1] == "fine"
        if ending != "zst":  # its checksum is optional, and off here
            assert any(isinstance(one, DatasetError) for one in found)


@pytest.mark.slow
@pytest.mark.parametrize("ending", PACKERS)
@given(data=st.data())
def test_unpackers_never_hang(ending: str, data: st.DataObject) -> None:
    make = unpacker_of(f"a.{ending}")
    assert make is not None
    packed = bytearray(PACKERS[ending](data.draw(st.binary(max_size=300)) * 20))
    for place in data.draw(st.lists(st.integers(0, len(packed) - 1), max_size=3)):
        packed[place] ^= data.draw(st.integers(1, 255))
    pieces = (packed[start : start + 50] for start in range(0, len(packed), 50))
    unpacking, piece = make("x"), None
    with contextlib.suppress(DatasetError, StopIteration):
        while True:
            found = unpacking.send(piece)
            piece = next(pieces, b"") if found is None else None


async def test_blocks_are_smaller_where_samples_hold_containers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector looks at what is held; a block goes on from piece to piece."""
    monkeypatch.setattr(_engine, "_TURN", 60.0)
    text = '"' + "x" * 80 + '"'  # of which 5,000 are several pieces
    lengths = []
    for line in (text, f"[{text}]"):
        (tmp_path / "shard.jsonl").write_text(f"{line}\n" * 5000)
        async with aiter(JSONLinesDataset(tmp_path / "shard.jsonl")) as blocks:
            pulls = [len(await blocks.pull(5000)) for _ in range(3)]
        lengths.append(pulls)
    assert lengths == [[256, 2048, 2048], [256, 256, 256]]


# -- with and without orjson ----------------------------------------------------------


# What one of the two reads in a way of its own, or not at all.
ODD = [
    b"18446744073709551616",
    b"-9223372036854775809",
    b'{"id": [1, 123456789012345678901234567890]}',
    b"9223372036854775807",
    b"18446744073709551615",
    b"1e999",
    b"-1e999",
    b"NaN",
    b'{"a": [-Infinity, Infinity]}',
    b'{"a": 1, "a": 2}',
    rb'"\ud800"',
    rb'"\ude00\ud83d"',
    b'"\xed\xa0\x80"',
    b"\xef\xbb\xbf1",
    b'"a\x00b"',
    b"{'a'}",
    '"x"'.encode("utf-16"),
    b"-0",
    b"-0.0",
    b"0.1234567890123456789012345678901234567890",
    b"9" * 5000,
    b"[" * 600 + b"]" * 600,
    b"[" * 100_000,
    b'{"a":' * 1020 + b"1" + b"}" * 1020,
    b'"\xff"',
    b"[1,]",
    b"\r",
    b"  ",
    b"",
    b"1 \r",
    b"\x0c1",
]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(2**63 - 3, 2**64 + 3)
    | st.floats()
    | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
LINES = st.builds(
    lambda value, ascii_only: json.dumps(value, ensure_ascii=ascii_only).encode(
        "utf-8", "surrogatepass"
    ),
    VALUES,
    st.booleans(),
)


def made(lines: list[bytes], limit: int = 1024) -> Iterator[Any]:
    """Yield what lines become: type, value and place of each."""
    make = functools.partial(samples, JSONDecoder(), 1 << 20)
    for block, at in steps(make, b"\n".join(lines), limits=[limit]):
        for sample in block:
            yield str(sample.error) if type(sample) is Bad else repr(sample)
        yield at


def both(lines: list[bytes], limit: int = 1024) -> tuple[list[Any], list[Any]]:
    with_it = list(made(lines, limit))
    with mock.patch.object(_json, "_orjson_loads", return_value=None):
        return with_it, list(made(lines, limit))


@given(
    st.lists(LINES | st.sampled_from(ODD) | st.binary(max_size=9), max_size=9),
    st.integers(1, 9),
)
@example(lines=ODD, limit=1024)
@example(lines=ODD, limit=1)
def test_the_same_with_and_without_orjson(lines: list[bytes], limit: int) -> None:
    found, expected = both(lines, limit)
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("line", ODD)
def test_what_json_reads_is_read(line: bytes) -> None:
    found = next(iter(made([line])), None)
    try:
        assert found == repr(json.loads(line))
    except (ValueError, RecursionError):
        assert found is None or not line.strip() or "damaged" in str(found)


def test_integers_are_exact_in_large_blocks() -> None:
    for at in range(40):
        lines = [b'{"n": %d}' % n for n in range(40)]
        lines[at] = b'{"pad": "%s", "n": %d}' % (b"x" * at, 10**18 + 10**19)
        found, expected = both(lines)
        assert found == expected
        last = at == 39  # a line without its end is a block of its own
        assert str(10**18 + 10**19) in found[at + last]


@pytest.mark.parametrize("pad", range(20))
def test_integers_are_exact_at_any_place(pad: int) -> None:
    """Alone, beside fractions that are as long, at both ends of what is looked at."""
    large = b"9" * 20
    for rest in (b"%s", b"-%s", b"0.%s", b"[0.%s, %s]", b"[%s, 0.%s]", b"[0.1, %s]"):
        line = b" " * pad + rest.replace(b"%s", large)
        found, expected = both([b"[]" * (pad % 2), line])
        assert found == expected
