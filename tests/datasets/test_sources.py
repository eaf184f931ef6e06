"""Sources of users and file systems of fsspec are read as every store is."""

import asyncio
import gzip
import json
import pickle
import re
import threading
import traceback
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import fsspec  # type: ignore[import-untyped]
import pyarrow as pa
import pytest
from fsspec.implementations.dirfs import DirFileSystem  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

from aioloader import DataLoader
from aioloader.datasets import (
    JSONLinesDataset,
    ObjectDataset,
    ParquetDataset,
    Piece,
    Requests,
    Source,
    TarDataset,
    TextDataset,
    Version,
)
from aioloader.errors import (
    DatasetError,
    ObjectNotFoundError,
    ObjectPermissionError,
    TruncatedReadError,
)
from beside import beside
from datasets.changing import Handler, Server
from datasets.shards import (
    NAMES,
    bytes_of,
    check_resumes,
    names,
    write_tar,
    write_text,
)

QUICK = Requests(timeout=5, deadline=0.3, base_delay=0.001, max_delay=0.001)
PATIENT = Requests(base_delay=0.001, max_delay=0.001)
LINES = [f"{n:07}" for n in range(30_000)]
BIG = "".join(f"{line}\n" for line in LINES).encode()


class Shop(Source):
    """Objects in a dict; the next answers may fail, or be cut short."""

    label = "shop://objects"

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects = objects
        self.failures: list[BaseException] = []
        self.cut = self.gets = self.lists = self.closed = 0

    async def get(self, key: str, start: int, stop: int) -> Piece:
        self.gets += 1
        await asyncio.sleep(0)
        if self.failures:
            raise self.failures.pop()
        if key not in self.objects:
            raise FileNotFoundError(key)
        data = self.objects[key]
        part = data[start:stop]
        if self.cut and len(part) > 1:
            self.cut -= 1
            part = part[: len(part) // 2]
        return Piece(part, Version(len(data), f'"{zlib.crc32(data)}"'))

    async def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        self.lists += 1
        for key, data in self.objects.items():
            if self.failures:
                raise self.failures.pop()
            yield key, len(data)

    async def aclose(self) -> None:
        self.closed += 1


@pytest.fixture(scope="module", autouse=True)
def thread() -> None:
    """Start the thread of fsspec, which stays, before threads are counted."""
    fsspec.asyn.get_loop()


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    write_text(tmp_path)
    write_tar(tmp_path)
    files = {f"train/{path.name}": path.read_bytes() for path in tmp_path.iterdir()}
    return Shop({**files, "big.txt": BIG, "b.txt.gz": gzip.compress(BIG)})


# -- what works as with every store -------------------------------------------------


async def test_own_sources_have_patterns_and_listings(shop: Shop) -> None:
    assert await names(TextDataset("train/*.txt", store=shop)) == NAMES
    assert await names(TextDataset("train/{0..7}.txt", store=shop)) == NAMES
    assert await names(TarDataset("*/?.tar", store=shop)) == NAMES
    assert await names(TextDataset("b.txt.gz", store=shop)) == LINES
    objects = await ObjectDataset.discover(shop, prefix="train")
    assert [*objects.keys] == sorted(key for key in shop.objects if "train" in key)
    for none in ("*.none", "none/*.txt"):
        with pytest.raises(ValueError, match="'shop://objects/"):
            await names(TextDataset(none, store=shop))


async def test_own_sources_resume_and_are_cut_for_readers(shop: Shop) -> None:
    stream = TextDataset("big.txt", store=shop)
    await check_resumes(stream, LINES, (1, 777, 29_999))
    parts = [await names(stream.shard(rank, 3)) for rank in range(3)]
    assert [line for part in parts for line in part] == LINES
    assert min(map(len, parts)) > 5000


async def test_objects_are_read_whole_and_as_they_are_now(shop: Shop) -> None:
    shop.objects["huge"] = bytes(3_000_000)
    shop.objects["empty"] = b""
    listed = await ObjectDataset.discover(shop)
    for dataset in (listed, ObjectDataset(shop, [*listed.keys])):
        for i, key in enumerate(dataset.keys):
            assert bytes(await dataset[i]) == shop.objects[key]
    for now in (b"", b"x", bytes(4_000_000)):
        shop.objects["huge"] = now
        assert bytes(await listed[listed.keys.index("huge")]) == now


async def test_tables_are_read_from_own_sources(shop: Shop) -> None:
    shop.objects["t.parquet"] = bytes_of(pa.table({"x": range(1000)}), "parquet", 100)
    rows = [row["x"] async for row in ParquetDataset("t.parquet", store=shop)]
    assert rows == [*range(1000)]


async def test_own_sources_can_be_cached(shop: Shop, tmp_path: Path) -> None:
    def make() -> Any:
        return TextDataset("big.txt", store=shop, cache=tmp_path / "cache")

    assert await names(make()) == LINES
    cold = shop.gets
    assert await names(make()) == LINES
    assert shop.gets == cold + 1
    shop.objects["big.txt"] = BIG[:80]
    assert await names(make()) == LINES[:10]
    shop.label = ""
    with pytest.warns(RuntimeWarning, match="keeps nothing of 'Shop': it has no label"):
        assert await names(make()) == LINES[:10]


@pytest.mark.slow
async def test_workers_read_own_sources(shop: Shop) -> None:
    stream = TextDataset("train/*.txt", store=shop)
    assert repr(pickle.loads(pickle.dumps(stream))) == repr(stream)
    loader: Any = DataLoader(stream, 4, num_workers=1, fetch="workers", collate_fn=list)
    batches = await beside(lambda: list(loader))
    assert [name for batch in batches for name in batch] == NAMES


async def test_a_source_is_closed_after_the_last_iteration(shop: Shop) -> None:
    """Of those that are open on one loop at the same time."""
    stream = TextDataset("train/*.txt", store=shop)
    async with aiter(stream) as first, aiter(stream) as second:
        await anext(first)
        await anext(second)
        async with aiter(stream) as third:
            await anext(third)
        assert shop.closed == 0
    assert shop.closed == 1


# -- failures -----------------------------------------------------------------------


class ClientError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"{status} for https://me:MARKER@host/x?sig=MARKER")
        self.status = status


