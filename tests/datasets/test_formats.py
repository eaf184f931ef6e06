"""Our formats pass ``check_shard_format``, which finds the errors of broken ones."""

import asyncio
import functools
import gzip
import itertools
import json
import operator
import re
import struct
import sys
import threading
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import own_format
import pytest

from aioloader import DataLoader
from aioloader.datasets import (
    ByteStream,
    ShardedStream,
    SQLDataset,
    TarDataset,
    TextDataset,
    from_dataset,
    from_iterable,
    mix,
)
from aioloader.errors import StateMismatchError, TruncatedReadError
from aioloader.testing import check_shard_format
from beside import beside
from datasets.ranks import merge_states
from datasets.shards import (
    FILES_OF_TABLES,
    MORE_TABLES,
    SHARDED,
    Make,
    Memory,
    Reader,
    names,
    own,
    parquet,
    read,
    sqlite,
    tar,
    text,
)
from datasets.test_flat_steps import tokenizer
from object_server import Faults, ObjectServer
from python_process import python

ALL: list[Make] = [*SHARDED, *FILES_OF_TABLES, *MORE_TABLES, sqlite]


@pytest.mark.slow
@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
async def test_every_format_keeps_the_laws(make: Make, tmp_path: Path) -> None:
    await check_shard_format(make(tmp_path).made_by, samples=12)


STORED: dict[str, tuple[Make, Any]] = {
    "txt": (text, TextDataset),
    "tar": (tar, TarDataset),
    "rec": (own, partial(ByteStream, make=own_format.records)),
}


@pytest.mark.parametrize("ending", STORED)
async def test_formats_keep_the_laws_in_a_store(ending: str, tmp_path: Path) -> None:
    write, dataset = STORED[ending]
    write(tmp_path)
    data = (tmp_path / f"0.{ending}").read_bytes()
    objects = {f"0.{ending}": data, f"1.{ending}.gz": gzip.compress(data)}
    with ObjectServer(objects) as server:
        stream = dataset([*objects], store=server.url)
        await check_shard_format(stream.made_by, samples=3)


class Rows(Memory):
    """Two shards, one of them empty, whose readers may be broken."""

    reader: Any = Reader

    def __init__(self) -> None:
        super().__init__(list, made=[[1, 2, 3, 4, 5], []])

    def open(self, shard: Any, position: dict[str, Any], budget: int) -> Reader:
        reader: Reader = self.reader(shard, position.get("at", 0), 1000, list)
        return reader


class TooMany(Reader):
    async def pull(self, limit: int) -> Any:
        return await super().pull(limit + 1)


class LosesOne(Reader):
    def position(self) -> dict[str, Any]:
        return {"at": self._at + (self._at > 2)}


class ForgetsCancelled(Reader):
    async def pull(self, limit: int) -> Any:
        self.task = asyncio.create_task(self.slow(limit))
        return await asyncio.shield(self.task)

    async def slow(self, limit: int) -> Any:
        for _ in range(30):
            await asyncio.sleep(0)
        return await super().pull(limit)


class AfterTheEnd(Reader):
    async def pull(self, limit: int) -> Any:
        block = await super().pull(limit)
        self._at = self._at if len(block) else 0
        return block


class Tuples(Reader):
    """Returns a position that JSON changes."""

    def position(self) -> dict[str, Any]:
        return {"at": (self._at,)}


async def test_a_custom_format_keeps_the_laws() -> None:
    await check_shard_format(Rows())
    assert await names(ShardedStream(Rows())) == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize(
    ("reader", "words"),
    [
        (TooMany, r"pull\(1\) gave 2 samples|pull\(2\) gave 3 samples"),
        (LosesOne, r"after \d samples, from {'at': 4}: sample 0 differs"),
        (ForgetsCancelled, "it leaves|tasks are left"),
        (AfterTheEnd, "there are samples after the end"),
        (Tuples, "a position must be JSON"),
    ],
)
async def test_a_broken_reader_is_reported(reader: Any, words: str) -> None:
    rows = Rows()
    rows.reader = reader
    with pytest.raises(AssertionError, match=words):
        await check_shard_format(rows)


async def test_a_summary_needs_a_count(monkeypatch: Any) -> None:
    """The count decides how shards are dealt to lanes."""
    rows = Rows()
    monkeypatch.setattr(rows, "summary", lambda _shards: {})
    with pytest.raises(AssertionError, match="summary must have 'count'"):
        await check_shard_format(rows)


def test_the_custom_format_example_runs() -> None:
    own_format.main()


# -- a generator of samples over a file ------------------------------------------------

