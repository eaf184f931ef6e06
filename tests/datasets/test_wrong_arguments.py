"""Wrong arguments, misconfigured stores and missing extras: errors say what to do."""

import asyncio
import copy
import inspect
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore

from aioloader import datasets, pad_collate, progress  # noqa: F401  (for the calls below)
from aioloader.datasets import *  # noqa: F403  (for the calls below)
from aioloader.datasets import (
    ObjectDataset,
    ParquetWriter,
    Requests,
    TarDataset,
    TextDataset,
    from_iterable,
)
from aioloader.datasets.sharded import (
    OrderOptions,
    ShardedStream,
    StoredStream,
    StreamOptions,
)
from aioloader.errors import DatasetError

NOWHERE = "http://no.such.host.invalid/a"
ROWS, SERVER = "sqlite:////no/such/file", "postgresql://h/d"
QUICK = Requests(timeout=2, deadline=0.1, base_delay=0.001)
ONCE: dict[str, Any] = {"retry_config": {"max_retries": 0}}
MIXED = from_iterable([1])


async def one_by_one() -> AsyncIterator[int]:
    yield 1


async def awaited(texts: list[str]) -> list[list[int]]:
    return [[len(text)] for text in texts]


# A call, and the error that it gives.
WRONG = {
    "TarDataset([])": "ValueError: .*list of addresses is empty",
    "TarDataset(None)": "TypeError: .*path or URL, or .* got NoneType",
    "TarDataset([1])": "TypeError: .*but number 0 is of type int",
    "TarDataset(b'a')": "TypeError: addresses must be .* got bytes",
    "TarDataset('a', store=3)": "TypeError: store must be .* got int",
    "TarDataset('a', requests={'timeout': 3})": (
        r"TypeError: requests must be aioloader.datasets.Requests\(timeout=.*, got dict"
    ),
    "ObjectDataset('s3://b', [], requests=3)": "TypeError: requests must be .* got int",
    "TarDataset('a', cache=3)": "TypeError: cache must be a directory",
    "TarDataset('a', cache_bytes=0)": "ValueError: cache_bytes must be at least 1, g",
    "TarDataset('a').cache('x', max_bytes=0)": "ValueError: max_bytes must be at lea",
    "MIXED.map(abs).cache('x')": "TypeError: .*reads no shards",
    "TarDataset('a', seed='x')": "TypeError: seed must be an integer",
    "TextDataset('a', interleave='x')": "TypeError: interleave must be an int.*got str",
    "TextDataset('a', interleave=0)": "ValueError: interleave must be at least 1, got",
    "TextDataset('a', max_bytes=None)": "TypeError: max_bytes must be .*got NoneType",
    "TextDataset('a', max_bytes=0)": "ValueError: max_bytes must be at least 1, got 0",
    "TextDataset('a').shard(2, 2)": r"ValueError: rank must be in range\(2\), got 2",
    "JSONLinesDataset('a', max_sample_bytes=0)": (
        "ValueError: max_sample_bytes must be at least 1, got 0"
    ),
    "TextDataset('a', encoding='no')": "LookupError: .*encoding: no",
    "ParquetDataset('a', columns=[1])": "TypeError: columns must be a list of names",
    **{
        f"ParquetDataset('a', filters={filters})": "ValueError: filters must be an expr"
        for filters in ([], "'n > 1'", [("n", ">")], [("n", "~", 1)])
    },
    "ArrowDataset('a', nulls=3)": "TypeError: nulls must be a dict of .*, got int",
    # A set has another order in each process, so a state could not name it.
    "CSVDataset('a', {'a', 'b'})": "TypeError: columns must be a list of names, got",
    "CSVDataset('a', null_values={'-'})": "TypeError: null_values must be a list, got",
    "TarDataset('htps://h/a.tar')": (
        "ValueError: no object store is known for the URL 'htps://h'; known are s3, gs"
    ),
    "TarDataset('file://a/b.tar')": "ValueError: .*slashes, as in 'file:///a/b.tar'",
    "TarDataset('/a.tar', store_options={'region': 'x'})": (
        "ValueError: '/a.tar' is local, and takes no store_options: region"
    ),
    "TarDataset('a.tar', store='/', store_options={'region': 'x'})": (
        "ValueError: '/' is local, and takes no store_options: region"
    ),
    "TarDataset('s3://b/a.tar', store_options={'regoin': 'x'})": (
        "ValueError: .*key: 'regoin' is not .*: did you mean 'region'"
    ),
    "TarDataset(['a', 's3://b{1,2}/a'], store_options={'regoin': 'x'})": (
        "ValueError: cannot open 's3://b1': .*'region'"
    ),
    "TarDataset('a', store=MemoryStore(), store_options={'region': 'x'})": (
        r"TypeError: .*pass them to MemoryStore\(\)"
    ),
    "TarDataset('a', store_options='x')": (
        "TypeError: .*must be a dict of names to values, such as {'region'.*, got str"
    ),
    "ObjectDataset('s3://b', 5)": "TypeError: keys must be an iterable",
    "ObjectDataset('s3://b', [1])": "TypeError: names must be strings",
    "ObjectDataset('/', prefix=5)": "TypeError: prefix must be a str",
    "ObjectDataset('/', prefix='../b')": "ValueError: prefix='../b' must be the first",
    "ObjectDataset(7, ['x'])": "TypeError: .*Source as store=",
    "ObjectDataset(None)": "TypeError: store must be a URL, path or store of obst",
    "ObjectDataset('s3://b', 'one')": "TypeError: .*iterable of keys, got the string",
    "ObjectDataset('s3://b', ['k'], prefix='p')": "ValueError: .*keys or prefix, not",
    "ObjectDataset('ftp://h/x')": "ValueError: no object store is known .* 'ftp://h/x'",
    "ObjectDataset(MemoryStore())": "ValueError: no object in 'memory://'",
    "ObjectDataset('memory:///')": "ValueError: no object in 'memory://'",
    "ObjectDataset('https://h', ['k'], store_options={'region': 'x'})": (
        "ValueError: .*only the store_options client_options and retry_config"
    ),
    "ObjectDataset('memory:///', ['k'], store_options={'region': 'x'})": (
        "ValueError: .*only the store_options client_options and retry_config"
    ),
    "ObjectDataset('gs://b', ['k'], store_options={'regoin': 'x'})": (
        "ValueError: .*key: 'regoin' is not .*: did you mean 'region'"
    ),
    "ObjectDataset('az://b', [], store_options={'account_name': 'a', 'sas': 'x'})": (
        "ValueError: .*key: 'sas' is not valid for store 'MicrosoftAzure'"
    ),
    "ObjectDataset('az://b', ['k'], store_options={'use_emulator': 'maybe'})": (
        "ValueError: .*refuses the value .* 'use_emulator'"
    ),
    "ObjectDataset('file:///', ['k'], store_options={'region': 'x'})": (
        "ValueError: .*is local, and takes no store_options"
    ),
    "FileDataset(5)": "TypeError: paths must be a pattern or paths",
    "FileDataset([1])": "TypeError: .*must be a path, got int",
    "FileDataset([], root=5)": "TypeError: root must be a directory",
    "FileDataset([], num_threads='x')": "TypeError: num_threads must be an int.* got s",
    "FileDataset([], num_threads=0)": "ValueError: num_threads must be at least 1, got",
    "FileDataset('s3://b/*')": (
        "ValueError: 's3://b/[*]' is a URL, and FileDataset reads files: use ObjectDat"
    ),
    "TarDataset('a', missing_end='no')": "ValueError: missing_end must be 'error' or",
    "ArrowDataset('a', missing_end=None)": "ValueError: missing_end must be 'error' o",
    "TarWriter('')": "ValueError: the destination is empty; '.' is the current dir",
    "TarWriter('/x', name='a/b')": "ValueError: .*got 'a/b'; folders belong in the d",
    "TarWriter('/x', shard_bytes=0)": "ValueError: shard_bytes must be at least 1, got",
    "TarWriter('/x', shard_samples=0)": "ValueError: shard_samples must be at least 1",
    "TarWriter('/x', shard_size=1)": "TypeError: .*did you mean 'shard_",
    "TarWriter('/x', store_options={'region': 'x'})": "ValueError: .*_options: region",
    "TextDataset('x', store='hf://datasets/a/b', store_options={'region': 'x'})": (
        "TypeError: .*region; it has 'token' and 'endpoint'"
    ),
    "TarWriter('/x', metadata={'x': object()})": "TypeError: .*not JSON serializable",
    "TarWriter('gopher://x')": "ValueError: no object store is known",
    "TokenWriter('a', 'f4')": "ValueError: dtype must be an integer type",
    "TokenWriter('a', 'u2', format='raw')": "ValueError: format must be 'flat' or 'me",
    "TokenWriter('a', 'u4', format='megatron')": (
        "ValueError: .*Megatron has uint8, .* got uint32"
    ),
    "TokenWriter('a', 'u2', eos=1 << 16)": "ValueError: eos is 65,536, .* 0 to 65,535",
    "TokenWriter('a', 'u2', save_bytes=0)": "ValueError: save_bytes must be at least 1",
    "TokenWriter('a', 'u2', store_options={'region': 'x'})": (
        "ValueError: .*is local, and takes no store_options"
    ),
    "TarWriter(7)": "TypeError: .*must be a URL, path or store",
    "SQLDataset(5, 't', key='k')": "TypeError: url must be .* got int",
    "SQLDataset(ROWS, 5, key='k')": "TypeError: query must be a str",
    "SQLDataset(ROWS, 't', key=5)": "TypeError: key must be a string",
    "SQLDataset(ROWS, 't', key='k', parameters='x')": (
        "TypeError: parameters must be a list of values, got str"
    ),
    "SQLDataset(ROWS, 't', key='k', partitions=None)": (
        "TypeError: partitions must be a number or a list of keys, got NoneType"
    ),
    "SQLRows(ROWS, 't', key='k', keys=[], connections='x')": (
        "TypeError: connections must be an integer, got str"
    ),
    "SQLRows(5, 't', key='k', keys=[])": (
        "TypeError: url must be a URL or a pool of asyncpg, got int"
    ),
    "Requests(timeout='x')": "TypeError: timeout must be a number of seconds, got str",
    "Requests(timeout=0)": "ValueError: timeout and deadline must be above 0, got 0 an",
    "Requests(deadline=-1)": "ValueError: timeout and .* above 0, got 30.0 and -1",
    "Requests(base_delay=-1)": "ValueError: delays must not .*, got base_delay=-1, max",
    "CSVDataset('a', delimiter='ab')": "ValueError: delimiter must be one char.*'ab'",
    "CSVDataset('a', quote_char='ab')": "ValueError: quote_char must be one .*'ab'",
    "CSVDataset('a', escape_char='ab')": "ValueError: escape_char must be one .*'ab'",
    "CSVDataset('a', column_types={'a': 'integer'})": "ValueError: column_types=.*'int",
    "CSVDataset('a', column_names='ab')": "TypeError: column_names must be a list",
    "mix([])": "ValueError: .*at least one stream or dataset, got none",
    "mix([[1], [2]], [1, -1])": "ValueError: .*must be 2 positive numbers",
    "mix([[1], [2]], [1, 'x'])": "ValueError: .*must be 2 positive numbers",
    "mix([[1], [2]], [1, float('inf')])": "ValueError: .*must be 2 positive numbers",
    "mix([[1], [2]], [1, float('nan')])": "ValueError: .*must be 2 positive numbers",
    "mix([[1], [2]], [1, 2, 3])": "ValueError: .*must be 2 positive numbers",
    "mix([[1], [2]], [])": "ValueError: .*must be 2 positive numbers",
    "mix({'a': [1]}, {'b': 1})": r"ValueError: .*are of \['b'\], but .*'a'",
    "mix([[1]], [(1, [1])])": r"ValueError: .*start at 0 .*, got \[1\]",
    "mix([[1]], [(0, [1])] * 2)": r"ValueError: .*ascend, got \[0, 0\]",
    "mix([[1]], [(0, [1]), (5, [0])])": "ValueError: .*must be 1 positive",
    "mix([[1]], until='last')": "ValueError: .*must be 'all' or 'first', got 'last'",
    "mix({1: [1], '1': [1]})": r"ValueError: .*equal names: \['1', '1'\]",
    "mix([[1], MIXED])": "TypeError: .*'1' is of ",
    "mix({'a': iter([1])})": "TypeError: .*'a' is of list_iterator",
    "MIXED.map(3)": "TypeError: function must be callable, got int",
    "MIXED.map(one_by_one)": "TypeError: function must return its result",
    "MIXED.filter(None)": "TypeError: function must be callable, got NoneType",
    "MIXED.pack(0)": "ValueError: length must be at least 1, got 0",
    "MIXED.pack(2.5)": "TypeError: length must be an integer",
    "MIXED.pack(8, window=0)": "ValueError: window must be at least 1, got 0",
    "MIXED.pack(8, 'first')": "ValueError: .*'concat' or 'best_fit', got 'first'",
    "MIXED.pack(8, overlong='cut')": "ValueError: overlong must be .*, got 'cut'",
    "MIXED.pack(8, overlong='drop')": "ValueError: overlong, .* need .*'best_fit'",
    "MIXED.pack(8, seed=1)": "ValueError: .* need strategy='best_fit'.*'seed': 1",
    "MIXED.pack(8, last='keep')": "ValueError: last must be 'drop' or 'pad', got 'kee",
    "MIXED.pack(8, eos='</s>')": "TypeError: eos must be an integer, got str",
    "MIXED.pack(8, pad=2**63)": r"ValueError: pad must be below 2\*\*63",
    "MIXED.tokenize(None)": "TypeError: tokenizer must be a tokenizers",
    "MIXED.tokenize('gpt2')": "TypeError: tokenizer must be a tokenizers",
    "MIXED.tokenize({'a': 1})": "TypeError: tokenizer must be a tokenizers",
    "MIXED.tokenize(awaited)": "TypeError: tokenizer must be a tokenizers",
    "MIXED.tokenize(one_by_one)": "TypeError: tokenizer must be a tokenizers",
    "MIXED.tokenize(len, batch=0)": "ValueError: batch must be at least 1, got 0",
    "MIXED.tokenize(len, 1)": "TypeError: column must be a name, got int",
    "MIXED.flat_map(str, concurrency=0)": "ValueError: concurrency must be at least 1",
    "from_dataset(MIXED)": "TypeError: .*__getitem__",
    "from_dataset(iter([1]))": "TypeError: .*__getitem__",
    "from_dataset({1: 2}.values())": "TypeError: .*__getitem__",
    "from_dataset(object)": "TypeError: .*__getitem__",
    "from_dataset([1], concurrency=0)": "ValueError: concurrency must be at least 1, g",
    "from_iterable([]).shuffle(0)": "ValueError: size must be at least 1, got 0",
    "from_iterable([]).batch(0)": "ValueError: size must be at least 1, got 0",
    "from_iterable([]).take(-1)": "ValueError: count must be at least 0, got -1",
    "from_iterable([]).map(abs, concurrency=0)": "ValueError: concurrency must be at",
    "from_iterable([]).mix(MIXED.shard(0, 2))": r"ValueError: shard\(\) applies to the",
    "from_iterable(iter([1]))": "TypeError: .*read only once",
    "from_iterable(3)": "TypeError: .* needs an iterable or .*'builtins.int'",
    "from_iterable(one_by_one)": "TypeError: from_iterable needs an iterable or a fun",
    "from_async_iterable([1])": "TypeError: from_async_iterable needs an iterable or",
    "from_async_iterable(one_by_one())": "TypeError: .*read only once",
    "pad_collate(multiple=0)": "ValueError: multiple must be at least 1, got 0",
    "progress([1])": "TypeError: progress needs an aioloader.DataLoader, got ",
    "iter(from_iterable([]))": "TypeError: .*not iterable",
    # Unknown options of all constructors, with the nearest of their own and shared
    # options.
    "ByteStream('a', one_by_one)": "TypeError: make must be a plain generator func",
    "ByteStream('a', len, shufle=1)": "TypeError: ByteStream.*did you mean 'shuffle'",
    "CSVDataset('a', delimeter=';')": "TypeError: CSVDataset.*did you mean 'delimiter'",
    "JSONLinesDataset('a', sample_bytes=1)": "TypeError: .*mean 'max_sample_bytes'",
    "SQLDataset(ROWS, 't', key='id', shufle=1)": "TypeError: SQLDataset.*mean 'shuffle",
    "SQLDataset(ROWS, 't', key='id', partition=1)": "TypeError: .*mean 'partitions'",
    "SQLRows(ROWS, 't', key='id', keys=[], shufle=1)": "TypeError: SQLRows.*'shufle'",
    "SQLRows.discover(ROWS, 't', key='id', conections=1)": (
        r"TypeError: SQLRows.discover\(\) got an unknown option 'conections': .*'connec"
    ),
    "ObjectDataset('s3://b', [], shufle=1)": "TypeError: ObjectDataset.*'shufle'",
    "ObjectDataset.discover('s3://b', prefx=1)": (
        r"TypeError: ObjectDataset.discover\(\) got .*'prefx': did you mean 'prefix'"
    ),
    "FileDataset([], threads=1)": "TypeError: FileDataset.*did you mean 'num_threads'",
    "FileDataset.discover('*', shufle=1)": "TypeError: FileDataset.discover.*'shufle'",
}


