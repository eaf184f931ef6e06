"""Random access gives a stream's samples; unsupported or changed shards are refused."""

import asyncio
import itertools
import json
import os
import pickle
import re
import struct
import tarfile
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import own_format
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from obstore.store import MemoryStore, S3Store

from aioloader._cli.main import main
from aioloader.datasets import (
    ArrowDataset,
    ByteStream,
    IndexedDataset,
    JSONLinesDataset,
    MDSDataset,
    ParquetDataset,
    TarDataset,
    TextDataset,
)
from aioloader.errors import DatasetError, ShardChangedError
from beside import beside
from datasets.shards import bytes_of, read
from datasets.tar_archives import FORMATS, header, member, padded, pax
from object_server import ObjectServer
from python_process import python

# -- shards of every format ------------------------------------------------------------

MOST = 2800  # bytes of a sample
LIMIT: dict[str, Any] = {"max_sample_bytes": MOST}


def written(name: str, body: bytes, form: str) -> bytes:
    """Return one member as tarfile writes it."""
    info: Any = tarfile.TarInfo(name)
    info.size = len(body)
    return bytes(info.tobuf(FORMATS[form])) + padded(body)


def sparse(name: str, body: bytes) -> bytes:
    return pax({"GNU.sparse.major": "1", "GNU.sparse.name": name}) + member(b"x", body)


KEYS = st.sampled_from(["a", "a", "b", "d/é", f"{'l' * 90}/{'m' * 60}"])
NAMES = st.builds("{}.{}".format, KEYS, st.sampled_from(["txt", "cls", "seg.JPG"]))
NO_SAMPLES = st.sampled_from(["README", "__meta__/x.json", "d/.hidden"])
BODIES = st.sampled_from([0, 1, 511, 512, 513, 3000]).map(lambda size: b"x" * size)
MEMBERS = st.one_of(
    st.builds(written, NAMES | NO_SAMPLES, BODIES, st.sampled_from([*FORMATS])),
    # headers that do not describe the member's data, such as times
    st.builds(lambda body: pax({"mtime": "1.5"}) + member(b"b.t", body), BODIES),
    st.builds(lambda body: header(b"c.x", len(body), b"S") + padded(body), BODIES),
    st.builds(sparse, NAMES, BODIES),
    st.sampled_from([header(b"a.link", 0, b"2"), header(b"d/", 0, b"5")]),
)
ENDS = st.sampled_from([1, 2, 19]).map(lambda blocks: bytes(512 * blocks))
TARS = st.tuples(st.lists(MEMBERS).map(b"".join), ENDS).map(b"".join)

BOM = "\ufeff".encode()
ODD = [b"", b"null", b"nope{", b"\xff", b"9" * 25, b"1\r2", BOM + b"1", b"1" * MOST]
LINES = st.sampled_from([b'{"a": 1}', b"[1, 2]", '"é"'.encode(), *ODD, b"x" * 3000])
LINE = st.tuples(LINES, st.sampled_from([b"\n", b"\r\n", b"\n\n"])).map(b"".join)
FILES = st.tuples(st.sampled_from([b"", BOM]), st.lists(LINE).map(b"".join))
FILES_OF_LINES = FILES.map(b"".join) | FILES.map(lambda two: b"".join(two).rstrip())
RECORDS = st.lists(st.binary(max_size=9)).map(
    lambda records: b"".join(struct.pack("<I", len(data)) + data for data in records)
)
MDS_ENTRY = {
    "format": "mds",
    "version": 2,
    "zip_data": None,
    "column_names": ["b", "j", "n"],
    "column_encodings": ["bytes", "json", "uint16"],
    "column_sizes": [None, None, 2],
}


def mds_of(rows: list[tuple[bytes, bytes]]) -> bytes:
    """Return a shard with columns of bytes, JSON and a number."""
    samples = [
        struct.pack("<2I", len(raw), len(text)) + raw + text + struct.pack("<H", number)
        for number, (raw, text) in enumerate(rows)
    ]
    ends = itertools.accumulate(map(len, samples), initial=8 + 4 * len(rows))
    return b"".join([struct.pack(f"<{len(rows) + 2}I", len(rows), *ends), *samples])


