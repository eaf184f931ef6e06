"""Objects: addresses, listings, lengths, retries and processes."""

import asyncio
import gc
import itertools
import weakref
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeAlias

import obstore
import pytest
from obstore.store import LocalStore, MemoryStore, S3Store

from aioloader.datasets import ObjectDataset, Piece, Requests, Source, TextDataset
from aioloader.datasets._stores.bytes import Client, StoredObject
from aioloader.datasets._stores.options import Flights
from aioloader.datasets._stores.sources import OwnStore, Tries, UnreachableError
from aioloader.datasets._stores.stores import ObstoreStore
from aioloader.errors import (
    DatasetError,
    ObjectNotFoundError,
    ObjectPermissionError,
    TruncatedReadError,
)
from datasets.changing import ChangingServer
from python_process import python

Serve: TypeAlias = Callable[..., ObjectDataset]
STORES = ["local", "memory", "http", "s3"]


@pytest.mark.parametrize("dataset", STORES, indirect=True)
async def test_a_missing_object_raises_object_not_found(dataset: ObjectDataset) -> None:
    source: Any = dataset._store
    store: Any = source._given or source._url
    async with ObjectDataset(store, ["no/key"]) as missing:
        with pytest.raises(ObjectNotFoundError, match="no/key") as caught:
            await missing[0]
    assert isinstance(caught.value, FileNotFoundError)
    assert caught.value.location == source.locate("no/key")


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        ("403", ObjectPermissionError, "HTTP 403 Forbidden; check the credentials"),
        ("401", ObjectPermissionError, "HTTP 401 Unauthorized"),
        ("404", ObjectNotFoundError, "HTTP 404 Not Found"),
        ("503", DatasetError, "HTTP 503 Service Unavailable, after 2 attempts"),
        ("599", DatasetError, "HTTP 599, after 2 attempts"),
    ],
)
async def test_http_errors_are_dataset_errors(
    loopback: Any, serve: Serve, answer: str, kind: type[DatasetError], words: str
) -> None:
    with pytest.raises(kind, match=words) as caught:
        await serve(answer, "cats/z.bin")[0]
    assert type(caught.value) is kind
    assert caught.value.location == f"{loopback.at(answer)}/cats/z.bin"
    assert caught.value.attempts == len(loopback.heads)


async def test_a_forbidden_local_object_is_refused(forbidden: Path) -> None:
    with pytest.raises(ObjectPermissionError, match="Permission denied"):
        await ObjectDataset(forbidden.parent, [forbidden.name])[0]


async def test_redirects_are_followed(serve: Serve) -> None:
    assert memoryview(await serve("redirect", "cats/z.bin")[0]) == b"cats-z" * 5


async def test_redirects_in_a_circle_end_at_once(loopback: Any) -> None:
    """They would never end."""
    stream = TextDataset(f"{loopback.at('loop')}/cats/z.bin")
    with pytest.raises(DatasetError, match="redirects in a circle; check the address"):
        _ = [line async for line in stream]


async def test_ranges_without_a_total_size_are_read_whole(loopback: Any) -> None:
    """HTTP allows them; obstore does not."""
    stream = TextDataset(f"{loopback.at('star')}/cats/z.bin")
    assert [line async for line in stream] == ["cats-z" * 5]


# With an ETag the rest is requested once, and half of it or a byte less arrives.
@pytest.mark.parametrize(("answer", "received"), [("cut", 300_000), ("short", 399_999)])
@pytest.mark.parametrize("size", [0, 400_000])
async def test_a_short_body_is_no_sample(
    loopback: Any, serve: Serve, answer: str, received: int, size: int
) -> None:
    dataset = serve(answer, "cats/big.bin")
    dataset._sizes = [size]  # type: ignore[assignment]
    with pytest.raises(TruncatedReadError, match="of 400,000 bytes") as caught:
        await dataset[0]
    assert isinstance(caught.value, EOFError)
    assert caught.value.location == f"{loopback.at(answer)}/cats/big.bin"
    assert (caught.value.expected, caught.value.received) == (400_000, received)


