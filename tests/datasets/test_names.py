"""Names of shards are read as listings spell them, and listings have many pages."""

import asyncio
import glob
import os
import re
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote
from urllib.request import Request, urlopen
from xml.sax.saxutils import escape

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from obstore.store import LocalStore, MemoryStore, S3Store

from aioloader.datasets import FileDataset, ObjectDataset, TarDataset, TextDataset
from aioloader.datasets._stores.addresses import spell, split
from aioloader.errors import DatasetError, ObjectNotFoundError, ObjectPermissionError
from beside import beside
from datasets.changing import Handler, Server
from datasets.conftest import QUICK, SECRET
from datasets.shards import NAMES, items, names, read
from datasets.test_places import shards
from object_server import Faults, ObjectServer

_ENTRY = (
    "<D:response><D:href>{}</D:href><D:propstat><D:prop>"
    "<D:getlastmodified>Mon, 01 Jan 2024 00:00:00 GMT</D:getlastmodified>"
    "<D:getcontentlength>{}</D:getcontentlength><D:resourcetype/></D:prop>"
    "<D:status>HTTP/1.1 200 OK</D:status></D:propstat></D:response>"
)


class _Handler(Handler):
    def get(self) -> None:
        body = self.served.find(self.path)
        self.answer(404 if body is None else 200, body or b"")

    def list(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer(207, self.served.listing(self.path))


class WebDAV(Server):
    """Serve objects by GET, without ranges, and their names by PROPFIND.

    Args:
        objects: Contents by path.
        is_literal: Whether the paths are as requests spell them.
    """

    handler = _Handler

    def __init__(self, objects: dict[str, bytes], *, is_literal: bool = False) -> None:
        spelled = (lambda name: name) if is_literal else quote
        self._objects = {f"/{spelled(name)}": data for name, data in objects.items()}
        self._is_literal = is_literal
        self.paths: list[str] = []

    def find(self, path: str) -> bytes | None:
        self.paths.append(path)
        plain = path.partition("?")[0]
        return self._objects.get(plain if self._is_literal else quote(unquote(plain)))

    def listing(self, path: str) -> bytes:
        folder = quote(unquote(path))
        entries = "".join(
            _ENTRY.format(escape(name), len(data))
            for name, data in self._objects.items()
            if name.startswith(folder)
        )
        return (
            '<?xml version="1.0" encoding="utf-8"?>'
            f'<D:multistatus xmlns:D="DAV:">{entries}</D:multistatus>'
        ).encode()


NASTY = [
    "a b", "a%20b", "a%2Fb", "%", "%zz", "a#b", "a?b", "a?b=c", "a+b", "a&b", "ü é",
    "日", "a[1]", "[", "]", "{x}", "a:b", "~", "a\\b", "'", '"', "a;b", "a,b", "@", "=",
    " a ", "a*b", "s3:", "-", "_", "😀", "a|b", "<b>", "$x", "a!", "..a", "a.", "...",
]  # fmt: skip
SEGMENTS = st.text(
    st.sampled_from("ab.%2F #?+&=[]{}:~\\'\"*@üé日!,;-0") | st.characters(
        exclude_categories=["Cc", "Cs"], exclude_characters="/"
    ),
    min_size=1,
    max_size=8,
).filter(lambda name: name not in {".", ".."})  # fmt: skip


def write(folder: Path, names: Iterable[str]) -> None:
    """Write files that contain their own names."""
    for name in names:
        path = folder / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())


async def fill(store: Any, names: Iterable[str], prefix: str = "") -> None:
    for name in names:
        await store.put_async(f"{prefix}{name}.txt", name.encode())


@pytest.fixture
def moto(s3: str, s3_port: int) -> Any:
    assert s3
    return S3Store("bucket", client_options={"allow_http": True})