TEXTS = st.sampled_from([b"[1]", b"nope{", b'{"k": null}'])
MDS = st.lists(st.tuples(st.binary(max_size=9), TEXTS), min_size=1).map(mds_of)
KINDS: dict[str, tuple[st.SearchStrategy[bytes], Any]] = {
    "tar": (TARS, partial(TarDataset, "in/*.tar", **LIMIT)),
    "jsonl": (FILES_OF_LINES, partial(JSONLinesDataset, "in/*.jsonl", **LIMIT)),
    "txt": (FILES_OF_LINES, partial(TextDataset, "in/*.txt", **LIMIT)),
    "rec": (RECORDS, partial(ByteStream, "in/*.rec", own_format.records)),
    "mds": (MDS, partial(MDSDataset, "in")),
}


def put(place: Any, objects: dict[str, bytes]) -> None:
    """Write objects to a directory, or to a store."""
    for name, data in objects.items():
        if isinstance(place, Path):
            (place / name).parent.mkdir(exist_ok=True)
            (place / name).write_bytes(data)
        else:
            obstore.put(place, name, data)


def objects_of(kind: str, shards: Sequence[bytes]) -> dict[str, bytes]:
    """Return shards by name, and the index of those of MDS."""
    objects = {f"in/{i}.{kind}": data for i, data in enumerate(shards)}
    if kind == "mds":
        entries = [
            MDS_ENTRY
            | {"raw_data": {"basename": name[3:], "bytes": len(data)}}
            | {"samples": struct.unpack_from("<I", data)[0]}
            for name, data in objects.items()
        ]
        objects["in/index.json"] = json.dumps({"shards": entries}).encode()
    return objects


def shown(results: Sequence[Any]) -> list[Any]:
    """Return results, errors by type and text."""
    return [
        (type(result), str(result)) if isinstance(result, Exception) else result
        for result in results
    ]


async def every(dataset: Any) -> list[Any]:
    """Return all samples; check that single reads and a batch equal them."""
    indices = range(len(dataset))
    async with dataset:
        reads = (dataset[index] for index in indices)
        results = shown(await asyncio.gather(*reads, return_exceptions=True))
        for index in indices:
            alone = await asyncio.gather(dataset[index], return_exceptions=True)
            assert shown(alone) == [results[index]]
        if dataset.__getitems__ and not any(type(x) is tuple for x in results):
            assert await dataset.__getitems__(indices) == results
    return results


async def check(stream: Any, pack: Path | None = None, *, scan: bool = False) -> Any:
    """Check that random access equals the stream; return the dataset."""
    expected = shown((await read(stream, errors=Exception))[0])
    dataset = await IndexedDataset.discover(stream, pack=pack, scan=scan)
    assert await every(dataset) == expected
    return dataset


@pytest.mark.law
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=settings().max_examples // 3)
@given(data=st.data())
def test_random_access_equals_the_stream(kind: str, data: st.DataObject) -> None:
    """Errors, too: from a scan, a pack, and the indexes that the command wrote."""
    strategy, make = KINDS[kind]
    objects = objects_of(kind, data.draw(st.lists(strategy, min_size=1, max_size=3)))
    with tempfile.TemporaryDirectory() as folder:
        root, store = Path(folder), MemoryStore()
        pack = root / "x.aioidx"

        async def check_scanned(place: Any) -> None:
            await (await check(make(store=place), scan=True)).save(pack)
            await check(make(store=place), pack)

        for place in (root, store):
            put(place, objects)
            asyncio.run(check_scanned(place))
        if kind == "rec":  # the command knows no custom formats
            return
        pack.unlink()
        shards = f"{root}/in" if kind == "mds" else f"{root}/in/*.{kind}"
        assert main(["index", "-q", shards, "--pack", str(pack)]) == 0
        asyncio.run(check(make(store=root), pack))
        if kind != "mds":  # their headers are the index
            assert main(["index", "-q", shards]) == 0
            indexes = {f"in/{path.name}": path for path in root.glob("in/*.idx")}
            put(store, {name: path.read_bytes() for name, path in indexes.items()})
        for place in (root, store):
            asyncio.run(check(make(store=place)))