async def test_a_body_that_broke_off_once_is_read_again(
    loopback: Any, serve: Serve, contents: dict[str, bytes]
) -> None:
    """Where obstore itself does not resume."""
    dataset = serve("heal", "cats/big.bin")
    assert memoryview(await dataset[0]) == contents["cats/big.bin"]
    assert len(loopback.heads) == 2


@pytest.mark.parametrize("now", [b"", b"x", b"grown" * 1000])
async def test_objects_are_read_with_their_current_size(
    memory: MemoryStore, now: bytes
) -> None:
    """The size in a listing is only a hint."""
    dataset = await ObjectDataset.discover(memory, prefix="cats")
    index = dataset.keys.index("cats/z.bin")
    obstore.put(memory, "cats/z.bin", now)
    assert memoryview(await dataset[index]) == now


@pytest.mark.parametrize(("answer", "requests"), [("ok", 3), ("norange", 4)])
async def test_listed_objects_take_one_request(
    loopback: Any, serve: Serve, answer: str, requests: int
) -> None:
    """A known size saves a request; missing support for ranges is noticed once."""
    dataset = serve(answer, "cats/z.bin")
    dataset._sizes = [30]  # type: ignore[assignment]
    for _ in range(3):
        assert memoryview(await dataset[0]) == b"cats-z" * 5
    assert len(loopback.heads) == requests


async def test_a_prefix_matches_whole_segments(s3: str) -> None:
    async with await ObjectDataset.discover(s3, prefix="cats") as cats:
        pass
    assert list(cats.keys) == sorted(cats.keys)
    assert [key.partition("/")[0] for key in cats.keys] == ["cats"] * 6
    with pytest.raises(ValueError, match=r"no object in 's3://bucket/train/cat'"):
        await ObjectDataset.discover(s3, prefix="cat")


@pytest.mark.parametrize(
    "where", ["{folder}", "{folder}/", "file://{folder}", "file://{folder}/"]
)
async def test_paths_and_file_urls_are_local_stores(folder: Path, where: str) -> None:
    dataset = ObjectDataset(where.format(folder=folder), ["cats/z.bin"])
    assert memoryview(await dataset[0]) == b"cats-z" * 5


def test_a_missing_directory_is_not_empty(tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFoundError, match=r"no such file: '.*/gone'"):
        ObjectDataset(tmp_path / "gone")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"zzz": 1}, "key: 'zzz' is not valid for .*: its options are"),
        ({"regoin": "x"}, "key: 'regoin' is not .*: did you mean 'region'"),
        ({"config": {"aws_regoin": "x"}}, "'aws_regoin' .*: did you mean 'region'"),
        ({"client_options": {"timeou": 1}}, "key: timeou: did you mean 'timeout'"),
        ({"client_options": {"timeout": "soon"}}, "value .* 'client_options.timeout'"),
        ({"allow_http": True}, "'allow_http' is an option of the HTTP client; pass"),
        ({"config": {"timeout": "3s"}}, "'timeout' is an option of the HTTP client"),
        ({"client_options": 3}, "'client_options' must be a dict, got int"),
        ({"region": 3}, "refuses the value of the store option 'region'"),
        ({"skip_signature": "so"}, "refuses the value of .* 'skip_signature'"),
        ({"retry_config": {"retries": 3}}, "'retry_config.retries': .* max_retries"),
        ({"retry_config": {"max_retries": "x"}}, "value .* 'retry_config.max_retries'"),
        ({"retry_config": {"backoff": {"x": 1}}}, "known are base, init_backoff, max"),
        ({"secret_access_key": "x"}, "Missing AccessKeyId: name it in store_options"),
    ],
)
def test_wrong_store_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^cannot open 's3://b': .*{words}"):
        ObjectDataset("s3://b", ["k"], store_options=options)


