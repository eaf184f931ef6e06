"""Shards that change while they are read or before a resume, and bad answers."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pytest

from aioloader import DataLoader
from aioloader.datasets import (
    ArrowDataset,
    CSVDataset,
    JSONLinesDataset,
    ObjectDataset,
    ParquetDataset,
    Requests,
    TarDataset,
    TextDataset,
    from_async_iterable,
    from_iterable,
)
from aioloader.errors import (
    BatchTimeoutError,
    DatasetError,
    ShardChangedError,
    TruncatedReadError,
)
from datasets.changing import ALWAYS, Bad, ChangingServer, Sender
from datasets.shards import bytes_of, check_resumes, items, put, read
from datasets.test_places import big_shard

QUICK = Requests(timeout=5.0, deadline=2.0, base_delay=0.001, max_delay=0.01)
AT_ONCE: dict[str, Any] = {"store_options": {"retry_config": {"max_retries": 0}}}
SMALL: dict[str, Any] = {"max_bytes": 1 << 18, "requests": QUICK, **AT_ONCE}


def lines(count: int, mark: str = "a") -> bytes:
    """Return lines of equal length that contain their version."""
    return b"".join(f"{mark}{i:07} {'x' * 990}\n".encode() for i in range(count))


@pytest.mark.parametrize(
    ("tags", "count", "failures"),
    [
        ("strong", 1500, 0),
        ("weak", 1500, 0),
        ("weak date", 2000, 0),
        ("date", 2000, 0),
        ("", 1500, 0),
        ("", 2500, 0),
        ("strong unconditional", 2000, 0),
        # After a failed request, an answer of another version does not count.
        ("", 1900, 2),
        ("date", 1900, 2),
        ("weak", 1900, 2),
    ],
)
async def test_a_shard_changed_while_being_read_is_refused(
    tags: str, count: int, failures: int
) -> None:
    with ChangingServer(lines(2000), tags=tags) as server:
        async with aiter(TextDataset(f"{server.url}/a", **SMALL)) as iterator:
            await anext(iterator)
            server.fail_next(failures)
            server.replace(lines(count, "b"))
            with pytest.raises(DatasetError, match="changed while being read"):
                [_ async for _ in iterator]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["", "broken", "cut", "refused", "changed"])
@pytest.mark.parametrize("tags", ["strong", ""])
async def test_without_ranges_reads_are_exact_or_fail(fault: str, tags: str) -> None:
    body = lines(5000)
    with ChangingServer(body, tags=tags, has_ranges=False) as server:
        if fault in {"broken", "changed", "cut"}:
            server.break_off(end=3_000_000, times=10**9 if fault == "cut" else 2)
        if fault == "refused":
            server.fail_next(3)
        if fault == "changed":
            server.replace_after(lines(4999, "b"), requests=2)
        options = SMALL | ({"requests": SHORT} if fault == "cut" else {})
        stream = TextDataset(f"{server.url}/a", **options)
        words = {"cut": "given up after", "changed": "changed while being read"}
        if fault in words:
            with pytest.raises(DatasetError, match=words[fault]) as caught:
                await items(stream)
            assert fault != "cut" or caught.value.attempts > 1
            return
        await check_resumes(stream, body.decode().splitlines(), [0, 4321])


async def one_by_one(count: int) -> AsyncIterator[int]:
    for number in range(count):
        yield number


async def same(number: int) -> int:
    return number


ITERABLES: dict[str, Callable[[int], Any]] = {
    "list": lambda count: from_iterable([*range(count)]),
    "generator": lambda count: from_iterable(lambda: iter(range(count))),
    "async generator": lambda count: from_async_iterable(lambda: one_by_one(count)),
    "map": lambda count: from_iterable([*range(count)]).map(same),
    "flat_map": lambda count: from_iterable(range(count // 2)).flat_map(
        lambda number: [2 * number, 2 * number + 1]
    ),
    "mix": lambda count: from_iterable([*range(count)]).mix(from_iterable([])),
    "readers": lambda count: from_iterable([*range(count)]).readers(2),
}


@pytest.mark.parametrize("kind", ITERABLES)
async def test_a_shrunk_iterable_is_refused_on_resume(kind: str) -> None:
    """An error is raised: the epoch must not end silently."""
    make = ITERABLES[kind]
    for taken in range(1, 9):
        first, state = await read(make(8), taken)
        stream = make(8)
        stream.load_state_dict(state)
        assert first + await items(stream) == [*range(8)]
        for count in range(taken):
            stream = make(count)
            stream.load_state_dict(state)
            with pytest.raises(ShardChangedError, match="restart the epoch"):
                await items(stream)


# -- bad answers ----------------------------------------------------------------------


BODY = b"".join(b"%09d\n" % line for line in range(30_000))
SHORT = Requests(deadline=1.0, base_delay=0.01, max_delay=0.01)
SOON = Requests(base_delay=0.001, max_delay=0.001)


def short(to: Sender, start: int, stop: int) -> None:
    """Send half of a range whose Content-Range names all of it."""
    to.send_part(206, start, stop, (start + stop) // 2)


def less(to: Sender, start: int, stop: int) -> None:
    """Send half of a range, with a Content-Range that says so."""
    half = (start + stop) // 2
    to.send_part(206, start, half, half)


def cut(to: Sender, start: int, stop: int) -> None:
    """Announce the length of the range, and hang up in the middle."""
    to.send_part(206, start, stop, (start + stop) // 2, length=stop - start)


def page(to: Sender, _start: int, _stop: int) -> None:
    """Answer with an HTML page, as a gateway does."""
    to.answer(200, b"<html/>", {"Content-Type": "text/html; charset=utf-8"})


def tagged_page(to: Sender, _start: int, _stop: int) -> None:
    to.answer(200, b"<html/>", {"Content-Type": "text/html", "ETag": '"page"'})


def silent(to: Sender, _start: int, _stop: int) -> None:
    to.served.ended.wait()


def stuck(to: Sender, _start: int, _stop: int) -> None:
    """Answer without ranges, and stop in the middle."""
    to.answer(200, to.served.body[:1000], {"Content-Length": len(to.served.body)})
    to.wfile.flush()
    silent(to, 0, 0)


def endless(to: Sender, _start: int, _stop: int) -> None:
    """Answer without a length, and stop in the middle."""
    to.protocol_version = "HTTP/1.1"
    to.send_head(200, {"Transfer-Encoding": "chunked"})
    to.wfile.write(b"3\r\nabc\r\n")
    to.wfile.flush()
    silent(to, 0, 0)


@contextlib.contextmanager
def serving(bad: Bad, when: Any, body: bytes = BODY) -> Iterator[str]:
    tags = "strong unconditional"
    with ChangingServer(body, tags=tags, bad=bad, when=when) as server:
        yield server.url


@pytest.mark.slow
@pytest.mark.parametrize("bad", [short, less, cut, page, tagged_page])
@pytest.mark.parametrize("number", [0, 1, 2])
async def test_a_shard_is_read_despite_a_bad_answer(bad: Bad, number: int) -> None:
    body = bytes_of(pa.table({"x": range(9)}), "parquet")
    with serving(bad, [number], body) as url:
        table = ParquetDataset("a.parquet", store=url, requests=SOON)
        if number == 0 and bad in {less, page, tagged_page}:  # as without ranges
            with pytest.raises(DatasetError, match="must be read by ranges"):
                _ = [row async for row in table]
        else:
            assert [row["x"] async for row in table] == [*range(9)]
    with serving(bad, [number]) as url:
        lines = [x async for x in TextDataset("a.txt", store=url, requests=SOON)]
    assert len(lines) == 30_000
    assert lines[-1] == "000029999"


@pytest.mark.parametrize("bad", [page, tagged_page, cut])
async def test_an_object_is_read_despite_a_bad_answer(bad: Bad) -> None:
    for size in (0, len(BODY)):
        with serving(bad, [0]) as url:
            async with ObjectDataset(url, ["a.bin"], requests=SOON) as objects:
                objects._sizes = [size]  # type: ignore[assignment]
                assert memoryview(await objects[0]) == BODY


async def test_a_body_below_its_listed_size_is_requested_again() -> None:
    """A short body is the object only if the server confirms its size."""

    def half(to: Sender, _start: int, _stop: int) -> None:
        to.send_part(200, 0, 5, 5)

    with serving(half, [0, 1]) as url:
        async with ObjectDataset(url, ["a.bin"], requests=SOON) as objects:
            objects._sizes = [len(BODY)]  # type: ignore[assignment]
            assert memoryview(await objects[0]) == BODY


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bad", "kind", "words"),
    [
        (short, TruncatedReadError, "gave 32,768 of 65,536 bytes from byte 0 on; giv"),
        (less, DatasetError, "requested 0..65536, got 0..32768"),
        (page, DatasetError, r"a web page \(text/html; charset=utf-8, 7 bytes\)"),
    ],
)
async def test_persistent_bad_answers_fail(bad: Bad, kind: Any, words: str) -> None:
    with serving(bad, ALWAYS) as url, pytest.raises(kind, match=words) as caught:
        [x async for x in TextDataset("a.txt", store=url, requests=SHORT)]
    assert "given up after 1 s" in str(caught.value)
    assert caught.value.attempts > 1


async def test_a_content_encoding_is_refused() -> None:
    bad: Bad = lambda to, *_: to.answer(200, b"\x1f\x8b", {"Content-Encoding": "gzip"})  # noqa: E731
    with serving(bad, ALWAYS) as url, pytest.raises(DatasetError, match="compressed, "):
        await anext(aiter(TextDataset("a.txt", encoding="latin-1", store=url)))


async def test_html_that_was_requested_is_read() -> None:
    """The name ends in .html, or it has no ending and the store sends an ETag."""
    for bad, name in ((page, "index.html"), (tagged_page, "crawled/0f3a")):
        with serving(bad, range(9)) as url:
            async with ObjectDataset(url, [name]) as objects:
                assert bytes(await objects[0]) == b"<html/>"


@pytest.mark.parametrize("kind", ["object", "shard"])
async def test_a_body_without_a_length_is_refused_at_once(kind: str) -> None:
    """Retrying would not help."""
    with serving(endless, ALWAYS) as url:
        dataset: Any = ObjectDataset(url, ["a", "b"])
        if kind == "shard":
            dataset = TextDataset(["a", "b"], store=url)
        loader: Any = DataLoader(dataset, None, collate_fn=str)
        with pytest.raises(DatasetError, match=r"its length .*: serve") as caught:
            [batch async for batch in loader]
    assert caught.value.attempts == 1


@pytest.mark.slow
@pytest.mark.parametrize("bad", [silent, stuck])
@pytest.mark.parametrize("kind", ["object", "shard"])
async def test_the_deadline_holds(bad: Bad, kind: str) -> None:
    """From the first attempt on, whether the server answers or not."""
    requests = Requests(timeout=0.1, deadline=0.4, base_delay=0.1, max_delay=0.1)
    with serving(bad, ALWAYS) as url:
        dataset: Any = ObjectDataset(url, ["a.txt"], requests=requests)
        if kind == "shard":
            dataset = TextDataset("a.txt", store=url, requests=requests)
        loader: Any = DataLoader(dataset, None, collate_fn=str)
        words = r"given up after 0\.4 s"
        words = rf"no answer within 0.\d+ s; {words}" if bad is silent else words
        with pytest.raises(DatasetError, match=words):
            async with asyncio.timeout(20):  # obstore's own limit is 30 s
                [batch async for batch in loader]


def test_a_hanging_listing_times_out() -> None:
    requests = Requests(timeout=0.1, deadline=0.3, base_delay=0)
    with serving(silent, ALWAYS) as url:
        options = {"endpoint": url, "region": "x", "skip_signature": True}
        with pytest.raises(DatasetError, match=r"no answer within .*; given up after"):
            ObjectDataset("s3://b", store_options=options, requests=requests)


@pytest.mark.parametrize("kind", ["object", "shard", "listing"])
def test_a_wrong_port_fails_within_seconds(kind: str, unused_port: int) -> None:
    """Not only at the deadline of two minutes."""
    url = f"http://127.0.0.1:{unused_port}"
    requests = Requests(base_delay=1e12, max_delay=1e12)  # later than 5 s
    options = {"endpoint": url, "region": "x", "skip_signature": True}

    def read() -> None:
        if kind == "listing":
            ObjectDataset("s3://b", store_options=options, requests=requests)
        elif kind == "shard":
            list(DataLoader(TextDataset(["a", "b"], store=url, requests=requests)))
        else:
            list(DataLoader(ObjectDataset(url, ["a"] * 8, requests=requests)))

    words = r"error sending request.*check the host.*given up after 5 s, \d+ attempts"
    with pytest.raises(DatasetError, match=words) as caught:
        read()
    assert kind == "listing" or str(unused_port) in caught.value.location


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_timeout_names_the_last_error(workers: int, unused_port: int) -> None:
    url = f"http://127.0.0.1:{unused_port}"
    requests = Requests(base_delay=1e12, max_delay=1e12, deadline=1e13)
    once = {"retry_config": {"max_retries": 0}}
    objects = ObjectDataset(url, ["a"] * 8, requests=requests, store_options=once)
    objects._store.has_answered = True  # as after an answer: the whole deadline
    options: Any = {"num_workers": 1, "fetch": "workers"} if workers else {}
    iterator = iter(DataLoader(objects, timeout=0.5, **options))
    words, text = "being retried after: cannot read 'ht", ""
    for _ in range(60):  # a worker takes time to start
        if words not in text:
            with pytest.raises(BatchTimeoutError) as caught:
                next(iterator)
            text = str(caught.value)
    assert words in text


# -- one guard for every format --------------------------------------------------------

# Many rows, so that files are not completely read ahead, and few rows.
LONG, ROWS = 100_000, 2000
LITTLE: dict[str, Any] = {"max_bytes": 1 << 16}


def table(start: int, rows: int = ROWS) -> pa.Table:
    return pa.table({"a": pa.array(range(10**6 + start, 10**6 + start + rows))})


def number_lines(start: int, rows: int = ROWS) -> bytes:
    return "".join(f"{10**6 + start + i}\n" for i in range(rows)).encode()


def parquet(start: int, rows: int = ROWS) -> bytes:
    """Return small row groups whose bytes have the same length."""
    plain: Any = {"compression": "none", "use_dictionary": False}
    length = min(5000, -(-rows // 2))
    return bytes_of(table(start, rows), "parquet", length, **plain)


def tar(start: int, rows: int = ROWS) -> bytes:
    """Return an archive of fewer samples, independent of the start."""
    return big_shard(rows // 20, 400)


Format: TypeAlias = tuple[Callable[..., Any], Callable[..., bytes]]
FORMATS: dict[str, Format] = {
    "tar": (TarDataset, tar),
    "txt": (TextDataset, number_lines),
    "jsonl": (JSONLinesDataset, number_lines),
    "csv": (CSVDataset, lambda *args: b"a\n" + number_lines(*args)),
    "parquet": (ParquetDataset, parquet),
    "arrow": (ArrowDataset, lambda *args: bytes_of(table(*args), "arrow")),
    "arrows": (ArrowDataset, lambda *args: bytes_of(table(*args), "arrows")),
}


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["csv", "parquet", "arrow"])
async def test_a_file_replaced_after_listing_fails(ending: str, tmp_path: Path) -> None:
    """Metadata read while listing shards does not apply to the new file."""
    make, body = FORMATS[ending]
    for name in "ab":
        put(tmp_path / f"{name}.{ending}", body(0, LONG))
    stream = make(str(tmp_path / f"*.{ending}"), **LITTLE)
    async with aiter(stream) as iterator:
        await anext(iterator)
        put(tmp_path / "new", body(5, LONG))
        (tmp_path / "new").rename(tmp_path / f"b.{ending}")
        with pytest.raises(DatasetError, match=r"b.* changed while being read"):
            _ = [sample async for sample in iterator]


@pytest.mark.slow
@pytest.mark.parametrize("ending", FORMATS)
@pytest.mark.parametrize("where", ["file", "strong", "weak", "date"])
async def test_a_replacement_of_the_same_size_is_refused_on_resume(
    ending: str, where: str, tmp_path: Path
) -> None:
    make, body = FORMATS[ending]
    path = tmp_path / f"a.{ending}"
    with ChangingServer(body(0), tags=where) as server:
        address = str(path) if where == "file" else f"{server.url}/a.{ending}"
        put(path, body(0))
        stream = make(address, requests=QUICK)
        first, state = await read(stream, 70)
        rest, _ = await read(stream, state=state)
        server.replace(body(0))
        put(path, body(0))
        words = {"file": "modification time", "strong": "ETag", "weak": "ETag or date"}
        says = rf"since the state .* as before, but another {words.get(where, '')}"
        with pytest.raises(ShardChangedError, match=says + r".*strict=False"):
            await read(stream, state=state)
        stream.load_state_dict(state, strict=False)
        again, _ = await read(stream)
        assert again == rest
        assert len(first) == 70


@pytest.mark.slow
@pytest.mark.parametrize("ending", FORMATS)
async def test_a_state_fits_copies_of_a_file(ending: str, tmp_path: Path) -> None:
    """One has another path and time; one was written again with the same time."""
    make, body = FORMATS[ending]
    path, copy = tmp_path / "one" / f"a.{ending}", tmp_path / "two" / f"a.{ending}"
    for place in (path, copy):
        place.parent.mkdir()
        put(place, body(0))
    _, state = await read(make(str(path)), 70)
    rest, _ = await read(make(str(path)), state=state)
    rows, state = await read(make(str(copy)), 7, state)
    assert [*map(str, rows)] == [str(row).replace("/one/", "/two/") for row in rest[:7]]
    facts = copy.stat()
    copy.unlink()
    put(copy, body(0))
    os.utime(copy, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    rows, _ = await read(make(str(copy)), state=state)
    assert len(rows) == len(rest) - 7


def test_a_loader_refuses_changed_files(tmp_path: Path) -> None:
    """With strict=False it accepts a file of the same size."""
    path = tmp_path / "a.txt"
    put(path, number_lines(0))
    loader: Any = DataLoader(TextDataset(str(path)), 10, num_workers=1)
    batches = iter(loader)
    next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    batches.close()
    put(path, number_lines(0))
    loader.load_state_dict(state)
    with pytest.raises(ShardChangedError, match="strict=False"):
        list(loader)
    loader.load_state_dict(state, strict=False)
    assert len(list(loader)) == ROWS // 10 - 1
    put(path, number_lines(0, ROWS + 10))
    loader.load_state_dict(state, strict=False)
    with pytest.raises(ShardChangedError, match="had 16,000 bytes and has 16,080"):
        list(loader)