@pytest.mark.parametrize("ending", ["arrow", "arrows"])
async def test_local_arrow_files_need_no_index(ending: str, tmp_path: Path) -> None:
    table = pa.table({"x": range(10), "s": ["é", None] * 5, "y": [{"k": b"v"}] * 10})
    names = [f"{name}.{ending}" for name in "01"]
    put(tmp_path, dict.fromkeys(names, bytes_of(table, ending, rows=3)))
    for columns in (None, ["x"]):
        stream = ArrowDataset(f"{tmp_path}/*.{ending}", columns=columns)
        dataset = await check(stream)
    longer = pa.concat_tables([table] * 2)
    put(tmp_path, {names[1]: bytes_of(longer, ending, rows=3)})
    with pytest.raises(DatasetError, match=f"{names[1]}' changed"):
        await dataset[-1]
    await dataset.aclose()
    put(store := MemoryStore(), {names[0]: bytes_of(table, ending, rows=3)})
    with pytest.raises(ValueError, match=r"' is remote, .*: download .* or write tars"):
        await IndexedDataset.discover(ArrowDataset(names[0], store=store))


TEN = b"".join(b"line %d\n" % i for i in range(10))
INDEX_OF_TEN = struct.pack("<11Q", *range(0, 77, 7))
# Messages about an index end with the command that writes it.
AGAIN = ".*`aioloader index"


async def test_indices_are_those_of_a_list(tmp_path: Path) -> None:
    put(tmp_path, {"0.txt": TEN, "1.txt": b"", "2.txt": b"last"})
    done: list[tuple[int, int]] = []
    stream, seen = TextDataset("*.txt", store=tmp_path), lambda *two: done.append(two)
    async with await IndexedDataset.discover(stream, scan=seen) as dataset:
        assert done == [(1, 3), (2, 3), (3, 3)]
        assert repr(dataset) == "IndexedDataset(TextDataset('*.txt'), 11 samples)"
        samples = [await dataset[index] for index in (3, -8, np.int64(3), -1)]
        assert samples == ["line 3", "line 3", "line 3", "last"]
        for index in (11, -12):
            with pytest.raises(IndexError, match=f"index {index} is out of range"):
                await dataset[index]


async def test_a_shard_may_exceed_four_gigabytes(tmp_path: Path) -> None:
    """All numbers of its pack have 64 bits."""
    large, stream = 1 << 32, TextDataset("*.txt", store=tmp_path)
    with (tmp_path / "0.txt").open("wb") as file:
        file.seek(large)
        file.write(b"last")
    index = struct.pack("<3Q", 0, large, large + 4)
    put(tmp_path, {"0.txt.idx": index, "1.txt": TEN, "1.txt.idx": INDEX_OF_TEN})
    await (await IndexedDataset.discover(stream)).save(tmp_path / "x.aioidx")
    packed = await IndexedDataset.discover(stream, pack=tmp_path / "x.aioidx")
    copied = await beside(lambda: pickle.loads(pickle.dumps(packed)))
    for dataset in (packed, copied):
        async with dataset:
            assert await dataset[1] == "last"
            assert await dataset[-1] == "line 9"


# -- what is refused -------------------------------------------------------------------

REFUSED: list[tuple[Any, str]] = [
    (["0.txt"], "must be a stream of shards, such as"),
    (TextDataset("0.txt").map(len), "a stream of shards, such as .* steps"),
    (TextDataset("0.txt", shuffle=True), "would ignore: .* give the loader a sampler"),
    (TextDataset("0.txt", interleave=2), "which random access would ignore"),
    (TextDataset("0.txt").shard(0, 2), "which random access would ignore"),
    (TextDataset("0.txt.gz"), "0.txt.gz' is compressed, .*: unpack it, or read the st"),
    (ParquetDataset("0.pq"), "a row costs all of its row group.*: write .* to tars"),
    (TextDataset("0.txt"), f"'0.txt' has no index, '0.txt.idx'{AGAIN}`, or pass scan="),
    (TextDataset("dali.txt"), f"dali.txt.idx' is not the index .* NVIDIA DALI{AGAIN}`"),
    (TextDataset("cut.txt"), f"cut.txt.idx' is not the index .* damaged{AGAIN}`"),
]


