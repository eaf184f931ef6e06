"""MDS shards that MosaicML's writer wrote, and what is wrong with others.

``mds_written.zip`` was made by ``MDSWriter`` of mosaicml-streaming 0.13.0 (which cannot
be installed beside the numpy of the tests) with ``written(k)`` as sample ``k``: eight
of them in ``raw``, four in ``zstd`` and in ``gz``, and a pickle in ``pkl``.
"""

import io
import json
import zipfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from aioloader.datasets import MDSDataset
from aioloader.datasets._mds_encodings import decoder_of
from aioloader.errors import DatasetError, StateMismatchError
from aioloader.testing import check_shard_format
from datasets.shards import read
from object_server import ObjectServer

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
        return [plain(one) for one in value]
    if isinstance(value, Image.Image):
        value = np.asarray(value)
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    return type(value), value


@pytest.mark.parametrize(("kind", "count"), [("raw", 8), ("zstd", 4), ("gz", 4)])
async def test_reads_what_mosaicml_wrote(kind: str, count: int, folder: Path) -> None:
    expected = [plain(written(k)) for k in range(count)]
    found, _ = await read(MDSDataset(folder / kind))
    assert [plain(one) for one in found] == expected
    if kind != "gz":
        files = {path.name: path.read_bytes() for path in (folder / kind).glob("s*")}
        files["index.json"] = (folder / kind / "index.json").read_bytes()
        objects = {f"train/{name}": data for name, data in files.items()}
        with ObjectServer(objects) as server:
            found, _ = await read(MDSDataset("train", store=server.url))
            assert [plain(one) for one in found] == expected


@pytest.mark.slow
async def test_it_keeps_the_laws_of_formats(folder: Path) -> None:
    for kind in ("raw", "zstd"):
        await check_shard_format(MDSDataset(folder / kind).made_by, samples=4)


async def test_shards_are_cut_for_more_readers(folder: Path) -> None:
    parts = [(await read(MDSDataset(folder / "raw").shard(r, 5)))[0] for r in range(5)]
    assert [one["i"] for part in parts for one in part] == [-k for k in range(8)]
    assert all(parts)
    _, state = await read(MDSDataset(folder / "raw").shard(0, 5), 1)
    other = MDSDataset(folder / "zstd").shard(0, 2)
    with pytest.raises(StateMismatchError):
        other.load_state_dict({**state, "readers": 2})
    with pytest.raises(ValueError, match=r"2 parts only, but .* 3 readers.*compressed"):
        await read(MDSDataset(folder / "zstd").shard(0, 3))


async def test_unsafe_and_unknown_encodings(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"column 'x': .*allow_unsafe_types=True"):
        await read(MDSDataset(folder / "pkl"))
    found, _ = await read(MDSDataset(folder / "pkl", allow_unsafe_types=True))
    assert found == [{"x": [1]}]
    for encoding in ("nosuch", "ndarray:object"):
        with pytest.raises(ValueError, match="unknown"):
            decoder_of(encoding, allow_unsafe_types=True)


def change(path: Path, key: str, value: Any) -> None:
    index = json.loads(path.read_text())
    index["shards"][0][key] = value
    path.write_text(json.dumps(index))


async def test_what_is_damaged_is_told(folder: Path) -> None:
    raw = folder / "raw"
    data = bytearray((raw / "shard.00001.mds").read_bytes())
    at = data.index(b'{"k": [')
    data[at] = ord("?")
    (raw / "shard.00001.mds").write_bytes(data)
    (raw / "shard.00002.mds").write_bytes((raw / "shard.00002.mds").read_bytes()[:-9])
    found, _ = await read(MDSDataset(raw), errors=DatasetError)
    failures = [str(one) for one in found if isinstance(one, DatasetError)]
    numbers = [one["i"] for one in found if isinstance(one, dict)]
    assert numbers == [0, -1, -2, -4, -5, -6]
    assert ["column 'j': JSONDecodeError" in text for text in failures] == [True, False]
    assert "shard.00002.mds' has 6,560 of 6,569 bytes" in failures[1]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("version", 3, "a shard has format 'mds', version 3"),
        ("samples", 2, "2 in 10,204 bytes|where the index has 2"),
        ("raw_data", None, "is not an index of MDS shards"),
        (
            "zip_data",
            {"basename": "shard.00000.mds.br", "bytes": 1, "hashes": {}},
            r"mds\.br.* only gz and zstd are supported",
        ),
    ],
)
async def test_an_index_that_does_not_fit(
    key: str, value: Any, words: str, folder: Path
) -> None:
    change(folder / "raw" / "index.json", key, value)
    with pytest.raises(DatasetError, match=words):
        await read(MDSDataset(folder / "raw"))
