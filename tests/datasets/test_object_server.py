"""The object server of the tests: honest answers, planned faults, and its end."""

import contextlib
import http.client
import socket
import ssl
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote, urlsplit

import obstore
import pytest
import trustme
from hypothesis import given, settings
from hypothesis import strategies as st
from obstore.store import S3Store

from object_server import Faults, ObjectServer
from object_server import server as objects

DATA = bytes(range(256)) * 5000
OBJECTS = {
    "train/a b.bin": b"spaced",
    "train/big.bin": DATA,
    "train/ünicode & <x>.bin": b"marked",
    "train/100%.bin": b"percent",
    "empty": b"",
}
BROKEN = (http.client.HTTPException, OSError)


def ask(
    server: ObjectServer,
    path: str = "/train/big.bin",
    method: str = "GET",
    context: ssl.SSLContext | None = None,
    **fields: str,
) -> tuple[int, bytes, http.client.HTTPMessage]:
    address = urlsplit(server.url).netloc
    connection = http.client.HTTPConnection(address, timeout=10)
    if context is not None:
        connection = http.client.HTTPSConnection(address, timeout=10, context=context)
    with contextlib.closing(connection):
        named = {name.replace("_", "-"): value for name, value in fields.items()}
        connection.request(method, quote(path, safe="/?=&"), headers=named)
        response = connection.getresponse()
        return response.status, response.read(), response.headers


@contextlib.contextmanager
def raw_socket(server: ObjectServer) -> Iterator[socket.socket]:
    port = urlsplit(server.url).port
    with socket.create_connection(("127.0.0.1", port), timeout=10) as end:
        yield end


def s3(server: ObjectServer) -> S3Store:
    options: Any = {"client_options": {"allow_http": True}, "skip_signature": True}
    return S3Store(server.bucket, endpoint=server.url, region="x", **options)


@pytest.fixture
def server() -> Iterator[ObjectServer]:
    with ObjectServer(OBJECTS) as made:
        yield made


# -- what an honest server says -----------------------------------------------------


def test_whole_objects_and_ranges(server: ObjectServer) -> None:
    for name, data in OBJECTS.items():
        for path in (f"/{name}", f"/bucket/{name}"):
            status, body, fields = ask(server, path)
            assert (status, body) == (200, data)
            assert int(fields["Content-Length"]) == len(body)
            assert ask(server, path, "HEAD")[:2] == (200, b"")
    for asked, expected in {
        "0-0": slice(0, 1),
        "10-19": slice(10, 20),
        "1279990-": slice(1_279_990, None),
        "1279990-9999999": slice(1_279_990, None),
        "-7": slice(-7, None),
    }.items():
        status, body, fields = ask(server, Range=f"bytes={asked}")
        start, stop, _ = expected.indices(len(DATA))
        assert (status, body) == (206, DATA[expected])
        assert fields["Content-Range"] == f"bytes {start}-{stop - 1}/{len(DATA)}"


def test_refusals(server: ObjectServer) -> None:
    status, body, _ = ask(server, "/nothing")
    assert (status, b"<Code>NoSuchKey</Code>" in body) == (404, True)
    assert ask(server, "/empty", "DELETE")[0] == 405
    for path in ("/train/big.bin", "/empty"):
        status, _, fields = ask(server, path, Range="bytes=1280000-")
        size = len(OBJECTS[path[1:]])
        assert (status, fields["Content-Range"]) == (416, f"bytes */{size}")
    for asked in ("bytes=5-2", "bytes=0-1,4-5", "rows=1-2"):
        assert ask(server, Range=asked)[:2] == (200, DATA)


def test_objects_change_between_reads() -> None:
    with ObjectServer({"a": b"first"}) as server:
        old = ask(server, "/a")[2]["ETag"]
        server.replace("a", b"second")
        status, body, fields = ask(server, "/a", Range="bytes=2-", If_Range=old)
        assert (status, body) == (200, b"second")
        new = fields["ETag"]
        assert new != old
        assert ask(server, "/a", If_Match=old)[0] == 412
        assert ask(server, "/a", If_Match=f'"other", {new}')[0] == 200
        assert ask(server, "/a", Range="bytes=2-", If_Range=new)[1] == b"cond"
        server.remove("a")
        assert ask(server, "/a")[0] == 404