@pytest.mark.slow
@pytest.mark.parametrize(("call", "error"), WRONG.items(), ids=WRONG)
def test_constructors_refuse_wrong_arguments(call: str, error: str) -> None:
    with pytest.raises((LookupError, TypeError, ValueError)) as raised:
        eval(call)
    assert re.match(error, f"{type(raised.value).__name__}: {raised.value}")
    assert not Path("/x").exists()


@pytest.mark.parametrize(
    "kind", ["Arrow", "CSV", "JSONLines", "Parquet", "Tar", "Text"]
)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shufle": True}, r"option 'shufle': did you mean 'shuffle'\?"),
        ({"interleaves": 2}, r"did you mean 'interleave'\?"),
        ({"store_option": {}}, r"did you mean 'store_options'\?"),
        ({"cache_size": 1}, r"did you mean 'cache_bytes'\?"),
        ({"region": "x"}, r"store belong in store_options={'region': \.\.\.}"),
        ({"aws_region": "x"}, r"store belong in store_options={'aws_region': \.\.\.}"),
        ({"client_options": {}}, "belong in store_options"),
        ({"zzz": 1}, "it has cache, cache_bytes, .*deterministic, "),
    ],
)
def test_unknown_options_name_the_nearest(kind: str, options: Any, words: str) -> None:
    name = f"{kind}Dataset"
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unknown .*{words}"):
        getattr(datasets, name)("a", **options)