WRITTEN = b"".join(struct.pack("<I", 5) + b"%05d" % n for n in range(3000))
RECORDS = [b"%05d" % n for n in range(3000)]


class Threads:
    def __init__(self) -> None:
        self.ran = set[int]()
        self.closed: int | None = None

    def __call__(self, file: BinaryIO) -> Iterator[bytes]:
        try:
            for line in file:
                self.ran.add(threading.get_ident())
                yield line
        finally:
            self.closed = threading.get_ident()


@pytest.mark.parametrize("count", [1, 300, None])
async def test_a_generator_runs_and_closes_in_one_thread(
    count: int | None, tmp_path: Path
) -> None:
    """Not the loop's, so it may use objects that are bound to one thread."""
    (tmp_path / "a").write_bytes(b"line\n" * 9000)
    noted = Threads()
    await read(ByteStream(str(tmp_path / "a"), noted), count)
    assert noted.ran == {noted.closed}
    assert threading.get_ident() not in noted.ran


async def test_many_readers_may_wait_at_once() -> None:
    """More than a loop has threads; closing ends their waits."""
    noted = Threads()
    with ObjectServer(dict.fromkeys(map(str, range(40)), WRITTEN)) as server:
        server.faults = Faults(hangs=1)
        stream: Any = ByteStream("{0..39}", noted, store=server.url, interleave=40)
        iterator: Any = aiter(stream.readers(40))
        pull = asyncio.create_task(iterator.pull(10))
        waits = partial(server.wait_for, lambda: server.counts().in_flight == 40)
        await asyncio.to_thread(waits)
        pull.cancel()
        await asyncio.wait([pull])
        await iterator.aclose()
    assert noted.closed


def lines(file: BinaryIO) -> Iterator[str]:
    """Yield values; the third of four fails."""
    for line in file:
        yield json.loads(line)