def made(_name: str, start: int, stop: int) -> bytes:
    """Return a part of an object that exists nowhere: its offsets, in eights."""
    first = start // 8
    numbers = range(first, -(-stop // 8))
    block = b"".join(number.to_bytes(8, "little") for number in numbers)
    return block[start - 8 * first :][: stop - start]


@settings(max_examples=15)
@given(start=st.integers(0, 2_000_000), length=st.integers(1, 600_000))
def test_made_objects(start: int, length: int) -> None:
    with ObjectServer(make=made, sizes={"huge": 1 << 41}) as server:
        start += 1 << 40
        body = ask(server, "/huge", Range=f"bytes={start}-{start + length - 1}")[1]
        assert body == made("huge", start, start + length)


def test_what_make_raises_is_raised() -> None:
    quiet = contextlib.suppress(*BROKEN)
    words = r"make\('a', 0, 9\) gave 1 bytes, not 9"
    with (
        pytest.raises(ValueError, match=words),
        ObjectServer(make=lambda *_: b"x", sizes={"a": 9}) as server,
        quiet,
    ):
        ask(server, "/a")
    with pytest.raises(ValueError, match="make and sizes go together"):
        ObjectServer(sizes={"a": 1})


@pytest.mark.parametrize("max_keys", [1, 2, 1000])
def test_listing_in_pages(max_keys: int) -> None:
    names = {f"{folder}/{i:03}": b"x" * i for folder in "ab" for i in range(23)}
    with ObjectServer(names) as server:
        server.max_keys = max_keys
        store = s3(server)
        listed = obstore.list(store).collect()
        below = obstore.list(store, "b").collect()
        after = obstore.list(store, offset="b/020").collect()
        asked = server.counts("").requests
        query = ask(server, "/bucket?list-type=2&max-keys=x")
        assert (query[0], b"InvalidArgument" in query[1]) == (400, True)
    assert [meta["path"] for meta in listed] == sorted(names)
    assert all(meta["size"] == len(names[meta["path"]]) for meta in listed)
    assert [meta["path"] for meta in below] == sorted(names)[23:]
    assert [meta["path"] for meta in after] == ["b/021", "b/022"]
    assert asked == sum(-(-count // max_keys) for count in (46, 23, 2))


# -- faults -------------------------------------------------------------------------


@pytest.mark.parametrize("is_tls", [False, True])
def test_broken_bodies(*, is_tls: bool) -> None:
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    root = authority.cert_pem.bytes().decode()
    trusting = ssl.create_default_context(cadata=root) if is_tls else None
    with ObjectServer(OBJECTS, ssl_context=context if is_tls else None) as server:
        assert ask(server, context=trusting)[1] == DATA
        for faults in (Faults(resets=1), Faults(truncated=1)):
            server.faults = faults
            with pytest.raises(BROKEN):
                ask(server, context=trusting)
        assert server.injected() == {"resets": 1, "truncated": 1}
    with pytest.raises(TypeError, match=r"must be an ssl\.SSLContext, got str"):
        ObjectServer(ssl_context="no")  # type: ignore[arg-type]


def test_errors_and_lies() -> None:
    with ObjectServer(OBJECTS, faults=Faults(errors=1, retry_after=7)) as server:
        answers = [ask(server, "/empty") for _ in range(20)]
        server.faults = Faults(lying=1)
        body = ask(server)[1]
        status, part, fields = ask(server, Range="bytes=0-99999")
    waits = {(status, fields["Retry-After"]) for status, _, fields in answers}
    assert waits == {(500, None), (503, "7")}
    assert DATA.startswith(body)
    assert len(body) < len(DATA)
    assert (status, len(part) < 100_000) == (206, True)
    assert fields["Content-Range"] == f"bytes 0-99999/{len(DATA)}"


def test_hangs() -> None:
    with ThreadPoolExecutor(1) as pool:
        with ObjectServer(OBJECTS, faults=Faults(hangs=1)) as server:
            reading = pool.submit(ask, server)
            server.wait_for(lambda: server.counts().in_flight == 1)
            server.faults = Faults()
            assert ask(server)[1] == DATA
            assert server.counts().peak == 2
        assert isinstance(reading.exception(10), BROKEN)


def test_slow_bodies_and_answers() -> None:
    def seconds(server: ObjectServer) -> float:
        began = time.monotonic()
        ask(server)
        return time.monotonic() - began

    speed = 5 * len(DATA)
    with ObjectServer(OBJECTS) as server:
        server.faults = Faults(slow=1, slow_bytes_per_second=speed)
        assert seconds(server) >= 0.19
        server.faults, server.bytes_per_second = Faults(), speed
        assert seconds(server) >= 0.19
    with ObjectServer(OBJECTS, latency=0.1) as server:
        assert seconds(server) >= 0.1


@given(seed=st.integers(0, 2**32), first=st.integers(0, 10**9))
def test_faults_are_drawn_by_seed_and_number(seed: int, first: int) -> None:
    faults, again = (
        Faults(errors=0.1, resets=0.2, hangs=0.3, seed=seed) for _ in range(2)
    )
    drawn = [faults.draw(number) for number in range(first, first + 1000)]
    assert drawn == [again.draw(number) for number in range(first, first + 1000)]
    kinds = Counter(fault.kind for fault in drawn if fault is not None)
    for kind, count in {"errors": 100, "resets": 200, "truncated": 0}.items():
        assert abs(kinds[kind] - count) < 100
    with pytest.raises(ValueError, match="shares must be at least 0"):
        Faults(errors=0.6, hangs=0.6)


# -- the server itself --------------------------------------------------------------


def test_counts() -> None:
    server = ObjectServer(OBJECTS)
    for requests in (41, 82):
        with server, ThreadPoolExecutor(8) as pool:
            answers = [*pool.map(lambda _: ask(server), range(40))]
            assert [body for _, body, _ in answers] == [DATA] * 40
            ask(server, "/empty")
            server.wait_for(lambda: not server.counts().in_flight)
            counts = server.counts()
            assert counts.requests == requests
            assert counts.bytes == requests // 41 * 40 * len(DATA)
            assert counts.peak >= server.counts("train/big.bin").peak >= 1
    with pytest.raises(TimeoutError, match=r"not within 0 seconds.*requests=82"):
        server.wait_for(lambda: server.counts().requests > 82, 0)


def test_stops_with_clients_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_GRACE", 0.1)
    with contextlib.ExitStack() as stack:
        with ObjectServer(make=made, sizes={"huge": 1 << 41}) as server:
            idle, reading, _ = [stack.enter_context(raw_socket(server)) for _ in "abc"]
            idle.sendall(b"HEAD /huge HTTP/1.1\r\n\r\n")
            reading.sendall(b"GET /huge HTTP/1.1\r\n\r\n")
            server.wait_for(lambda: server.counts("huge").bytes > 100_000)
        assert server.counts().in_flight == 0
        assert idle.recv(1 << 20).startswith(b"HTTP/1.1 200")
        assert idle.recv(1) == b""
        with pytest.raises(ConnectionResetError):
            while reading.recv(1 << 20):
                pass