@pytest.mark.parametrize(
    ("store", "label"),
    [
        (LocalStore("/"), "/"),
        (S3Store("bucket", prefix="a/b"), "s3://bucket/a/b"),
        (obstore.store.GCSStore("bucket"), "gs://bucket"),
        (obstore.store.AzureStore("box", account_name="me"), "az://box"),
        (obstore.store.HTTPStore("https://me:pw@host/a?sig=1"), "https://host/a"),
        (
            "abfss://box@me.dfs.core.windows.net/p",
            "abfss://box@me.dfs.core.windows.net/p",
        ),
        ("gs://bucket/p/", "gs://bucket/p"),
        ("https://me:pw@host/a?sig=1#f", "https://host/a"),
    ],
)
def test_repr_shows_the_address_without_secrets(store: Any, label: str) -> None:
    shown = repr(ObjectDataset(store, ["k1", "k2"]))
    assert shown == f"ObjectDataset({label!r}, <2 names: 'k1', 'k2'>)"


async def test_user_and_password_of_a_url_are_sent(loopback: Any, serve: Serve) -> None:
    await serve("ok", "cats/z.bin", user="me:p%40ss@")[0]
    assert "authorization: Basic bWU6cEBzcw==" in loopback.heads[0]
    options = {"default_headers": {"authorization": "Bearer x"}}
    await serve("ok", "cats/z.bin", user="me@", client_options=options)[0]
    assert "authorization: Bearer x" in loopback.heads[1]


@pytest.mark.slow
def test_forked_child_raises_instead_of_hanging(folder: Path) -> None:
    script = f"""
import asyncio, os
from aioloader.datasets import ObjectDataset, Piece, Requests, Source, TextDataset

async def read(): return len(memoryview(await dataset[0]))

def child():
    try: asyncio.run(asyncio.wait_for(read(), 5)); os._exit(1)
    except RuntimeError: os._exit(2)

dataset = ObjectDataset({str(folder)!r}, ["cats/z.bin"])
for expected in 1, 2:
    if not (pid := os.fork()): child()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == expected
    asyncio.run(read())
"""
    ended = python("-c", script)
    assert not ended.returncode, ended.stderr


@pytest.mark.slow
async def test_a_process_exits_after_cancelled_requests(loopback: Any) -> None:
    script = f"""
import asyncio
from aioloader.datasets import ObjectDataset, Piece, Requests, Source, TextDataset

async def main():
    async with ObjectDataset({loopback.at("ok")!r}, ["cats/big.bin"] * 100) as dataset:
        reads = [asyncio.ensure_future(dataset[i]) for i in range(100)]
        await asyncio.wait(reads, return_when="FIRST_COMPLETED")
        for read in reads: read.cancel()

asyncio.run(main())
"""
    ended = await asyncio.to_thread(python, "-c", script)
    assert (ended.returncode, ended.stderr) == (0, "")


# -- requests that fail, stall or dawdle -----------------------------------------------

Attempt = Callable[[], Coroutine[Any, Any, Any]]
AT_ONCE = Requests(base_delay=0)


class Named(Source):
    """An empty store with an address."""

    def __init__(self, label: str) -> None:
        self.label = label

    async def get(self, key: str, start: int, stop: int) -> Piece:
        raise FileNotFoundError(key)


PLACE = OwnStore(Named("s3://b")), "k"


def failure(number: int = 0) -> DatasetError:
    """Return an error that a retry may resolve."""
    return DatasetError(f"failed {number}", location="s3://b/k", attempts=2)


def attempts(*outcomes: Any) -> Attempt:
    """Return a function with these outcomes, one per call."""
    turns = iter(outcomes)

    async def attempt() -> Any:
        outcome = next(turns)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return attempt


