"""The object server's faults, and its own beginning and end."""

import contextlib
import http.client
import ssl
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

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

# -- faults -------------------------------------------------------------------------


def test_errors() -> None:
    """Both statuses, with Retry-After where one is set; the connection goes on."""
    faults = Faults(errors=1, retry_after=7)
    with ObjectServer(OBJECTS, faults=faults) as server, connected(server) as end:
        answers = [ask(end, "/empty") for _ in range(20)]
    assert {status for status, *_ in answers} == {500, 503}
    waits = {(status, fields["Retry-After"]) for status, _, fields in answers}
    assert waits == {(500, None), (503, "7")}


@pytest.mark.usefixtures("each_loop")
def test_resets() -> None:
    """Before the answer and amid the body."""
    seen = []
    with ObjectServer(OBJECTS, faults=Faults(resets=1)) as server:
        for _ in range(20):
            with raw_socket(server) as end:
                end.sendall(b"GET /train/big.bin HTTP/1.1\r\n\r\n")
                got = 0
                with pytest.raises(ConnectionResetError):
                    while data := end.recv(1 << 20):
                        got += len(data)
            seen.append(got)
        assert server.counts().bytes > 0
    assert min(seen) == 0


@pytest.mark.usefixtures("each_loop")
def test_truncated() -> None:
    """The head promises all of it; the connection ends early, in good manners."""
    cut = pytest.raises(http.client.IncompleteRead)
    with ObjectServer(OBJECTS, faults=Faults(truncated=1)) as server, cut as caught:
        fetch(server)
    assert caught.value.partial == DATA[: len(caught.value.partial)]
    assert caught.value.expected == len(DATA) - len(caught.value.partial)


def test_lying() -> None:
    """Nothing in the answer to a whole read gives it away."""
    with ObjectServer(OBJECTS, faults=Faults(lying=1)) as server:
        body = fetch(server)
        with connected(server) as connection:
            status, part, fields = ask(
                connection, "/train/big.bin", Range="bytes=0-99999"
            )
    assert DATA.startswith(body)
    assert len(body) < len(DATA)
    assert (status, len(part) < 100_000) == (206, True)
    assert fields["Content-Range"] == f"bytes 0-99999/{len(DATA)}"


@pytest.mark.usefixtures("each_loop")
def test_hangs_until_the_client_gives_up() -> None:
    """Other connections are served meanwhile; a retry is, too."""
    with ObjectServer(OBJECTS, faults=Faults(hangs=1)) as server:
        with raw_socket(server) as end:
            end.sendall(b"GET /train/big.bin HTTP/1.1\r\n\r\n")
            server.wait_for(lambda: server.counts().in_flight == 1)
            server.faults = Faults()
            assert fetch(server) == DATA
            assert server.counts().peak == 2
        server.wait_for(lambda: server.counts().in_flight == 0)


@pytest.mark.usefixtures("each_loop")
def test_hangs_until_the_server_stops() -> None:
    """The end frees the client, and leaves nothing."""
    with ThreadPoolExecutor(1) as pool:
        with ObjectServer(OBJECTS, faults=Faults(hangs=1)) as server:
            reading = pool.submit(fetch, server)
            server.wait_for(lambda: server.injected()["hangs"] == 1)
        assert isinstance(reading.exception(10), BROKEN)


def test_slow_bodies_and_paced_lines() -> None:
    """A fifth of a second's worth of bytes takes that long; TCP is no excuse."""
    speed = 5 * len(DATA)
    with ObjectServer(OBJECTS) as server:
        server.faults = Faults(slow=1, slow_bytes_per_second=speed)
        assert seconds(fetch, server) >= 0.19
        server.faults, server.bytes_per_second = Faults(), speed
        assert seconds(fetch, server) >= 0.19


def test_latency() -> None:
    """Each answer comes so much later, but those of several connections at once."""
    with ObjectServer(OBJECTS, latency=0.1) as server, ThreadPoolExecutor(4) as pool:
        assert 0.1 <= seconds(lambda: [*pool.map(fetch, [server] * 4)]) < 0.4
        assert server.counts().peak == 4


def seconds(call: Callable[..., object], *arguments: object) -> float:
    """Return how long a call takes."""
    began = time.monotonic()
    call(*arguments)
    return time.monotonic() - began


@given(seed=st.integers(0, 2**32), first=st.integers(0, 10**9))
def test_faults_are_drawn_by_seed_and_number(seed: int, first: int) -> None:
    """The same again, in the shares that were asked for."""
    faults, again = (
        Faults(errors=0.1, resets=0.2, hangs=0.3, seed=seed) for _ in range(2)
    )
    drawn = [faults.draw(number) for number in range(first, first + 1000)]
    assert drawn == [again.draw(number) for number in range(first, first + 1000)]
    kinds = Counter(fault.kind for fault in drawn if fault is not None)
    for kind, count in {"errors": 100, "resets": 200, "truncated": 0}.items():
        assert abs(kinds[kind] - count) < 100


@pytest.mark.parametrize(("errors", "hangs"), [(-0.1, 0.0), (0.6, 0.6)])
def test_faults_refuse_what_is_no_share(errors: float, hangs: float) -> None:
    """Where they are made."""
    with pytest.raises(ValueError, match="shares must be at least 0"):
        Faults(errors=errors, hangs=hangs)


# -- the server itself --------------------------------------------------------------


def test_counts() -> None:
    """Requests and bytes, in all and by name, over several threads of clients."""
    with ObjectServer(OBJECTS) as server, ThreadPoolExecutor(8) as pool:
        bodies = [*pool.map(lambda _: fetch(server), range(40))]
        assert bodies == [DATA] * 40
        fetch(server, "/empty")
        server.wait_for(lambda: not server.counts().in_flight)
        counts = server.counts()
        assert (counts.requests, counts.bytes) == (41, 40 * len(DATA))
        assert server.counts("train/big.bin").requests == 40
        assert server.counts("empty").bytes == 0
        assert counts.peak >= server.counts("train/big.bin").peak >= 1
        with pytest.raises(TimeoutError, match=r"not within 0 seconds.*requests=41"):
            server.wait_for(lambda: server.counts().requests > 41, 0)


@pytest.mark.usefixtures("each_loop")
def test_stops_with_clients_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle ones, ones amid a body they do not read, ones that never said a word."""
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


@pytest.mark.usefixtures("each_loop")
def test_stops_amid_handshakes(tls: ssl.SSLContext) -> None:
    """A TLS client that never says a word is let go of."""
    with contextlib.ExitStack() as stack:
        with ObjectServer(OBJECTS, ssl_context=tls) as server:
            end = stack.enter_context(raw_socket(server))
        assert end.recv(1) == b""


@pytest.mark.usefixtures("each_loop")
def test_starts_again() -> None:
    """The objects and the counts stay; the port need not."""
    server = ObjectServer({"a": b"1"})
    for requests in 1, 2:
        with server:
            assert fetch(server, "/a") == b"1"
            assert server.counts("a").requests == requests


def test_a_context_that_is_none_is_refused() -> None:
    """Where the server is made, not where it would run."""
    with pytest.raises(TypeError, match=r"must be an ssl\.SSLContext, got str"):
        ObjectServer(ssl_context="no")  # type: ignore[arg-type]