def test_subclasses_may_add_options() -> None:
    class Mine(TarDataset):
        def __init__(self, *, quality: int = 1, **options: Any) -> None:
            super().__init__("a", **options)
            self.quality = quality

    assert Mine(quality=2, shuffle=True).quality == 2
    with pytest.raises(TypeError, match=r"^Mine\(\) .*'qualty': did you mean 'quality"):
        Mine(qualty=2)


@pytest.mark.parametrize(
    ("shared", "constructors"),
    [(OrderOptions, [ShardedStream]), (StreamOptions, [ShardedStream, StoredStream])],
)
def test_typed_options_are_those_of_the_constructors(
    shared: Any, constructors: list[type]
) -> None:
    """A type checker knows the options that are taken, in the same order."""
    taken = [
        name
        for made in constructors
        for name, parameter in inspect.signature(made).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    assert list(shared.__annotations__) == taken


def test_wrapped_constructors_keep_their_signatures() -> None:
    for make, names in (
        (TextDataset, ["addresses", "encoding", "max_sample_bytes", "options"]),
        (ParquetWriter, ["destination", "name", "schema", "compression"]),
    ):
        assert [*inspect.signature(make).parameters][: len(names)] == names


@pytest.fixture
def no_credentials(monkeypatch: pytest.MonkeyPatch, unused_port: int) -> dict[str, Any]:
    """Return the options of a machine without credentials."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    return {"metadata_endpoint": f"http://127.0.0.1:{unused_port}", **ONCE}


async def first(stream: Any) -> Any:
    async with aiter(stream) as iterator:
        return await anext(iterator)


async def test_missing_credentials_are_reported(no_credentials: dict[str, Any]) -> None:
    words = "there are no credentials: set the environment variables, or pass store_opt"
    stream = TarDataset("s3://b/a.tar", store_options=no_credentials, requests=QUICK)
    with pytest.raises(DatasetError, match=words):
        await first(stream)
    objects = ObjectDataset(
        "s3://b", ["k"], store_options=no_credentials, requests=QUICK
    )
    with pytest.raises(DatasetError, match=words):
        await objects[0]
    await objects.aclose()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("TarDataset('az://c/a.tar')", "Account must be specified: name it in st"),
        ("TarDataset('az://c/*.tar')", "Account must be specified: name it in st"),
        ("ParquetDataset('a', store='az://c')", "cannot open 'az://c': .*Account mu"),
        ("TarDataset('*', store='/no/such')", "no shard .* is no directory '/no/such'"),
        ("TextDataset('/no/such/a')", "no such file: '/no/such/a'"),
        ("ParquetDataset('/no/such/a')", "no such file: '/no/such/a'"),
        ("TarDataset('/no/such/*.tar')", r"no shard matches '/no/such/\*\.tar'"),
        ("TextDataset('/')", "'/' is a directory, not a file"),
        ("TarDataset('a//b', store=MemoryStore())", "cannot address the key 'a//b'"),
        ("TarDataset('../b.tar', store=MemoryStore())", "copy it to another key"),
        (
            "TextDataset(NOWHERE, store_options=ONCE, requests=QUICK)",
            "check the host, the network and certificates|HTTP 5",
        ),
    ],
)
async def test_wrong_addresses_fail_at_the_first_read(
    call: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    async with asyncio.timeout(20):
        with pytest.raises((DatasetError, ValueError), match=words):
            await first(eval(call))


async def test_names_that_obstore_cannot_read_are_errors(tmp_path: Path) -> None:
    (tmp_path / "a\nb").touch()
    words = r"cannot list .*the key .*: copy it to another key, or pass"
    with pytest.raises(DatasetError, match=words):
        await ObjectDataset.discover(tmp_path)
    objects = ObjectDataset(MemoryStore(), ["a//b"])
    with pytest.raises(DatasetError, match="obstore cannot address the key 'a//b'"):
        await objects[0]
    await objects.aclose()


@pytest.mark.parametrize(
    ("module", "call", "extra"),
    [
        ("obstore.store", "TarDataset('s3://b/a.tar')", "objects"),
        ("obstore.store", "TextDataset('a', store='https://h')", "objects"),
        ("obstore.store", "ObjectDataset('memory:///', ['k'])", "objects"),
        ("pyarrow", "ParquetDataset('a')", "arrow"),
        ("pyarrow", "ArrowDataset('a')", "arrow"),
        ("pyarrow", "CSVDataset('a')", "arrow"),
        ("adbc_driver_sqlite.dbapi", "SQLDataset(ROWS, 't', key='k')", "sql"),
        ("adbc_driver_postgresql.dbapi", "SQLDataset(SERVER, 't', key='k')", "sql"),
        ("asyncpg", "SQLRows(SERVER, 't', key='k', keys=[])", "sql"),
    ],
)
def test_missing_extras_say_how_to_install_them(
    module: str, call: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf'pip install "aioloader\[{extra}\] @ git'):
        eval(call)


async def test_missing_zstandard_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "a.txt.zst").touch()
    for module in ("zstandard", "compression.zstd"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r'pip install "aioloader\[zstd\] @ git'):
        await first(TextDataset(str(tmp_path / "a.txt.zst")))


def with_option(name: str) -> Any:
    options: Any = {name: 1}
    return lambda _: TarDataset("a.tar", **options)


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        (lambda stream: stream.to_tuple("jpg", "cls"), ".map(lambda sample"),
        (lambda stream: stream.map_tuple(bytes, int), "use .map()"),
        (lambda stream: stream.batched(20), ".batch(size)"),
        (lambda stream: stream.with_format("torch"), "the DataLoader makes tensors"),
        (lambda stream: stream.map(len).with_epoch(20), ".epoch_length(count)"),
        (lambda stream: stream.shuffle(buffer_size=100), ".shuffle(1000)"),
        (lambda stream: stream.map(len, batched=True), ".batch(size).map("),
        (with_option("shardshuffle"), "shuffle=True"),
        (with_option("resampled"), ".repeat()"),
        (with_option("nodesplitter"), "rank='auto'"),
        (lambda _: TarDataset("pipe:curl http://a/b.tar"), "https://"),
    ],
)
def test_names_of_other_loaders_suggest_ours(wrong: Any, hint: str) -> None:
    """WebDataset's and Hugging Face's; `hasattr` and copies work as usual."""
    stream = TarDataset("a.tar")
    with pytest.raises((AttributeError, TypeError, ValueError)) as caught:
        wrong(stream)
    assert hint in str(caught.value)
    assert not hasattr(copy.copy(stream), "to_tuple")