async def test_odd_file_names_are_read_as_listed(tmp_path: Path) -> None:
    write(tmp_path, NASTY)
    expected = sorted(NASTY, key=lambda name: f"{name}.txt")
    exact = TextDataset([glob.escape(f"{tmp_path}/{name}.txt") for name in expected])
    root, url = TextDataset("*.txt", store=tmp_path), f"{tmp_path.as_uri()}/*.txt"
    patterns = (url, f"{tmp_path}/*.txt", f"{tmp_path}/**/*.txt")
    for stream in (exact, root, *map(TextDataset, patterns)):
        visible = [name for name in expected if stream is exact or name[0] != "."]
        assert await items(stream) == visible
        assert await items(stream) == visible  # the second epoch too


@pytest.mark.slow
async def test_webdav_names_are_decoded_once() -> None:
    names = [name for name in NASTY if "\\" not in name and name[0] != "."]
    with WebDAV({f"a b/{name}.txt": name.encode() for name in names}) as server:
        stream = TextDataset(f"{server.url}/a%20b/*.txt")
        assert sorted(await items(stream)) == sorted(names)
        below = TextDataset("*.txt", store=f"{server.url}/a%20b")
        assert sorted(await items(below)) == sorted(names)
        async with await ObjectDataset.discover(f"{server.url}/a%20b") as objects:
            bodies = {bytes(await objects[i]).decode() for i in range(len(objects))}
        assert bodies == set(names)


async def test_s3_urls_may_be_percent_encoded(moto: Any) -> None:
    """A ``#`` in a URL of S3 is part of the key."""
    await fill(moto, ["c#d", "c[1]", "c1", "50%"], "spelled/")
    base = "s3://bucket/spelled"
    for url, name in {
        f"{base}/c#d.txt": "c#d",
        f"{base}/c%23d.txt": "c#d",
        f"{base}/50%25.txt": "50%",
        f"{base}/c%5B1%5D.txt": "c[1]",
        f"{base}/c[[]1*.txt": "c[1]",
        f"{base}/c%5B1*.txt": "c[1]",
        f"{base}/c[0-9].txt": "c1",
    }.items():
        assert await items(TextDataset(url)) == [name]
    for root in ("s3://bucket/spelled#1", "s3://bucket/spelled?1"):
        with pytest.raises(ValueError, match="no object in"):
            await ObjectDataset.discover(root)  # not of `spelled`


@pytest.mark.slow
@pytest.mark.parametrize("where", ["disk", "store"])
@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("*", ["a.txt", "b1.txt", "b2.txt"]),
        ("*.txt", ["a.txt", "b1.txt", "b2.txt"]),
        ("b?.txt", ["b1.txt", "b2.txt"]),
        ("b[13].txt", ["b1.txt"]),
        ("b[!1].txt", ["b2.txt"]),
        ("*/*.txt", ["d/c.txt"]),
        ("d/*", ["d/c.txt"]),
        ("**/*.txt", ["a.txt", "b1.txt", "b2.txt", "d/c.txt", "d/e/f.txt"]),
        ("d/**", ["d/c.txt", "d/e/f.txt"]),
        ("**/f.txt", ["d/e/f.txt"]),
        ("d/**/f.txt", ["d/e/f.txt"]),
        ("d**/*.txt", ["d/c.txt"]),
        (".*", [".hidden.txt"]),
        (".h/*", [".h/g.txt"]),
        ("**/**/f.txt", ["d/e/f.txt"]),
    ],
)
async def test_patterns_match_alike_on_disk_and_in_stores(
    where: str, pattern: str, matches: list[str], tmp_path: Path
) -> None:
    names = ["a", "b1", "b2", "d/c", "d/e/f", ".hidden", ".h/g"]
    store: Any = tmp_path
    if where == "disk":
        write(tmp_path, names)
    else:
        store = MemoryStore()
        await fill(store, names)
    stream = TextDataset(pattern, store=store)
    expected = [match.removesuffix(".txt") for match in matches]
    assert await items(stream) == expected