def pause(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
    """Set the pauses between the next requests."""
    place = "aioloader.datasets._stores.sources.backoff"
    monkeypatch.setattr(place, lambda *_: iter(seconds))


async def hang() -> None:
    """Never answer."""
    await asyncio.Event().wait()


async def test_a_timeout_names_the_last_error(monkeypatch: Any) -> None:
    """Whether the attempt had its full time or was cut short."""

    async def attempt() -> None:
        if not calls:
            calls.append(1)
            raise failure(7)
        await hang()

    calls: list[int] = []
    with pytest.raises(DatasetError, match=r"^failed 7; given up after 0\.02 s"):
        await Tries(Requests(deadline=0.02, base_delay=0)).make(attempt, *PLACE)
    calls.clear()
    pause(monkeypatch, 0.0, 1e12)
    words = r"no answer within 0\.01 s; the last error before: failed 7; given up"
    with pytest.raises(DatasetError, match=words) as caught:
        await Tries(Requests(timeout=0.01)).make(attempt, *PLACE)
    assert str(caught.value.__cause__) == "failed 7"


async def test_a_host_that_always_refused_is_given_up_in_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A host that has answered once keeps the whole deadline."""
    tries = Tries(Requests())
    pause(monkeypatch, 6.0)
    refusing = OwnStore(Named("s3://b")), "k"
    refused = UnreachableError(failure())
    with pytest.raises(DatasetError, match="given up after 5 s"):
        await tries.make(attempts(refused), *refusing)
    assert await tries.make(attempts("data"), *refusing) == "data"
    waiting = asyncio.create_task(tries.make(attempts(refused), *refusing))
    done, _ = await asyncio.wait([waiting], timeout=0.01)
    assert not done
    waiting.cancel()


async def test_the_first_retry_is_logged_once(caplog: Any) -> None:
    """Per store, not per request."""
    place = OwnStore(Named("s3://c")), "k"
    for _ in range(3):
        await Tries(AT_ONCE).make(attempts(failure(1), failure(2), "data"), *place)
    words = "failed 1; retrying for 120 s (logged once for a store)"
    assert [record.getMessage() for record in caplog.records] == [words]
    assert caplog.records[0].levelname == "WARNING"


async def hedging() -> Tries:
    """Return tries that have measured enough requests to know a slow one."""
    tries = Tries(Requests(hedge=True, base_delay=0))
    for _ in range(20):
        await tries.make(attempts("quick"), *PLACE)
    return tries


async def test_a_slow_request_is_sent_twice() -> None:
    """The first answer counts; the other request is cancelled."""
    tries = await hedging()
    calls = itertools.count()
    ended = asyncio.Event()

    async def attempt() -> str:
        if next(calls):
            return "second"
        try:
            await hang()
        finally:
            ended.set()
        return "first"

    assert await tries.make(attempt, *PLACE) == "second"
    assert ended.is_set()


@pytest.mark.slow
async def test_a_response_without_ranges_is_not_hedged() -> None:
    """A second reader of the response would lose some bytes."""
    expected = b"".join(b"%09d\n" % line for line in range(500_000))
    here = Client(Requests(hedge=True, base_delay=0))
    for _ in range(20):
        await here.tries.make(attempts("quick"), *PLACE)
    with ChangingServer(expected, has_ranges=False) as server:
        store = ObstoreStore(server.url, {})
        whole = StoredObject(here, store, "k").stream()
        body = bytearray()
        while piece := (await whole.read()).data:
            body += piece
        await store.drain()
    assert bytes(body) == expected
    assert server.requests == 1


async def test_one_of_two_hedged_requests_may_fail() -> None:
    """If both fail, they are retried."""
    tries = await hedging()
    calls = itertools.count()
    second = asyncio.Event()

    async def attempt() -> str:
        number = next(calls)
        if number % 2:
            second.set()
            if number < 3:
                raise failure(number)
            return "data"
        await second.wait()
        second.clear()
        raise failure(number)

    assert await tries.make(attempt, *PLACE) == "data"
    assert next(calls) == 4


# -- their end ----------------------------------------------------------------------


async def test_a_failed_request_keeps_no_frames_alive() -> None:
    """obstore's threads may hold a failed request until the next call of obstore."""

    class Iterator:
        """An object in the frames that await a request."""

    async def read() -> None:
        iterator = Iterator()
        seen.append(weakref.ref(iterator))
        await Flights().follow(held[0])

    seen: list[weakref.ref[Iterator]] = []
    held = [asyncio.get_running_loop().create_future()]
    held[0].set_exception(FileNotFoundError(2, "not there"))
    with pytest.raises(FileNotFoundError, match="not there"):
        await read()
    gc.collect()
    assert seen[0]() is None