@pytest.mark.slow
@pytest.mark.parametrize(
    "failure",
    [OSError(5, "bad"), TimeoutError(), EOFError(), ClientError(503), ClientError(0)],
    ids=repr,
)
async def test_failures_are_retried(shop: Shop, failure: Exception) -> None:
    stream = TextDataset("train/*.txt", store=shop, requests=PATIENT)
    shop.failures = [failure] * 3
    assert await names(stream) == NAMES
    shop.failures = [failure] * 10**5
    words = r"cannot read 'shop://objects/big.txt': .*; given up after 0.3 s, \d+ att"
    with pytest.raises(DatasetError, match=words) as caught:
        await names(TextDataset("big.txt", store=shop, requests=QUICK))
    assert caught.value.attempts > 1
    assert type(caught.value.__cause__) is type(failure)
    assert "MARKER" not in str(caught.value)


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (FileNotFoundError(2, "none"), ObjectNotFoundError),
        (ClientError(404), ObjectNotFoundError),
        (PermissionError(13, "no"), ObjectPermissionError),
        (ClientError(403), ObjectPermissionError),
        (ClientError(400), DatasetError),
        (ObjectNotFoundError("gone", location="x"), ObjectNotFoundError),
    ],
    ids=repr,
)
async def test_permanent_failures_are_raised_at_once(
    shop: Shop, failure: Exception, kind: type[DatasetError]
) -> None:
    shop.failures = [failure] * 9
    with pytest.raises(kind) as caught:
        await names(TextDataset("big.txt", store=shop))
    assert shop.gets == 1
    assert "MARKER" not in str(caught.value)


async def test_short_or_wrong_answers_are_errors(shop: Shop) -> None:
    stream = TextDataset("big.txt", store=shop, requests=PATIENT)
    shop.cut = 3
    assert await names(stream) == LINES
    shop.cut = 10**6
    words = "gave 32,768 of 65,536 bytes from byte 0 on"
    with pytest.raises(TruncatedReadError, match=words):
        await names(TextDataset("big.txt", store=shop, requests=QUICK))
    for answer in (b"abc", (b"abc", 3), Piece(bytes(1 << 20), Version(1 << 20))):

        async def get(*_: Any, said: Any = answer) -> Any:
            return said

        shop.get = get  # type: ignore[assignment, method-assign]
        with pytest.raises(TypeError, match=r"Shop.get\(\) must return Piece\(data, V"):
            await names(TextDataset("big.txt", store=shop))


async def test_list_may_be_missing_or_a_coroutine(shop: Shop) -> None:
    class Unlisted(Source):
        get = shop.get

    source = Unlisted()
    assert await names(TextDataset("big.txt", store=source)) == LINES
    with pytest.raises(NotImplementedError, match=r"Unlisted has no list\(\): name"):
        await names(TextDataset("*.txt", store=source))

    async def listed(_prefix: str) -> Any:
        return [(key, len(data)) for key, data in shop.objects.items()]

    shop.list = listed  # type: ignore[assignment, method-assign]
    assert await names(TextDataset("train/*.txt", store=shop)) == NAMES


def test_wrong_stores_are_refused(shop: Shop) -> None:
    with pytest.raises(TypeError, match=r"region: .* pass them to Shop\(\)"):
        TextDataset("x", store=shop, store_options={"region": "x"})
    system = MemoryFileSystem(asynchronous=True, skip_instance_cache=True)
    system.asynchronous = True  # its calls are made in threads
    with pytest.raises(ValueError, match="made without asynchronous=True"):
        TextDataset("a.txt", store=system)