@pytest.mark.parametrize("root", ["data", "./data", "data/", Path("data")])
async def test_a_relative_root_is_joined_once(
    root: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "data", ["a", "b"])
    monkeypatch.chdir(tmp_path)
    for pattern in ("*.txt", "{a,b}.txt", "**/*.txt"):
        assert await items(TextDataset(pattern, store=root)) == ["a", "b"]
    files = await FileDataset.discover("*.txt", root=root)
    assert await files[1] == b"b"
    async with await ObjectDataset.discover(root) as objects:
        assert bytes(await objects[1]) == b"b"


def put_raw(port: int, key: str, body: bytes = b"", bucket: str = "bucket") -> None:
    """Write an object whose key obstore could not write."""
    url = f"http://127.0.0.1:{port}/{bucket}/{key}"
    signed = "AWS4-HMAC-SHA256 Credential=id/20260101/us-east-1/s3/aws4_request"
    fields = {"Content-Type": "x/x", "Authorization": signed}
    urlopen(Request(url, body, fields, method="PUT")).close()


async def test_folder_markers_are_no_samples(moto: Any, s3_port: int) -> None:
    """Consoles and Hadoop write them for folders, even for empty ones."""
    await fill(moto, ["m/full/a", "m/both"])
    for key in ("m/", "m/none/", "m/none/x/", "m/full/", "m/both.txt/", "m/empty.txt"):
        put_raw(s3_port, key)
    async with await ObjectDataset.discover("s3://bucket", prefix="m") as objects:
        assert [*objects.keys] == ["m/both.txt", "m/empty.txt", "m/full/a.txt"]
    assert await items(TextDataset("s3://bucket/m/*")) == ["m/both"]
    assert await items(TextDataset("s3://bucket/m/full/**")) == ["m/full/a"]
    with pytest.raises(ValueError, match="no object in 's3://bucket/m/none'"):
        await ObjectDataset.discover("s3://bucket", prefix="m/none")


async def test_a_key_that_ends_in_a_slash_is_an_error(moto: Any, s3_port: int) -> None:
    """It has bytes, so it is no marker; obstore lists it without the slash."""
    await fill(moto, ["k/a"])
    put_raw(s3_port, "k/x/", b"bytes")
    assert await items(TextDataset("s3://bucket/k/*.txt")) == ["k/a"]
    words = "'s3://bucket/k/x': .* ends in '/', .* copy it to another key"
    with pytest.raises(ObjectNotFoundError, match=words):
        await items(TextDataset("s3://bucket/k/*"))


@pytest.mark.parametrize("bad", ["/b.txt", "./b.txt", "../b.txt", "a\1b.txt"])
async def test_a_key_that_cannot_be_addressed_is_an_error(
    bad: str, moto: Any, s3_port: int
) -> None:
    bucket = f"odd{bad.encode().hex()}"
    put_raw(s3_port, "", bucket=bucket)
    for key in ("w/a.txt", f"w/{quote(bad)}"):
        put_raw(s3_port, key, b"a", bucket)
    words = f"s3://{bucket}.*the key {re.escape(repr(f'w/{bad}'))}.*: copy it to ano"
    with pytest.raises(DatasetError, match=f"cannot list .*{words}"):
        await items(TextDataset(f"s3://{bucket}/w/*.txt"))
    with pytest.raises(DatasetError, match=f"cannot read .*{words}"):
        await items(TextDataset(f"w/{bad}", store=f"s3://{bucket}"))
    assert await items(TextDataset(f"s3://{bucket}/w/a.txt")) == ["a"]


SIGNED = [
    "X-Amz-Date=20200102T030405Z&X-Amz-Expires=60&X-Amz-Signature=",
    "X-Goog-Date=20200102T030405Z&X-Goog-Expires=60&X-Goog-Signature=",
    f"AWSAccessKeyId=me&Expires={1577934245 + 60}&Signature=",
    "sv=2022-11-02&se=2020-01-02T03%3A05%3A05Z&sr=b&sig=",
]


