"""The object server, asked by plain clients and by obstore: honest answers."""

import asyncio
import contextlib
import doctest
import hashlib
import http.client
import ssl
from collections.abc import Iterator
from urllib.parse import quote

import obstore
import pytest
import trustme
from hypothesis import given, settings
from hypothesis import strategies as st
from obstore.store import HTTPStore, S3Store

from datasets.serving import (  # noqa: F401  (fixtures too)
    BROKEN,
    DATA,
    OBJECTS,
    QUICK,
    ask,
    authority,
    connected,
    each_loop,
    fetch,
    made,
    raw_socket,
    s3,
    server,
    tls,
)
from object_server import Faults, ObjectServer
from object_server import server as objects


def test_example() -> None:
    """It gives what it says."""
    assert doctest.testmod(objects) == (0, 2)


# -- what an honest server says -----------------------------------------------------


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("base", ["/", "/bucket/"])
def test_whole_objects(server: ObjectServer, base: str, name: str) -> None:
    """As plain HTTP and as a bucket, whatever the name."""
    with connected(server) as connection:
        status, body, fields = ask(connection, base + name)
        assert (status, body) == (200, OBJECTS[name])
        assert int(fields["Content-Length"]) == len(body)
        head = ask(connection, base + name, "HEAD")
    assert head[:2] == (200, b"")
    assert dict(head[2]) == dict(fields)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("bytes=0-0", slice(0, 1)),
        ("bytes=10-19", slice(10, 20)),
        ("bytes=1279990-", slice(1_279_990, None)),
        ("bytes=1279990-9999999", slice(1_279_990, None)),
        ("bytes=-7", slice(-7, None)),
        ("bytes=-9999999", slice(0, None)),
    ],
)
def test_ranges(server: ObjectServer, asked: str, expected: slice) -> None:
    """First, last, open, suffix; beyond the end means up to it."""
    with connected(server) as connection:
        status, body, fields = ask(connection, "/train/big.bin", Range=asked)
    start, stop, _ = expected.indices(len(DATA))
    assert (status, body) == (206, DATA[expected])
    assert fields["Content-Range"] == f"bytes {start}-{stop - 1}/{len(DATA)}"


@pytest.mark.parametrize("asked", ["bytes=5-2", "bytes=0-1,4-5", "rows=1-2", "bytes=-"])
def test_ranges_that_are_none(server: ObjectServer, asked: str) -> None:
    """What is no single range is ignored, as HTTP wants it."""
    with connected(server) as connection:
        assert ask(connection, "/train/big.bin", Range=asked)[:2] == (200, DATA)


@pytest.mark.parametrize(
    ("path", "asked"),
    [("/train/big.bin", "bytes=1280000-"), ("/empty", "bytes=0-"), ("/empty", "-0")],
)
def test_ranges_beyond_the_end(server: ObjectServer, path: str, asked: str) -> None:
    """The answer says how long the object is."""
    asked = asked if asked.startswith("bytes") else f"bytes={asked}"
    with connected(server) as connection:
        status, _, fields = ask(connection, path, Range=asked)
    assert status == 416
    assert fields["Content-Range"] == f"bytes */{len(OBJECTS[path[1:]])}"


def test_refusals(server: ObjectServer) -> None:
    """A name that is none, a method that is none, a request that is none."""
    with connected(server) as connection:
        status, body, _ = ask(connection, "/nothing")
        assert (status, b"<Code>NoSuchKey</Code>" in body) == (404, True)
        assert ask(connection, "/nothing", "HEAD")[:2] == (404, b"")
        assert ask(connection, "/empty", "DELETE")[0] == 405
    for said in (b"what\r\n\r\n", b"GET / HTTP/1.1\r\nx: " + b"y" * 70_000):
        with raw_socket(server) as end:
            end.sendall(said)
            assert end.recv(100).startswith(b"HTTP/1.1 400") or not end.recv(100)


