"""Wrong arguments, misconfigured stores and missing extras: what to do is said."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore

from aioloader.datasets import (
    ArrowDataset,
    CSVDataset,
    FileDataset,
    JSONLinesDataset,
    ObjectDataset,
    ParquetDataset,
    Requests,
    SQLDataset,
    SQLRows,
    TarDataset,
    TextDataset,
)
from aioloader.errors import DatasetError

Make = Callable[[], Any]
ROWS = "sqlite:////no/such/file"
QUICK = Requests(timeout=2, deadline=0.1, base_delay=0.001)
ONCE: dict[str, Any] = {"retry_config": {"max_retries": 0}}

WRONG: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "no addresses": (lambda: TarDataset([]), ValueError, "list of addresses is empty"),
    "None": (lambda: TarDataset(None), TypeError, "path or URL, or .* got NoneType"),  # type: ignore[arg-type]
    "numbers": (lambda: TarDataset([1]), TypeError, "but number 0 is of type int"),  # type: ignore[list-item]
    "bytes": (lambda: TarDataset(b"a"), TypeError, "addresses must be .* got bytes"),  # type: ignore[arg-type]
    "store": (lambda: TarDataset("a", store=3), TypeError, "store must be .* got int"),  # type: ignore[arg-type]
    "requests": (
        lambda: TarDataset("a", requests={"timeout": 3}),  # type: ignore[arg-type]
        TypeError,
        r"requests must be aioloader.datasets.Requests\(timeout=.*, got dict",
    ),
    "requests of objects": (
        lambda: ObjectDataset("s3://b", [], requests=3),  # type: ignore[arg-type]
        TypeError,
        "requests must be .* got int",
    ),
    "cache": (lambda: TarDataset("a", cache=3), TypeError, "cache must be a directory"),  # type: ignore[arg-type]
    "cache_bytes": (
        lambda: TarDataset("a", cache_bytes=0),
        ValueError,
        "cache_bytes must be at least 1, got 0",
    ),
    "seed": (lambda: TarDataset("a", seed="x"), TypeError, "seed must be an integer"),  # type: ignore[arg-type]
    "interleave": (
        lambda: TextDataset("a", interleave="x"),  # type: ignore[arg-type]
        TypeError,
        "interleave must be an integer, got str",
    ),
    "max_bytes": (
        lambda: TextDataset("a", max_bytes=None),  # type: ignore[arg-type]
        TypeError,
        "max_bytes must be an integer, got NoneType",
    ),
    "max_sample_bytes": (
        lambda: JSONLinesDataset("a", max_sample_bytes=0),
        ValueError,
        "max_sample_bytes must be at least 1, got 0",
    ),
    "encoding": (lambda: TextDataset("a", encoding="no"), LookupError, "encoding: no"),
    "columns": (
        lambda: ParquetDataset("a", columns=[1]),  # type: ignore[list-item]
        TypeError,
        "columns must be a list of names",
    ),
    "nulls": (
        lambda: ArrowDataset("a", nulls=3),  # type: ignore[arg-type]
        TypeError,
        "nulls must be a dict of column to value, got int",
    ),
    "scheme": (
        lambda: TarDataset("htps://h/a.tar"),
        ValueError,
        "no object store is known for the URL 'htps://h'; known are s3, gs, az",
    ),
    "file URL": (
        lambda: TarDataset("file://a/b.tar"),
        ValueError,
        "three slashes, as in 'file:///a/b.tar'",
    ),
    "local options": (
        lambda: TarDataset("/a.tar", store_options={"region": "x"}),
        ValueError,
        "'/a.tar' is local, and takes no store_options: region",
    ),
    "options of a folder": (
        lambda: TarDataset("a.tar", store="/", store_options={"region": "x"}),
        ValueError,
        "'/' is local, and takes no store_options: region",
    ),
    "option": (
        lambda: TarDataset("s3://b/a.tar", store_options={"regoin": "x"}),
        ValueError,
        "does not know the option 'regoin': did you mean 'region'",
    ),
    "option of braces": (
        lambda: TarDataset(["a", "s3://b{1,2}/a"], store_options={"regoin": "x"}),
        ValueError,
        "cannot open 's3://b1': .*'region'",
    ),
    "options of a store": (
        lambda: TarDataset("a", store=MemoryStore(), store_options={"region": "x"}),
        TypeError,
        r"pass them to MemoryStore\(\)",
    ),
    "no options": (
        lambda: TarDataset("a", store_options="x"),  # type: ignore[arg-type]
        TypeError,
        r"must be a dict of names to values, such as {'region'.*, got str",
    ),
    "keys": (lambda: ObjectDataset("s3://b", 5), TypeError, "keys must be an iterable"),  # type: ignore[arg-type]
    "a key": (lambda: ObjectDataset("s3://b", [1]), TypeError, "names must be strings"),  # type: ignore[list-item]
    "prefix": (lambda: ObjectDataset("/", prefix=5), TypeError, "prefix must be a str"),  # type: ignore[arg-type]
    "no store": (lambda: ObjectDataset(None), TypeError, "store must be a URL, path"),  # type: ignore[arg-type]
    "paths": (lambda: FileDataset(5), TypeError, "paths must be a pattern or paths"),  # type: ignore[arg-type]
    "a path": (lambda: FileDataset([1]), TypeError, "must be a path, got int"),  # type: ignore[list-item]
    "root": (lambda: FileDataset([], root=5), TypeError, "root must be a directory"),  # type: ignore[arg-type]
    "threads": (
        lambda: FileDataset([], num_threads="x"),  # type: ignore[arg-type]
        TypeError,
        "num_threads must be an integer, got str",
    ),
    "a URL": (
        lambda: FileDataset("s3://b/*"),
        ValueError,
        "'s3://b/[*]' is a URL, and FileDataset reads files: use ObjectDataset",
    ),
    "url": (lambda: SQLDataset(5, "t", key="k"), TypeError, "url must be .* got int"),  # type: ignore[arg-type]
    "query": (lambda: SQLDataset(ROWS, 5, key="k"), TypeError, "query must be a str"),  # type: ignore[arg-type]
    "key": (lambda: SQLDataset(ROWS, "t", key=5), TypeError, "key must be a string"),  # type: ignore[arg-type]
    "parameters": (
        lambda: SQLDataset(ROWS, "t", key="k", parameters="x"),
        TypeError,
        "parameters must be a list of values, got str",
    ),
    "partitions": (
        lambda: SQLDataset(ROWS, "t", key="k", partitions=None),  # type: ignore[arg-type]
        TypeError,
        "partitions must be a number or a list of keys, got NoneType",
    ),
    "connections": (
        lambda: SQLRows(ROWS, "t", key="k", keys=[], connections="x"),  # type: ignore[arg-type]
        TypeError,
        "connections must be an integer, got str",
    ),
    "pool": (
        lambda: SQLRows(5, "t", key="k", keys=[]),
        TypeError,
        "url must be a URL or a pool of asyncpg, got int",
    ),
    "timeout": (
        lambda: Requests(timeout="x"),  # type: ignore[arg-type]
        TypeError,
        "timeout must be a number of seconds, got str",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_in_the_constructor(what: str) -> None:
    """By the name of the argument, with what was given and what to give."""
    make, kind, words = WRONG[what]
    with pytest.raises(kind, match=words):
        make()


@pytest.fixture
def no_credentials(monkeypatch: pytest.MonkeyPatch, unused_port: int) -> dict[str, Any]:
    """Return options of a machine that has no credentials of its own."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    return {"metadata_endpoint": f"http://127.0.0.1:{unused_port}", **ONCE}