@pytest.mark.parametrize("query", SIGNED)
async def test_an_expired_signed_url_says_so(query: str, loopback: Any) -> None:
    url = loopback.at("403") + f"/a.txt?{query}{SECRET}"
    words = r"the signed URL expired at 2020-01-02 03:05:05\+00:00; sign it again"
    with pytest.raises(ObjectPermissionError, match=words) as caught:
        await items(TextDataset(url, store_options={"retry_config": QUICK}))
    assert SECRET not in str(caught.value)
    later = url.replace("2020", "2120").replace("1577934", "9577934")
    with pytest.raises(ObjectPermissionError, match="check the credentials"):
        await items(TextDataset(later, store_options={"retry_config": QUICK}))


async def test_a_state_does_not_depend_on_the_spelling(moto: Any) -> None:
    await fill(moto, ["x 1", "x 2"], "state/")
    _, state = await read(TextDataset("s3://bucket/state/*.txt"), 1)
    for addresses in (
        "s3://bucket/state/x%20{1,2}.txt",
        ["s3://bucket/state/x 1.txt", "s3://bucket/state/x%202.txt"],
    ):
        stream = TextDataset(addresses)
        stream.load_state_dict(state)
        assert await items(stream) == ["x 2"]


async def test_urls_are_sent_as_they_are_spelled() -> None:
    """No key can hold an encoded slash or a query."""
    objects = {"a%2Fb.txt": b"encoded", "a/b.txt": b"plain"}
    with WebDAV(objects, is_literal=True) as server:
        assert await items(TextDataset(f"{server.url}/a%2Fb.txt")) == ["encoded"]
        assert await items(TextDataset(f"{server.url}/a/b.txt")) == ["plain"]
        assert await items(TextDataset(f"{server.url}/a/b.txt?x=*#f")) == ["plain"]


@given(names=st.lists(SEGMENTS, min_size=1, max_size=4))
@example(names=["%2F", "#", "?", "a=b?c=d"])
@example(names=["\\"])
def test_addresses_are_split_into_their_root_and_key(names: list[str]) -> None:
    key = "/".join(names)
    for root in ("s3://bucket", "https://host:8000", "abfss://box@account"):
        address = spell(root, key)
        # URLs with a backslash are sent as they are spelled.
        is_whole = root.startswith("https") and "\\" in key
        assert split(address) == ((address, "") if is_whole else (root, key))


async def test_a_pattern_of_many_stars_takes_no_time() -> None:
    """Each star matches at the first possible place, without backtracking."""
    await fill(store := MemoryStore(), ["a" * 2000])
    with pytest.raises(ValueError, match="no shard matches"):
        await items(TextDataset("*a" * 40 + "b", store=store))


def escaped(name: str) -> str:
    pattern = glob.escape(name)
    return re.sub(r"([\\{},])", r"\\\1", pattern) if "{" in pattern else pattern


@pytest.mark.slow
@settings(max_examples=3 if settings().max_examples < 100 else 100)
@given(drawn=st.sets(SEGMENTS, min_size=1, max_size=8), depth=st.integers(0, 1))
@example(drawn={*NASTY}, depth=1)
async def test_any_names_are_read_from_every_kind_of_store(
    drawn: set[str],
    depth: int,
    tmp_path_factory: pytest.TempPathFactory,
    s3_bucket: str,
    s3_port: int,
) -> None:
    """By pattern and by name."""
    chosen = {name for name in drawn if len(os.fsencode(name)) < 200}
    folder = tmp_path_factory.mktemp("names")
    below, prefix = "d/" * depth, f"{folder.name} x/"
    options: Any = {"access_key_id": "id", "secret_access_key": "key"}
    options |= {"endpoint": f"http://127.0.0.1:{s3_port}", "region": "us-east-1"}
    memory, local = MemoryStore(), LocalStore(folder)
    moto = S3Store("bucket", client_options={"allow_http": True}, config=options)
    write(folder / below, chosen)
    await fill(memory, chosen, prefix + below)
    await fill(moto, chosen, prefix + below)
    visible = sorted(n for n in chosen if not n.startswith("."))
    s3: Any = {"store_options": options}
    for stream in (
        TextDataset(f"{below}*.txt", store=folder),
        TextDataset(f"{below}*.txt", store=local),
        TextDataset(f"{prefix}{below}*.txt", store=memory),
        TextDataset(f"{prefix}{below}*.txt", store=moto),
        TextDataset(f"s3://bucket/{prefix}**/*.txt", **s3),
        TextDataset(f"s3://bucket/{quote(prefix)}**/*.txt", **s3),
    ):
        if visible:
            assert sorted(await items(stream)) == visible
        else:
            with pytest.raises(ValueError, match="no shard matches"):
                await items(stream)
    for store, start in ((memory, prefix + below), (local, below)):
        keys = [f"{start}{name}.txt" for name in sorted(chosen)]
        exact = TextDataset([*map(escaped, keys)], store=store)
        assert await items(exact) == sorted(chosen)
        async with ObjectDataset(store, keys) as objects:
            bodies = [bytes(await objects[i]).decode() for i in range(len(keys))]
        assert bodies == sorted(chosen)