# -- fsspec -------------------------------------------------------------------------


@pytest.fixture(params=["memory", "local", "folder"])
def system(request: pytest.FixtureRequest, shop: Shop, tmp_path: Path) -> Any:
    inner: Any = LocalFileSystem()
    root = f"{tmp_path}/files"
    if request.param == "memory":
        inner, root = (
            MemoryFileSystem(global_store=False, skip_instance_cache=True),
            "files",
        )
    for key, data in shop.objects.items():
        inner.makedirs(f"{root}/{key}".rpartition("/")[0], exist_ok=True)
        inner.pipe_file(f"{root}/{key}", data)
    if request.param == "folder":
        return DirFileSystem(root, inner), ""
    return inner, f"{root.strip('/')}/"


async def test_fsspec_file_systems_are_read_as_stores(system: Any, shop: Shop) -> None:
    store, root = system
    assert await names(TextDataset(f"{root}train/*.txt", store=store)) == NAMES
    await check_resumes(TextDataset(f"{root}big.txt", store=store), LINES, [777])
    objects = await ObjectDataset.discover(store, prefix=f"{root}train")
    keys = [key.removeprefix(root) for key in objects.keys]
    assert keys == sorted(key for key in shop.objects if "train" in key)
    assert [bytes(await objects[i]) for i in range(len(keys))] == [
        shop.objects[key] for key in keys
    ]
    for key in ("none.txt", "train"):
        with pytest.raises(DatasetError, match=f"{key}' |{key}': IsADirectory"):
            await names(TextDataset(root + key, store=store))


async def test_a_changed_file_of_fsspec_is_an_error(system: Any) -> None:
    store, root = system
    options: Any = {"store": store, "max_bytes": 1 << 16}
    async with aiter(TextDataset(f"{root}big.txt", **options)) as iterator:
        await anext(iterator)
        store.pipe_file(f"{store.root_marker}{root}big.txt", BIG.replace(b"1", b"2"))
        with pytest.raises(DatasetError, match="changed while being read"):
            [_ async for _ in iterator]


def test_secrets_of_a_file_system_are_hidden() -> None:
    store = fsspec.filesystem("memory", token="MARKER", skip_instance_cache=True)
    stream = TextDataset("a.txt", store=store)
    assert "MARKER" not in repr(stream)
    with pytest.raises(pickle.PicklingError, match="hold token in clear"):
        pickle.dumps(stream)


# -- hf://: huggingface_hub reads from a simulated endpoint ----------------------------

REPO = "someone/shards"
TOKEN = "hf_canary"


class _Handler(Handler):
    """Answers one connection; it is closed after each answer."""

    def get(self) -> None:
        hub, path = self.served, unquote(urlsplit(self.path).path)
        hub.seen.append(f"GET {path}")
        if hub.token and self.headers["authorization"] != f"Bearer {hub.token}":
            self.say(401, {"error": "Repository not found"}, "RepoNotFound")
        elif match := re.fullmatch(rf"/api/datasets/{REPO}(?:/revision/(\w+))?", path):
            self.about(match[1] or "main")
        elif match := re.fullmatch(rf"/api/datasets/{REPO}/tree/(\w+)/?(.*)", path):
            self.tree(match[1], match[2])
        elif match := re.fullmatch(rf"/datasets/{REPO}/resolve/(\w+)/(.*)", path):
            self.file(match[1], match[2])
        else:
            self.say(404, {"error": "Repository not found"}, "RepoNotFound")

    def about(self, revision: str) -> None:
        sha = self.served.main if revision == "main" else revision
        self.say(200, {"id": REPO, "sha": sha, "siblings": [], "private": False})

    def tree(self, revision: str, folder: str) -> None:
        files = self.served.files(revision)
        start = f"{folder}/" if folder else ""
        names = [name for name in files if name.startswith(start)]
        nodes: dict[str, Any] = {}
        for name in names:
            first, *rest = name.removeprefix(start).split("/")
            if rest:
                path = start + first
                nodes[path] = {"type": "directory", "path": path, "oid": "d", "size": 0}
            if not rest or "recursive=true" in self.path.lower():
                size = len(files[name])
                oid = f"{hash(files[name]) & 0xFFFFFF:040x}"
                nodes[name] = {"type": "file", "path": name, "oid": oid, "size": size}
        if not names:
            self.say(404, {"error": "no such folder"}, "EntryNotFound")
        else:
            self.say(200, list(nodes.values()))

    def file(self, revision: str, name: str) -> None:
        self.served.reads.wait()
        if self.served.fail:
            self.say(self.served.fail.pop(), {"error": "busy"})
            return
        data = self.served.files(revision)[name]
        first, last = map(int, self.headers["range"].removeprefix("bytes=").split("-"))
        part = data[first : last + 1]
        self.answer(206, part, {"content-range": f"bytes {first}-{last}/{len(data)}"})

    def say(self, status: int, said: Any, code: str = "") -> None:
        fields = {"content-type": "application/json"}
        fields |= {"x-error-code": code} if code else {}
        self.answer(status, json.dumps(said).encode(), fields)