async def first(stream: Any) -> Any:
    """Return the first sample."""
    async with aiter(stream) as iterator:
        return await anext(iterator)


async def test_no_credentials(no_credentials: dict[str, Any]) -> None:
    """What to set, not only that a connection was refused."""
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
    ("make", "words"),
    [
        (
            lambda: TarDataset("az://c/a.tar"),
            "Account must be specified: name it in st",
        ),
        (
            lambda: TarDataset("az://c/*.tar"),
            "Account must be specified: name it in store_options",
        ),
        (
            lambda: ParquetDataset("a.parquet", store="az://c"),
            "cannot open 'az://c': .*Account must be specified",
        ),
        (
            lambda: TarDataset("*.tar", store="/no/such"),
            "no shard matches .* there is no directory '/no/such'",
        ),
        (lambda: TextDataset("/no/such/a"), "no such file: '/no/such/a'"),
        (lambda: TextDataset("/"), "'/' is a directory, not a file"),
        (lambda: TarDataset("a//b.tar", store=MemoryStore()), "no empty segment"),
        (lambda: TarDataset("../b.tar", store=MemoryStore()), "rename such objects"),
        (
            lambda: TextDataset(
                "http://no.such.host.invalid/a", store_options=ONCE, requests=QUICK
            ),
            "check the host, the network and certificates|HTTP 5",
        ),
    ],
    ids=range(9),
)
async def test_at_the_first_read(
    make: Make, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only the store knows; and no wrong call is made again and again."""
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    stream = make()
    async with asyncio.timeout(20):
        with pytest.raises((DatasetError, ValueError), match=words):
            await first(stream)


async def test_names_that_obstore_cannot_read(tmp_path: Path) -> None:
    """A listing that has one says so, at once."""
    (tmp_path / "a\nb").touch()
    words = "cannot list .*control character, and is UTF-8: rename such objects"
    with pytest.raises(DatasetError, match=words):
        await ObjectDataset.discover(tmp_path)
    objects = ObjectDataset(MemoryStore(), ["a//b"])
    with pytest.raises(DatasetError, match="a key has no empty segment"):
        await objects[0]
    await objects.aclose()


@pytest.mark.parametrize(
    ("module", "make", "extra"),
    [
        ("obstore.store", lambda: TarDataset("s3://b/a.tar"), "objects"),
        ("obstore.store", lambda: TextDataset("a", store="https://h"), "objects"),
        ("obstore.store", lambda: ObjectDataset("s3://b", []), "objects"),
        ("pyarrow", lambda: ParquetDataset("a"), "arrow"),
        ("adbc_driver_sqlite.dbapi", lambda: SQLDataset(ROWS, "t", key="k"), "sql"),
        (
            "adbc_driver_postgresql.dbapi",
            lambda: SQLDataset("postgresql://h/d", "t", key="k"),
            "sql",
        ),
        (
            "asyncpg",
            lambda: SQLRows("postgresql://h/d", "t", key="k", keys=[]),
            "sql",
        ),
    ],
    ids=range(7),
)
def test_missing_extras(
    module: str, make: Make, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the constructor, with the command that installs it."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf'pip install "aioloader\[{extra}\]"'):
        make()


async def test_missing_zstandard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a shard needs it."""
    (tmp_path / "a.txt.zst").touch()
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ImportError, match=r'pip install "aioloader\[zstd\]"'):
        await first(TextDataset(str(tmp_path / "a.txt.zst")))


def test_sets_have_no_order() -> None:
    """A state would name another order in each process."""
    with pytest.raises(TypeError, match="columns must be a list of names, got"):
        CSVDataset("a.csv", {"a", "b"})
    with pytest.raises(TypeError, match="null_values must be a list, got"):
        CSVDataset("a.csv", null_values={"-", "?"})  # type: ignore[arg-type]