@pytest.mark.usefixtures("each_loop")
def test_pipelined_requests_are_answered_in_order(server: ObjectServer) -> None:
    """Three at once, the last of which ends the connection."""
    names = ["train/100%.bin", "train/big.bin", "train/a b.bin"]
    heads = [f"GET /{quote(name)} HTTP/1.1\r\nHost: x\r\n\r\n" for name in names]
    heads[-1] = heads[-1].replace("Host: x", "Connection: close")
    with raw_socket(server) as end, end.makefile("rb") as answers:
        end.sendall("".join(heads).encode())
        for name in names:
            assert answers.readline().startswith(b"HTTP/1.1 200")
            fields = http.client.parse_headers(answers)
            assert answers.read(int(fields["Content-Length"])) == OBJECTS[name]
        assert answers.read() == b""


def test_if_match(server: ObjectServer) -> None:
    """Only the version that is meant."""
    with connected(server) as connection:
        tag = ask(connection, "/empty")[2]["ETag"]
        for condition in (tag, "*", f'"other", {tag}'):
            assert ask(connection, "/empty", If_Match=condition)[0] == 200
        assert ask(connection, "/empty", If_Match='"other"')[0] == 412


def test_objects_change_between_reads() -> None:
    """A new version has another tag; the old one's rest is not to be had."""
    with ObjectServer({"a": b"first"}) as server, connected(server) as connection:
        old = ask(connection, "/a")[2]
        server.replace("a", b"second")
        status, body, new = ask(
            connection, "/a", Range="bytes=2-", If_Range=old["ETag"]
        )
        assert (status, body) == (200, b"second")
        assert new["ETag"] != old["ETag"]
        assert ask(connection, "/a", If_Match=old["ETag"])[0] == 412
        tag = new["ETag"]
        assert ask(connection, "/a", Range="bytes=2-", If_Range=tag)[1] == b"cond"
        server.replace("a", b"second")
        assert ask(connection, "/a")[2]["ETag"] != tag
        server.remove("a")
        assert ask(connection, "/a")[0] == 404


@settings(max_examples=15)
@given(start=st.integers(0, 2_000_000), length=st.integers(1, 600_000))
def test_made_objects(made_server: ObjectServer, start: int, length: int) -> None:
    """Any range of an object larger than the memory is what it should be."""
    start += 1 << 40
    asked = f"bytes={start}-{start + length - 1}"
    body = fetch(made_server, "/huge", Range=asked)
    assert body == made("huge", start, start + length)


@pytest.fixture
def made_server() -> Iterator[ObjectServer]:
    """Serve two tebibytes."""
    with ObjectServer(make=made, sizes={"huge": 1 << 41}) as server:
        yield server


def test_made_objects_are_listed() -> None:
    """As those that are there."""
    with ObjectServer({"b": b"2"}, make=made, sizes={"huge": 1 << 41}) as server:
        listed = obstore.list(s3(server)).collect()
    assert {meta["path"]: meta["size"] for meta in listed} == {"b": 1, "huge": 1 << 41}


def test_what_make_raises_is_raised() -> None:
    """Where the server is left, unless the test fails itself."""

    def short(name: str, start: int, stop: int) -> bytes:
        return b"x"

    quiet = contextlib.suppress(*BROKEN)

    def read() -> None:
        with ObjectServer(make=short, sizes={"a": 9}) as server, quiet:
            fetch(server, "/a")

    with pytest.raises(ValueError, match=r"make\('a', 0, 9\) gave 1 bytes, not 9"):
        read()
    with pytest.raises(ValueError, match="make and sizes go together"):
        ObjectServer(sizes={"a": 1})


# -- obstore ------------------------------------------------------------------------


async def test_obstore_reads(server: ObjectServer) -> None:
    """By both of its stores, wholly and in ranges."""
    plain = HTTPStore(server.url, client_options={"allow_http": True})
    for store in (plain, s3(server)):
        for name, data in OBJECTS.items():
            got = await obstore.get_async(store, name)
            assert bytes(await got.bytes_async()) == data
            assert (await obstore.head_async(store, name))["size"] == len(data)
        parts = await obstore.get_ranges_async(
            store, "train/big.bin", starts=[5, 900_000], lengths=[7, 9]
        )
        assert [*map(bytes, parts)] == [DATA[5:12], DATA[900_000:900_009]]
        with pytest.raises(FileNotFoundError):
            await obstore.get_async(store, "nothing")


