"""Lines and packed shards: errors name the place of damage; nothing else is lost.

JSON lines give the same samples with and without orjson: those of ``json``.
"""

import bz2
import functools
import gzip
import io
import json
import lzma
import os
import resource
import shutil
import struct
import zipfile
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st
from obstore.store import LocalStore
from PIL import Image

from aioloader.datasets import JSONLinesDataset, MDSDataset, TarDataset, TextDataset
from aioloader.datasets.lines import JSONDecoder, samples
from aioloader.datasets.mds import decoder_of
from aioloader.errors import DatasetError, StateMismatchError
from aioloader.testing import check_shard_format
from datasets.shards import check_resumes, read
from datasets.tar_archives import Member, archive, steps
from object_server import ObjectServer

PACKERS: dict[str, Any] = {
    "gz": gzip.compress,
    "zst": zstandard.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
}


async def outcomes(stream: Any) -> list[Any]:
    return (await read(stream, errors=DatasetError))[0]


async def test_a_damaged_line_fails_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\r\n\n  \n{"a": \n"\xff"\n[2]')
    lines = await outcomes(JSONLinesDataset(str(path)))
    assert (lines[0], lines[-1]) == ({"a": 1}, [2])
    assert [type(line) for line in lines[1:-1]] == [DatasetError, DatasetError]
    assert str(path) in str(lines[1])
    assert "the line at byte 14 is damaged" in str(lines[1])
    assert "byte 21" in str(lines[2])


async def test_text_is_decoded_with_its_encoding(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("grün\nrot".encode("latin-1"))
    latin = TextDataset(str(path), encoding="latin-1")
    assert (await read(latin))[0] == ["grün", "rot"]
    lines = await outcomes(TextDataset(str(path)))
    assert "'utf-8' codec can't decode" in str(lines[0])
    assert lines[1] == "rot"
    with pytest.raises(LookupError):
        TextDataset(str(path), encoding="klingon")


def damaged_tar(path: Path) -> None:
    """Write a shard that is damaged after 1,101 samples, the last of which is lost."""
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
async def test_damage_is_reported_on_resume_too(
    kind: Any, name: str, write: Any, tmp_path: Path
) -> None:
    """A state before the damage leads to it again; one after it has nothing left."""
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
async def test_lines_resume_after_any_line(length: int, tmp_path: Path) -> None:
    """Short lines share a piece, long ones span several."""
    lines = [f"{n:0{length}}" for n in range(2500)]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    stream = TextDataset(f"{tmp_path}/a.txt", max_bytes=1 << 18)
    stops = (0, 1, 144, 145, 146, 1023, 1024, 1025, 2300, 2499, 2500)
    await check_resumes(stream, lines, stops)


@pytest.mark.parametrize("ending", PACKERS)
@pytest.mark.slow
async def test_a_zip_bomb_takes_little_memory(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.txt.{ending}"
    pack = PACKERS[ending]
    path.write_bytes(pack(bytes(300 << 20) + b"\nlast"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lines = await outcomes(TextDataset(str(path), max_sample_bytes=1 << 20))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert lines[1] == "last"
    assert grown < 150_000  # KB


@pytest.mark.slow
@pytest.mark.parametrize("ending", PACKERS)
async def test_damaged_packed_shards_are_an_error(ending: str, tmp_path: Path) -> None:
    """The checksum shows it, at the end at the latest; the next shard is read."""
    data = bytearray(PACKERS[ending](os.urandom(3000).hex().encode()))
    for place in range(30, len(data) - 8, 211):
        damaged = bytearray(data)
        damaged[place] ^= 0x55
        (tmp_path / f"a.txt.{ending}").write_bytes(damaged)
        (tmp_path / f"b.txt.{ending}").write_bytes(PACKERS[ending](b"fine"))
        lines = await outcomes(TextDataset(f"{tmp_path}/{{a,b}}.txt.{ending}"))
        assert lines[-1] == "fine"
        if ending != "zst":  # its checksum is optional, and off here
            assert any(isinstance(line, DatasetError) for line in lines)


# -- with and without orjson ----------------------------------------------------------


# Lines that json and orjson read differently, or only one of them.
ODD = [
    b"18446744073709551616", b"-9223372036854775809",
    b'{"id": [1, 123456789012345678901234567890]}', b"9223372036854775807",
    b"18446744073709551615", b"1e999", b"-1e999", b"NaN",
    b'{"a": [-Infinity, Infinity]}', b'{"a": 1, "a": 2}', rb'"\ud800"',
    rb'"\ude00\ud83d"', b'"\xed\xa0\x80"', b"\xef\xbb\xbf1", b'"a\x00b"', b"{'a'}",
    '"x"'.encode("utf-16"), b"-0", b"-0.0",
    b"0.1234567890123456789012345678901234567890", b"9" * 5000, b"[" * 600 + b"]" * 600,
    b"[" * 100_000, b'{"a":' * 1020 + b"1" + b"}" * 1020, b'"\xff"', b"[1,]", b"\r",
    b"  ", b"", b"1 \r", b"\x0c1",
]  # fmt: skip
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
    """Yield the samples of lines as text, and the offset after each block."""
    make = functools.partial(samples, JSONDecoder(), 1 << 20)
    for block, offset in steps(make, b"\n".join(lines), limits=[limit]):
        for sample in block:
            yield str(sample.error) if hasattr(sample, "error") else repr(sample)
        yield offset


def both(lines: list[bytes], limit: int = 1024) -> tuple[list[Any], list[Any]]:
    with_it = list(made(lines, limit))
    with mock.patch("aioloader.datasets.lines._orjson_loads", return_value=None):
        return with_it, list(made(lines, limit))


@given(
    st.lists(LINES | st.sampled_from(ODD) | st.binary(max_size=9), max_size=9),
    st.integers(1, 9),
)
@example(lines=ODD, limit=1024)
@example(lines=ODD, limit=1)
def test_orjson_and_json_read_the_same(lines: list[bytes], limit: int) -> None:
    samples, expected = both(lines, limit)
    assert samples == expected


@pytest.mark.slow
@pytest.mark.parametrize("line", ODD)
def test_lines_are_read_as_json_reads_them(line: bytes) -> None:
    sample = next(iter(made([line])), None)
    try:
        assert sample == repr(json.loads(line))
    except (ValueError, RecursionError):
        assert sample is None or not line.strip() or "damaged" in str(sample)


@pytest.mark.parametrize("pad", range(20))
def test_integers_are_exact_at_any_place(pad: int) -> None:
    """Alone or next to long fractions, at both ends of the text that is checked."""
    large = b"9" * 20
    for rest in (b"%s", b"-%s", b"0.%s", b"[0.%s, %s]", b"[%s, 0.%s]", b"[0.1, %s]"):
        line = b" " * pad + rest.replace(b"%s", large)
        samples, expected = both([b"[]" * (pad % 2), line])
        assert samples == expected


# -- MDS shards that MosaicML's writer wrote -------------------------------------------

# Made by ``MDSWriter`` of mosaicml-streaming 0.13.0 (which cannot be installed with
# the numpy of the tests) with ``written(k)`` as sample ``k``: eight of them in ``raw``,
# four in ``zstd`` and in ``gz``, and a pickle in ``pkl``.
WRITTEN = Path(__file__).with_name("mds_written.zip")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with zipfile.ZipFile(WRITTEN) as packed:
        packed.extractall(tmp_path)
    return tmp_path


def picture(k: int) -> np.ndarray[Any, Any]:
    return np.full((4, 5, 3), k * 7 % 256, np.uint8)


def jpeg(k: int) -> np.ndarray[Any, Any]:
    data = io.BytesIO()
    Image.fromarray(picture(k)).save(data, "JPEG")
    return np.asarray(Image.open(data))


def written(k: int) -> dict[str, Any]:
    """Return sample ``k``, with pixels for pictures."""
    return {
        "b": bytes([k]) * k,
        "s": f"número {k}",
        "i": -k,
        "u8": np.uint8(k),
        "i16": np.int16(-k),
        "u32": np.uint32(k * 1000),
        "i64": np.int64(-(10**15) * k),
        "f16": np.float16(k / 4),
        "f32": np.float32(k / 3),
        "f64": np.float64(k / 7),
        "si": 10**30 + k,
        "sf": k / 9,
        "sd": Decimal(k) / Decimal(8),
        "j": {"k": [k, None, "x"]},
        "nd": np.arange(k + 1, dtype=np.int32).reshape(1, k + 1),
        "ndt": np.full((2, k + 1), k, np.float32),
        "nds": np.full((2, 3), k, np.int16),
        "pil": picture(k),
        "jpeg": jpeg(k),
        "png": picture(k),
        "lj": [jpeg(k)] * (k % 3),
        "lp": [picture(k)] * 2,
        "ll": [picture(k)],
        "ja": [jpeg(k), jpeg(k + 1)],
    }


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: plain(value[name]) for name in sorted(value)}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, Image.Image):
        value = np.asarray(value)
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    return type(value), value


@pytest.mark.parametrize(("kind", "count"), [("raw", 8), ("zstd", 4), ("gz", 4)])
async def test_reads_what_mosaicml_wrote(kind: str, count: int, folder: Path) -> None:
    expected = [plain(written(k)) for k in range(count)]
    samples, _ = await read(MDSDataset(folder / kind))
    assert [plain(sample) for sample in samples] == expected
    if kind != "gz":
        files = {path.name: path.read_bytes() for path in (folder / kind).glob("s*")}
        files["index.json"] = (folder / kind / "index.json").read_bytes()
        objects = {f"train/{name}": data for name, data in files.items()}
        with ObjectServer(objects) as server:
            samples, _ = await read(MDSDataset("train", store=server.url))
            assert [plain(sample) for sample in samples] == expected


@pytest.mark.parametrize("pattern", ["*", "**", "{raw,zstd}", "[rz]*", "../in/*"])
async def test_directories_of_mds_match_patterns(
    pattern: str, folder: Path, tmp_path: Path
) -> None:
    """On disk and in a store; other files next to them do not match."""
    for kind in ("raw", "zstd"):
        shutil.copytree(folder / kind, tmp_path / "in" / kind)
    (tmp_path / "in" / "notes.txt").write_text("none of them")
    expected = [-k for count in (8, 4) for k in range(count)]
    samples, _ = await read(MDSDataset(f"{tmp_path}/in/{pattern}"))
    assert [sample["i"] for sample in samples] == expected
    if ".." not in pattern:
        samples, _ = await read(MDSDataset(pattern, store=LocalStore(tmp_path / "in")))
        assert [sample["i"] for sample in samples] == expected
    with pytest.raises(ValueError, match=r"no shard matches '.*/none\*/index\.json'"):
        await read(MDSDataset(f"{tmp_path}/none*"))


@pytest.mark.slow
async def test_mds_keeps_the_laws_of_formats(folder: Path) -> None:
    for kind in ("raw", "zstd"):
        await check_shard_format(MDSDataset(folder / kind).made_by, samples=4)


async def test_mds_shards_are_cut_for_more_readers(folder: Path) -> None:
    parts = [(await read(MDSDataset(folder / "raw").shard(r, 5)))[0] for r in range(5)]
    assert [sample["i"] for part in parts for sample in part] == [-k for k in range(8)]
    assert all(parts)
    _, state = await read(MDSDataset(folder / "raw").shard(0, 5), 1)
    resumed = MDSDataset(folder / "zstd").shard(0, 2)
    with pytest.raises(StateMismatchError):
        resumed.load_state_dict({**state, "readers": 2})
    with pytest.raises(ValueError, match=r"2 parts only, but .* 3 readers.*compressed"):
        await read(MDSDataset(folder / "zstd").shard(0, 3))


async def test_unsafe_and_unknown_encodings_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"column 'x': .*allow_unsafe_types=True"):
        await read(MDSDataset(folder / "pkl"))
    samples, _ = await read(MDSDataset(folder / "pkl", allow_unsafe_types=True))
    assert samples == [{"x": [1]}]
    for encoding in ("nosuch", "ndarray:object"):
        with pytest.raises(ValueError, match="unknown"):
            decoder_of(encoding, allow_unsafe_types=True)


def change(path: Path, key: str, value: Any) -> None:
    index = json.loads(path.read_text())
    index["shards"][0][key] = value
    path.write_text(json.dumps(index))


async def test_damaged_mds_samples_are_reported(folder: Path) -> None:
    raw = folder / "raw"
    data = bytearray((raw / "shard.00000.mds").read_bytes())
    _, second, third, end = struct.unpack_from("<4I", data, 4)
    (length,) = struct.unpack_from("<I", data, second)  # of it and the next one
    struct.pack_into("<I", data, second, length + end - third)
    (raw / "shard.00000.mds").write_bytes(data)
    data = bytearray((raw / "shard.00001.mds").read_bytes())
    place = data.index(b'{"k": [')
    data[place] = ord("?")
    (raw / "shard.00001.mds").write_bytes(data)
    (raw / "shard.00002.mds").write_bytes((raw / "shard.00002.mds").read_bytes()[:-9])
    samples, _ = await read(MDSDataset(raw), errors=DatasetError)
    failures = [str(sample) for sample in samples if isinstance(sample, DatasetError)]
    numbers = [sample["i"] for sample in samples if isinstance(sample, dict)]
    assert numbers == [0, -4, -5, -6]
    words = f"a sample to byte {end:,}, which its table ends at {third:,}"
    assert words in failures[0]
    assert "column 'j': JSONDecodeError" in failures[1]
    assert "shard.00002.mds' has 6,560 of 6,569 bytes" in failures[2]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("version", 3, "a shard has format 'mds', version 3"),
        ("samples", 2, "2 in 10,204 bytes|where the index has 2"),
        ("raw_data", None, "is no index of MDS shards"),
        ("raw_data", {"basename": "a", "bytes": "5"}, "is no index of MDS shards"),
        ("samples", None, "is no index of MDS shards"),
        (
            "zip_data",
            {"basename": "shard.00000.mds.br", "bytes": 1, "hashes": {}},
            r"mds\.br.* only gz and zstd are supported",
        ),
    ],
)
async def test_a_wrong_mds_index_is_refused(
    key: str, value: Any, words: str, folder: Path
) -> None:
    change(folder / "raw" / "index.json", key, value)
    with pytest.raises(DatasetError, match=words):
        await read(MDSDataset(folder / "raw"))