@pytest.mark.parametrize(("stream", "words"), REFUSED)
async def test_unsupported_streams_are_refused(
    stream: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    put(tmp_path, dict.fromkeys(["0.txt", "0.txt.gz", "dali.txt", "cut.txt"], TEN))
    put(tmp_path, {"dali.txt.idx": b"v1.2 1\n", "cut.txt.idx": INDEX_OF_TEN[:-1]})
    with pytest.raises((TypeError, ValueError, DatasetError), match=words):
        await IndexedDataset.discover(stream)


async def test_a_failing_progress_function_ends_the_scan(tmp_path: Path) -> None:
    put(tmp_path, {f"{i}.txt": TEN for i in range(9)})
    with pytest.raises(ZeroDivisionError):
        stream = TextDataset(f"{tmp_path}/?.txt")
        await IndexedDataset.discover(stream, scan=lambda done, _: done // 0)
    assert len(asyncio.all_tasks()) == 1


async def test_a_server_without_ranges_can_only_be_scanned(loopback: Any) -> None:
    stream = TextDataset(f"{loopback.at('norange')}/cats/z.bin")
    async with await IndexedDataset.discover(stream, scan=True) as dataset:
        with pytest.raises(DatasetError, match=r"must be read by ranges, .*: download"):
            await dataset[0]


@pytest.mark.parametrize(
    ("start", "stop", "why"),
    [
        *[(b"", -4, "it has "), (b"", 40, ""), (b"", 0, "it has 0 bytes")],
        (b"aioidx\x09", None, "it is of version"),
    ],
)
async def test_damaged_packs_are_refused(
    start: bytes, stop: int | None, why: str, tmp_path: Path
) -> None:
    """On disk and on a server."""
    put(tmp_path, {"0.txt": TEN})
    stream, pack = TextDataset(f"{tmp_path}/0.txt"), tmp_path / "x.aioidx"
    await (await IndexedDataset.discover(stream, scan=True)).save(pack)
    data, words = pack.read_bytes(), "x.aioidx' is no index of shards: "
    put(tmp_path, {"x.aioidx": start + data[len(start) : stop]})
    with ObjectServer({"x.aioidx": pack.read_bytes(), "0.txt": TEN}) as server:
        remote = TextDataset(f"{server.url}/0.txt"), f"{server.url}/x.aioidx"
        packs: list[Any] = [(stream, pack), remote]
        for of, address in packs:
            with pytest.raises(DatasetError, match=f"{words}{why}{AGAIN} --pack`"):
                await IndexedDataset.discover(of, pack=address)


async def test_packs_of_other_samples_are_refused(tmp_path: Path) -> None:
    put(tmp_path, {"0.txt": TEN, "1.txt": TEN})
    stream, pack = TextDataset(f"{tmp_path}/?.txt"), tmp_path / "x.aioidx"
    await (await IndexedDataset.discover(stream, scan=True)).save(pack)
    put(tmp_path, {"2.txt": TEN})
    coded = TextDataset(f"{tmp_path}/?.txt", encoding="latin-1")
    missing = "index of 2 shards, and 1 of 3 are not among them, such as .*2.txt"
    for refused, place, words in (
        (JSONLinesDataset(f"{tmp_path}/?.txt"), pack, f"samples as .* read as{AGAIN}"),
        (coded, pack, f"samples as .* read as .*iso8859-1{AGAIN} --pack`"),
        (stream, pack, f"{missing}{AGAIN} --pack`"),
        (stream, tmp_path / "none", "no such file: .*none"),
    ):
        with pytest.raises(DatasetError, match=words):
            await IndexedDataset.discover(refused, pack=place)
    with pytest.raises(ValueError, match=r"0\.txt' is something else than an index"):
        await IndexedDataset.discover(stream, pack=tmp_path / "0.txt")
    with pytest.raises(ValueError, match="pack and scan exclude each other"):
        await IndexedDataset.discover(stream, pack=pack, scan=True)
    await check(TextDataset(f"{tmp_path}/1.txt"), pack)  # a part is enough


# -- what has changed ------------------------------------------------------------------

NOW = {
    "longer": TEN + b"new\n",
    "shorter": TEN[:-30],
    "another layout": b"a" * 50 + b"\n" + TEN,
    "same size": TEN.replace(b"line", b"LINE"),
}


def replace(place: Any, name: str, data: bytes) -> None:
    """Overwrite a shard, with a later time."""
    put(place, {name: data})
    if isinstance(place, Path):  # their times are coarse
        os.utime(place / name, (2e9, 2e9))


KNOWN = ["pack", "index", "pack, read", "index, read"]
CHANGES = {*itertools.product(KNOWN, NOW)} - {("index", "same size")}  # none is known


@pytest.mark.parametrize(("known", "now"), sorted(CHANGES))
@pytest.mark.parametrize("kind", ["local", "memory"])
async def test_changed_shards_are_refused_and_others_are_read(
    kind: str, known: str, now: str, tmp_path: Path
) -> None:
    """Whether they changed since they were indexed or since they were read."""
    place: Any = tmp_path if kind == "local" else MemoryStore()
    put(place, {"0.txt": TEN, "1.txt": TEN})
    stream, pack, is_read = TextDataset("?.txt", store=place), None, "read" in known
    if "pack" in known:
        pack = tmp_path / "x.aioidx"
        await (await IndexedDataset.discover(stream, scan=True)).save(pack)
    else:
        put(place, dict.fromkeys(["0.txt.idx", "1.txt.idx"], INDEX_OF_TEN))
    if not is_read:
        replace(place, "1.txt", NOW[now])
    async with await IndexedDataset.discover(stream, pack=pack) as dataset:
        if is_read:
            assert await dataset[19] == "line 9"
            replace(place, "1.txt", NOW[now])
        words = rf"1\.txt' has changed since it was indexed: it{AGAIN}`, or restore"
        for index in (19, 10):
            assert await dataset[index - 10] == f"line {index - 10}"
            with pytest.raises(ShardChangedError, match=words) as caught:
                await dataset[index]
            assert str(caught.value.location).endswith("1.txt")
        if known == "index":  # or the new version would be that of the old index
            with pytest.raises(ShardChangedError, match=words):
                await dataset.save(tmp_path / "y.aioidx")


async def test_an_open_shard_stays_readable_when_replaced(tmp_path: Path) -> None:
    put(tmp_path, {"0.txt": TEN, "new": b""})
    stream = TextDataset(f"{tmp_path}/0.txt")
    async with await IndexedDataset.discover(stream, scan=True) as dataset:
        assert await dataset[0] == "line 0"
        (tmp_path / "new").replace(tmp_path / "0.txt")
        assert await dataset[9] == "line 9"


# Scripts that would crash the process, or run out of descriptors.
SCRIPTS = {
    "a shard that is cut in place": """
    open(path, "w").write("line\\n" * 9999)
    async with await IndexedDataset.discover(TextDataset(path), scan=True) as lines:
        await lines[0]
        os.truncate(path, 100)
        try: await lines[9998]
        except Exception as error: assert "has changed" in str(error)
""",
    "an Arrow file that is cut in place": """
    feather.write_feather(pa.table({"x": range(99999)}), path, "uncompressed")
    async with await IndexedDataset.discover(ArrowDataset(path)) as rows:
        await rows[0]
        os.truncate(path, 100)
        try: await rows[99998]
        except Exception as error: assert "changed" in str(error)
""",
    "more shards than descriptors": """
    for i in range(1100): open(f"{path}{i}", "w").write("line")
    stream = TextDataset(f"{path}*")
    pair = [await IndexedDataset.discover(stream, scan=True) for _ in range(2)]
    for lines in pair:
        for i in range(1100): assert await lines[i] == "line"
        assert await lines.__getitems__(range(1100)) == ["line"] * 1100
""",
}
BEGIN = """
import asyncio, os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
import pyarrow as pa, pyarrow.feather as feather
from aioloader.datasets import *
async def main(path):
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_truncation_and_many_shards_do_not_crash(name: str, tmp_path: Path) -> None:
    script = f"{BEGIN}{SCRIPTS[name]}\nasyncio.run(main(sys.argv[1]))"
    ended = python("-c", script, tmp_path / "0.txt")
    assert ended.returncode == 0, ended.stderr


# -- the command -----------------------------------------------------------------------


def indexed(stream: Any, pack: str | None = None) -> list[Any]:
    return asyncio.run(every(IndexedDataset(stream, pack=pack)))


def test_the_command_writes_an_index_per_shard(tmp_path: Path, capsys: Any) -> None:
    """Run again, it rewrites only the index of a changed shard."""
    names, pattern = ["0.txt", "1.txt"], f"{tmp_path}/*.txt"
    put(tmp_path, dict.fromkeys(names, TEN))
    for name in names:
        os.utime(tmp_path / name, (1, 1))
    indexes = [tmp_path / f"{name}.idx" for name in names]
    for _ in range(2):
        assert main(["index", pattern]) == 0
        said = capsys.readouterr().out.splitlines()
        assert said == [f"{index}: 10 samples" for index in indexes]
        assert {index.read_bytes() for index in indexes} == {INDEX_OF_TEN}
        for index in indexes:
            os.utime(index, (2, 2))
    put(tmp_path, {"1.txt": NOW["longer"]})
    os.utime(tmp_path / "1.txt", (2, 2))  # the times of some stores are coarse
    assert main(["index", "-q", *(f"{tmp_path}/{name}" for name in names)]) == 0
    assert not capsys.readouterr().out
    assert [index.stat().st_mtime == 2 for index in indexes] == [True, False]
    assert indexed(TextDataset(pattern))[-2:] == ["line 9", "new"]


def test_the_command_reads_only_changed_shards(tmp_path: Path, capsys: Any) -> None:
    pack, names = str(tmp_path / "x.aioidx"), ["0.txt", "1.txt"]
    with ObjectServer(dict.fromkeys(names, 99 * TEN)) as server:
        pattern = f"{server.url}/{{0..1}}.txt"
        for is_read in ([True, True], [False, False], [False, True]):
            if is_read == [False, True]:
                server.replace("1.txt", 98 * TEN)
            before = [server.counts(name).bytes for name in names]
            assert main(["index", pattern, "--pack", pack]) == 0
            after = [server.counts(name).bytes for name in names]
            sent = [now - then for now, then in zip(after, before, strict=True)]
            assert [amount > len(TEN) for amount in sent] == is_read
        said = [f"{pack!r}: {n:,} samples in 2 shards" for n in (1980, 1980, 1970)]
        assert capsys.readouterr().out.splitlines() == said
        assert indexed(TextDataset(pattern), pack) == 197 * TEN.decode().splitlines()


def test_the_command_writes_to_a_store(s3: str, capsys: Any) -> None:
    url, expected = "s3://bucket/indexed", 2 * TEN.decode().splitlines()
    http: Any = {"allow_http": True}
    store = S3Store("bucket", prefix="indexed", client_options=http)
    pattern, pack = f"{url}/?.txt", f"{url}/x.aioidx"
    command = ["index", pattern, "--option", "region=us-east-1"]
    put(store, {"0.txt": TEN, "1.txt": TEN})
    assert main([*command, "--pack", pack]) == 0
    assert indexed(TextDataset(pattern), pack) == expected
    put(store, {"1.txt": NOW["longer"]})
    changed = indexed(TextDataset(pattern), pack)[10:]
    assert {kind for kind, _ in changed} == {ShardChangedError}
    assert main([*command, "--pack", pack]) == main(command) == 0
    assert capsys.readouterr().out.splitlines() == [
        *(f"{pack!r}: {count} samples in 2 shards" for count in (20, 21)),
        *(f"{url}/{i}.txt.idx: {10 + i} samples" for i in range(2)),
    ]
    for index in (pack, None):
        assert indexed(TextDataset(pattern), index) == [*expected, "new"]
    obstore.delete(store, [entry["path"] for entry in obstore.list(store).collect()])


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ("0.txt 0.tar", 2, "all of one kind, got tar, txt"),
        ("0.parquet", 2, "X must be tars, lines"),
        ("none.txt", 2, "there is no file 'none.txt'"),
        ("none*.txt", 1, "no shard matches '.*none"),
        ("0.csv", 2, "files of other kinds need scan=True and save()"),
        ("in", 2, "MDS shards hold their index: write that of all, --pack"),
        ("0.txt.gz", 1, r"0\.txt\.gz' is compressed"),
        ("0.txt.gz --pack x.aioidx", 1, r"0\.txt\.gz' is compressed"),
    ],
)
def test_the_command_refuses_wrong_arguments(
    arguments: str, status: int, words: str, request: Any, tmp_path: Path, capsys: Any
) -> None:
    request.getfixturevalue("monkeypatch").chdir(tmp_path)
    files = ["0.txt", "0.tar", "0.parquet", "0.csv", "in/index.json", "0.txt.gz"]
    put(tmp_path, dict.fromkeys(files, b""))
    try:
        ended: Any = main(["index", *arguments.split()])
    except SystemExit as error:
        ended = error.code
    assert ended == status
    assert re.search(f"aioloader index: error: .*{words}", capsys.readouterr().err)
    assert len([*tmp_path.iterdir()]) == len(files)  # nothing was written