@pytest.mark.parametrize("max_keys", [1, 2, 1000])
def test_listing_in_pages(max_keys: int) -> None:
    """All names, sorted, once each, however they are cut; below a prefix too."""
    names = {f"{folder}/{i:03}": b"x" * i for folder in "ab" for i in range(23)}
    with ObjectServer(names) as server:
        server.max_keys = max_keys
        store = s3(server)
        listed = obstore.list(store).collect()
        below = obstore.list(store, "b").collect()
        after = obstore.list(store, offset="b/020").collect()
        asked = server.counts("").requests
    assert [meta["path"] for meta in listed] == sorted(names)
    assert all(meta["size"] == len(names[meta["path"]]) for meta in listed)
    assert [meta["path"] for meta in below] == sorted(names)[23:]
    assert [meta["path"] for meta in after] == ["b/021", "b/022"]
    assert asked == sum(-(-count // max_keys) for count in (46, 23, 2))


def test_listings_that_are_refused(server: ObjectServer) -> None:
    """A wrong token or number, and what is not offered."""
    with connected(server) as connection:
        for query in ("max-keys=x", "continuation-token=zz"):
            connection.request("GET", f"/bucket?list-type=2&{query}")
            response = connection.getresponse()
            assert (response.status, b"InvalidArgument" in response.read()) == (
                400,
                True,
            )
        connection.request("GET", "/bucket?list-type=2&delimiter=/")
        assert connection.getresponse().status == 501


async def read_surely(store: S3Store, name: str) -> bytes:
    """Read until obstore gives no error; some faults it does not retry itself."""
    while True:
        with contextlib.suppress(obstore.exceptions.BaseError):
            got = await obstore.get_async(store, name)
            return bytes(await got.bytes_async())


async def test_obstore_gets_through_faults() -> None:
    """A fault is the request's, not the key's: tries again get all bytes."""
    names = {f"{i:03}": hashlib.sha256(b"%d" % i).digest() * 4000 for i in range(60)}
    faults = Faults(errors=0.1, resets=0.1, truncated=0.1, seed=3, retry_after=0)
    with ObjectServer(names, faults=faults) as server:
        store = s3(server)

        reads = [read_surely(store, name) for name in names]
        bodies = await asyncio.gather(*reads)
        done = server.injected()
        del store, reads
    assert bodies == [*names.values()]
    assert done.keys() == {"errors", "resets", "truncated"}


# -- TLS ----------------------------------------------------------------------------


async def test_tls(authority: trustme.CA, tls: ssl.SSLContext) -> None:
    """The same over HTTPS, for whom it may concern."""
    trusting = ssl.create_default_context(cadata=authority.cert_pem.bytes().decode())
    root = authority.cert_pem.bytes()
    with ObjectServer(OBJECTS, ssl_context=tls) as server:
        assert server.url.startswith("https://")
        store = s3(server, client_options={"root_certificate": root})
        body = await obstore.get_range_async(
            store, "train/big.bin", start=9, end=700_000
        )
        assert bytes(body) == DATA[9:700_000]
        with connected(server, trusting) as connection:
            assert ask(connection, "/train/big.bin")[:2] == (200, DATA)
        refused = pytest.raises(ssl.SSLCertVerificationError)
        with connected(server, ssl.create_default_context()) as connection, refused:
            ask(connection, "/empty")
        del store


@pytest.mark.usefixtures("each_loop")
def test_tls_faults(authority: trustme.CA, tls: ssl.SSLContext) -> None:
    """Resets and short bodies are seen through TLS."""
    trusting = ssl.create_default_context(cadata=authority.cert_pem.bytes().decode())
    with ObjectServer(OBJECTS, ssl_context=tls) as server:
        for faults in (Faults(resets=1), Faults(truncated=1)):
            server.faults = faults
            with connected(server, trusting) as connection, pytest.raises(BROKEN):
                ask(connection, "/train/big.bin")
        assert server.injected() == {"resets": 1, "truncated": 1}