async def test_a_generators_error_comes_after_its_samples(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1\n2\n{\n4\n")
    (tmp_path / "b").write_text("5\n")
    stream: Any = ByteStream(f"{tmp_path}/*", lambda file: lines(file))  # noqa: PLW0108
    loader: Any = DataLoader(stream, 1, on_error="skip", collate_fn=list)
    assert await beside(lambda: [*loader]) == [[1], [2], [5]]
    note = f"aioloader: in {str(tmp_path / 'a')!r}, read up to byte 6"
    assert loader.skipped[0].error.__notes__ == [note]
    samples, _ = await read(ByteStream(f"{tmp_path}/b", lambda file: map(int, file)))
    assert samples == [5]
    with pytest.raises(TypeError, match="returned a value of type 'list'"):
        await read(ByteStream(f"{tmp_path}/b", lambda file: [*lines(file)]))


STOPS = [StopIteration, StopAsyncIteration, GeneratorExit, asyncio.CancelledError]


@pytest.mark.parametrize("kind", STOPS)
async def test_a_stop_raised_by_a_generator_is_an_error(
    kind: type[BaseException], tmp_path: Path
) -> None:
    (tmp_path / "a").write_text("1\n")

    def stops(file: BinaryIO) -> Iterator[bytes]:
        yield file.readline()
        raise kind("the generator's")

    async with aiter(ByteStream[bytes](str(tmp_path / "a"), stops)) as iterator:
        assert await anext(iterator) == b"1\n"
        with pytest.raises(RuntimeError):
            await anext(iterator)


async def test_files_can_only_be_read_forward(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(300_000) + b"end")
    seen: list[Any] = []

    def skips(file: BinaryIO) -> Iterator[bytes]:
        seen.append(file.name)
        with pytest.raises(OSError, match="forward only"):
            file.seek(0, 2)
        file.seek(300_000)
        with pytest.raises(OSError, match="forward only"):
            file.seek(7)
        yield file.read()

    path = str(tmp_path / "a")
    assert (await read(ByteStream(path, skips)))[0] == [b"end"]
    assert seen == [path]


@pytest.mark.parametrize("size", range(9, 28))
def test_a_truncated_record_is_an_error(size: int, tmp_path: Path) -> None:
    """Unless the file ends between two records."""
    (path := tmp_path / "a.rec").write_bytes(WRITTEN[:size])
    stream: Any = ByteStream(str(path), own_format.records)
    loader: Any = DataLoader(stream, 1, on_error="skip", collate_fn=list)
    whole, rest = divmod(size, 9)
    assert [*loader] == [[record] for record in RECORDS[:whole]]
    assert len(loader.skipped) == bool(rest)
    for skip in loader.skipped:
        end = 9 * whole + (4 if rest < 4 else 9)
        assert isinstance(skip.error, TruncatedReadError)
        assert (skip.error.expected, skip.error.received) == (end, size)
        words = f"{str(path)!r} lacks {end - size} of the {4 if rest < 4 else 5} bytes"
        assert str(skip.error).startswith(words)


# -- descriptions: a state fits only the stream that saved it ------------------------


def numbers(count: int = 40) -> Iterator[int]:
    yield from range(count)


class Called:
    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, value: int) -> int:
        return value + self.number

    def method(self, value: int) -> int:
        return value


def as_tokens(number: int) -> list[int]:
    return [*range(2 + number)]


def double(number: int) -> int:
    return 2 * number


async def triple(value: Any) -> Any:
    return 3 * value


def test_names_of_functions_are_stable() -> None:
    function: Any
    here = __name__
    for function, name in (
        (numbers, f"{here}.numbers"),
        (functools.partial(operator.add, "secret"), "partial(_operator.add)"),
        (lambda x: x, f"{here}.test_names_of_functions_are_stable.<locals>.<lambda>"),
        (Called(3), f"{here}.Called"),
        (Called(3).method, f"{here}.Called.method"),
        (operator.itemgetter("txt"), "operator.itemgetter"),
        (functools.lru_cache(numbers), f"{here}.numbers"),
        (json.loads, "json.loads"),
        (int, "builtins.int"),
    ):
        assert from_iterable(function).describe()["function"] == name


@pytest.mark.filterwarnings("ignore")
def test_descriptions_hide_query_parameters() -> None:
    pytest.importorskip("adbc_driver_sqlite")
    first, second = (
        SQLDataset(
            "sqlite:///x", "SELECT * FROM t WHERE a = ?", key="id", parameters=[value]
        ).describe()
        for value in ("secret", "other")
    )
    assert "secret" not in str(first)
    assert first != second


@pytest.mark.slow
def test_descriptions_are_equal_in_other_processes() -> None:
    """Whatever the hash seed, object addresses and the main module."""
    code = (
        "import json\n"
        f"from {__name__} import Called, numbers\n"
        "from datasets.test_flat_steps import tokenizer\n"
        "from aioloader.datasets import from_iterable\n"
        "stream = from_iterable(numbers).map(Called(1)).tokenize(tokenizer())\n"
        "stream = stream.shuffle(4).batch(2)\n"
        "print(json.dumps(stream.describe()))\n"
    )
    root = str(Path(__file__).parents[2])
    env = {"PYTHONPATH": ":".join([*sys.path, root]), "PYTHONHASHSEED": "7"}
    run = python("-c", code, env=env, check=True)
    stream = from_iterable(numbers).map(Called(2)).tokenize(tokenizer())
    stream = stream.shuffle(4).batch(2)
    assert json.loads(run.stdout) == stream.describe()


# -- states ---------------------------------------------------------------------------


async def state_of(stream: Any, count: int = 5) -> Any:
    return (await read(stream, count))[1]


def chains(folder: Path) -> list[Any]:
    lines, table = text(folder), parquet(folder)
    options: list[dict[str, Any]] = [
        {"shuffle": True},
        {"shuffle": True, "seed": 1},
        {"interleave": 3},
        {"deterministic": False},
        {"encoding": "latin-1"},
    ]
    files = str(folder / "*.txt")
    tokens = from_iterable(numbers).map(as_tokens)
    packings: list[dict[str, Any]] = [
        {},
        {"length": 9},
        {"strategy": "best_fit"},
        {"eos": 1},
        {"last": "pad"},
        {"pad": 1},
        {"shift": False},
    ]
    return [
        *(tokens.pack(**{"length": 8, **option}) for option in packings),
        *(from_dataset(range(count)) for count in (23, 24)),
        from_dataset(range(23), shuffle=True),
        mix({"a": lines, "b": table}, [2, 1]),
        mix({"b": lines, "a": table}, [2, 1]),
        lines,
        *(TextDataset(files, **option) for option in options),
        table,
        parquet(folder, columns=["name"]),
        lines.map(double),
        lines.map(triple),
        lines.filter(bool),
        *(lines.take(count) for count in (30, 29)),
        *(lines.repeat(count) for count in (2, 3)),
        *(lines.epoch_length(count) for count in (9, 8)),
        *(lines.skip(count) for count in (1, 2)),
        *(lines.shuffle(count) for count in (4, 5)),
        lines.shuffle(4, seed=1),
        lines.shuffle(4).filter(bool),
        lines.filter(bool).shuffle(4),
        lines.batch(2),
        lines.batch(2, drop_last=True),
        lines.mix(table),
        lines.mix(table, weights=[2, 1]),
        lines.mix(table, weights=[(0, [1, 1]), (9, [2, 1])]),
        lines.mix(table, until="first"),
        lines.mix(table.shuffle(3)),
        table.mix(lines),
        lines.mix(table, table),
    ]


async def test_no_state_fits_another_stream(tmp_path: Path) -> None:
    streams = chains(tmp_path)
    states = [await state_of(stream) for stream in streams]
    for (i, stream), (j, state) in itertools.product(
        enumerate(streams), enumerate(states)
    ):
        if i == j:
            stream.load_state_dict(state)
            continue
        with pytest.raises(StateMismatchError, match="is of another stream:") as caught:
            stream.load_state_dict(state)
        assert caught.value.expected == state["stream"]
        assert caught.value.found == stream.describe()


async def test_a_mismatch_error_names_the_difference() -> None:
    first, tokens = from_iterable(numbers), from_iterable(numbers).map(as_tokens)
    chain = first.shuffle(4).batch(2)
    for saved, loaded, words in (
        (chain, first.shuffle(8).batch(2), "size of shuffle was 4, and is 8;"),
        (chain, first.shuffle(4, seed=1).batch(2), "seed of shuffle was 0, and is 1"),
        (
            chain,
            first.shuffle(4).batch(2, drop_last=True),
            "drop_last of batch was False, and is True",
        ),
        (
            chain,
            first.shuffle(4),
            "it was saved by iterable.shuffle.batch, and this is iterable.shuffle;",
        ),
        (chain, first.batch(2).shuffle(4), "and this is iterable.batch.shuffle"),
        (
            first.mix(first.take(3)),
            first.mix(first.take(4)),
            "stream 1 of mix: count of take was 3, and is 4",
        ),
        (mix({"a": first}), mix({"b": first}), "names of mix was"),
        (first.mix(first), first.mix(first, weights=[1, 2]), "weights of mix was"),
        (tokens.pack(8), tokens.pack(9), "length of pack was 8, and is 9"),
        (
            from_dataset(range(23)),
            from_dataset(range(24)),
            "length of dataset was 23, and is 24",
        ),
    ):
        state = await state_of(saved)
        with pytest.raises(StateMismatchError, match=re.escape(words)):
            loaded.load_state_dict(state)


async def test_another_function_name_is_only_a_warning() -> None:
    state = await state_of(from_iterable(range(40)).map(double))
    stream = from_iterable(range(40)).map(str)
    with pytest.warns(UserWarning, match=r"function of map was '.*double', and is 'b"):
        stream.load_state_dict(state)
    assert (await read(stream))[0] == [str(number) for number in range(5, 40)]


async def test_moved_data_and_read_options_keep_a_state_valid(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    text(tmp_path / "a"), text(tmp_path / "b")
    here = TextDataset("*.txt", store=tmp_path / "a").map(triple, concurrency=2)
    moved = str(tmp_path / "b" / "*.txt")
    there = TextDataset(moved, max_bytes=1 << 20, cache=tmp_path / "c")
    names, state = await read(here, 7)
    stream = there.map(triple, concurrency=9)
    stream.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert names + (await read(stream))[0] == (await read(here))[0]


async def test_a_state_of_other_shards_is_refused(tmp_path: Path) -> None:
    lines = text(tmp_path)
    state = await state_of(lines)
    (tmp_path / "more.txt").write_text("more\n")
    for strict in (True, False):
        lines.load_state_dict(state, strict=strict)
        with pytest.raises(StateMismatchError, match=r"with 8 shards, but .* has 9"):
            await read(lines)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "fetch": "workers"}])
def test_a_loader_refuses_a_state_when_it_is_loaded(options: Any) -> None:
    first = from_iterable(numbers)
    loader: Any = DataLoader(first.shuffle(4), 5, collate_fn=list, **options)
    changed: Any = DataLoader(first.shuffle(8), 5, collate_fn=list, **options)
    with loader:
        next(iter(loader))
        state = json.loads(json.dumps(loader.state_dict()))
    for strict in (True, False):
        with pytest.raises(StateMismatchError, match="shuffle was 4, and is 8"):
            changed.load_state_dict(state, strict=strict)


async def test_states_of_different_streams_are_not_merged() -> None:
    states = [
        await state_of(from_iterable(numbers).take(count).shard(rank, 2))
        for rank, count in enumerate((8, 9))
    ]
    with pytest.raises(StateMismatchError, match="different streams: count of take wa"):
        merge_states(states)