class Hub(Server):
    """One dataset repository, with a branch that can be moved.

    Attributes:
        commits: Files of each commit, by name.
        main: The commit that the branch names.
        seen: Requests, as method and path.
        fail: Statuses of the next answers to reads.
        reads: Set when it answers reads.
    """

    handler = _Handler

    def __init__(self, files: dict[str, bytes]) -> None:
        self.commits = {"a" * 40: files}
        self.main = "a" * 40
        self.seen: list[str] = []
        self.fail: list[int] = []
        self.reads = threading.Event()
        self.reads.set()
        self.token = ""

    def files(self, revision: str) -> dict[str, bytes]:
        return self.commits[self.main if revision == "main" else revision]


ROOT = f"hf://datasets/{REPO}"
SOON = Requests(base_delay=0.001, max_delay=0.01, deadline=5)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    # From a cold disk it may take longer than SOON allows a request.
    from huggingface_hub import HfFileSystem  # noqa: F401, PLC0415

    write_tar(tmp_path)
    write_text(tmp_path)
    files = {f"data/{path.name}": path.read_bytes() for path in tmp_path.iterdir()}
    with Hub({**files, "README.md": b"words"}) as hub:
        yield hub


def hub_options(hub: Hub, **more: Any) -> dict[str, Any]:
    return {"store_options": {"endpoint": hub.url, **more}, "requests": SOON}


@pytest.mark.parametrize("ways", ["braces", "star", "store"])
async def test_hub_shards_can_be_named_in_every_way(ways: str, hub: Hub) -> None:
    pattern = {"braces": "data/{0..7}.tar"}.get(ways, "data/*.tar")
    if ways == "store":
        stream = TarDataset(pattern, store=ROOT, **hub_options(hub))
        stream = pickle.loads(pickle.dumps(stream))
    else:
        stream = TarDataset(f"{ROOT}/{pattern}", **hub_options(hub))
    assert await names(stream) == NAMES


async def test_the_endpoint_is_taken_from_the_environment(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not ``huggingface_hub`` was imported before."""
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    stream = TextDataset(f"{ROOT}/data/*.txt", requests=SOON)
    assert await names(stream.shard(1, 2)) != []


async def test_a_moved_branch_does_not_change_an_iteration(hub: Hub) -> None:
    stream = TextDataset(f"{ROOT}/data/{{0..7}}.txt", **hub_options(hub))
    async with aiter(stream) as iterator:
        lines = [await anext(iterator)]
        hub.commits["b" * 40] = {"data/0.txt": b"other\n"}
        hub.main = "b" * 40
        lines += [name async for name in iterator]
    assert lines == NAMES
    assert await names(TextDataset(f"{ROOT}/data/*.txt", **hub_options(hub))) == [
        "other"
    ]


@pytest.mark.slow
async def test_hub_failures_are_retried(hub: Hub) -> None:
    hub.fail = [408, 425, 408]  # the client tries 429 and 5xx again itself, slowly
    assert await names(TextDataset(f"{ROOT}/data/*.txt", **hub_options(hub))) == NAMES
    with pytest.raises(ObjectNotFoundError, match=r"no such file: 'hf://.*/none\.txt'"):
        await names(TextDataset(f"{ROOT}/data/none.txt", **hub_options(hub)))
    with pytest.raises(ValueError, match="no shard matches"):
        await names(TextDataset(f"{ROOT}/data/*.none", **hub_options(hub)))


async def test_tokens_are_sent_and_never_shown(hub: Hub) -> None:
    hub.token = TOKEN
    stream = JSONLinesDataset(f"{ROOT}/README.md", **hub_options(hub, token=TOKEN))
    with pytest.raises(DatasetError, match="byte 0 is damaged"):
        await names(stream)
    assert TOKEN not in repr(stream)
    with pytest.raises(pickle.PicklingError, match="store options token in clear"):
        pickle.dumps(TextDataset("x", store=ROOT, **hub_options(hub, token=TOKEN)))
    wrong = f"{TOKEN}-wrong"
    with pytest.raises(DatasetError, match=r"HF_TOKEN|may not read") as caught:
        await names(TextDataset(f"{ROOT}/README.md", **hub_options(hub, token=wrong)))
    assert TOKEN not in "".join(traceback.format_exception(caught.value))