Names = st.lists(
    st.text() | st.binary().map(lambda b: b.decode("utf-8", "surrogateescape"))
)


def many(count: int) -> dict[str, int]:
    return {
        f"train/{number % 1000:03}/{number * 7919 % count:024}.bin": number % 3
        for number in range(count)
    }


def serve(sizes: dict[str, int], objects: Any = None) -> ObjectServer:
    return ObjectServer(
        objects, make=lambda _, start, stop: bytes(stop - start), sizes=sizes
    )


def options(server: ObjectServer) -> dict[str, Any]:
    retries = {"backoff": {"init_backoff": timedelta(milliseconds=1)}}
    address = {"endpoint": server.url, "region": "x", "skip_signature": True}
    return {**address, "retry_config": retries}


@pytest.mark.slow
async def test_long_listings_take_a_request_per_page(tmp_path: Path) -> None:
    with serve(many(20_000), shards(tmp_path)) as server:
        bucket, config = f"s3://{server.bucket}", options(server)
        async with await ObjectDataset.discover(
            bucket, prefix="train", store_options=config
        ) as objects:
            assert list(objects.keys) == sorted(many(20_000))
            assert len(await objects[-1]) == many(20_000)[objects.keys[-1]]
        assert await beside(
            lambda: ObjectDataset(bucket, prefix="train", store_options=config)
        )
        assert await names(TarDataset(f"{bucket}/*.tar", store_options=config)) == NAMES
        assert server.counts("").requests == 20 + 20 + 21


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["errors", "resets", "truncated", "lying"])
@pytest.mark.parametrize("blocking", [False, True])
async def test_listings_survive_failed_requests(fault: str, blocking: bool) -> None:
    with serve(many(10_000)) as server:
        server.max_keys = 500
        share: Any = {fault: 0.2}
        server.faults = Faults(seed=1, **share)
        bucket, config = f"s3://{server.bucket}", options(server)
        if blocking:
            objects = await beside(lambda: ObjectDataset(bucket, store_options=config))
        else:
            objects = await ObjectDataset.discover(bucket, store_options=config)
        assert list(objects.keys) == sorted(many(10_000))
        assert server.injected()[fault] > 3
        # Each fault takes one request.
        assert 23 < server.counts("").requests < 20 + 3 * server.injected()[fault]


async def test_a_failing_web_listing_is_not_retried(loopback: Any) -> None:
    """Except by obstore."""
    with pytest.raises(DatasetError, match=r"503 .* pass keys="):
        await ObjectDataset.discover(
            loopback.at("503"), store_options={"retry_config": QUICK}
        )
    assert len(loopback.heads) == 2  # by obstore


async def test_a_cancelled_listing_ends_its_requests(noise: list[Any]) -> None:
    with serve(many(20_000)) as server:
        server.max_keys = 10
        config = options(server)
        task = asyncio.ensure_future(
            ObjectDataset.discover(f"s3://{server.bucket}", store_options=config)
        )
        await beside(lambda: server.wait_for(lambda: server.counts().requests > 150))
        server.faults = Faults(hangs=1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await beside(lambda: server.wait_for(lambda: not server.counts().in_flight))
        assert 150 < server.counts().requests < 2000
