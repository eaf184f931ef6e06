"""No secret is shown or written by any public object, nor by what it raises.

Canaries are put wherever a secret can be: in addresses, options, stores, answers.
"""

import base64
import json
import logging
import pickle
import reprlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from obstore.store import AzureStore, GCSStore, HTTPStore, LocalStore, S3Store

from aioloader import DataLoader
from aioloader.datasets import (
    ArrowDataset,
    CSVDataset,
    JSONLinesDataset,
    MDSDataset,
    ObjectDataset,
    ParquetDataset,
    ParquetWriter,
    Requests,
    SQLDataset,
    SQLRows,
    TarDataset,
    TarWriter,
    TextDataset,
)
from aioloader.errors import DatasetError

MARKER = "MARKER7secret"
KEY = base64.b64encode(MARKER.encode()).decode()
S3_KEYS: Any = {"access_key_id": "me", "secret_access_key": MARKER}
ACCOUNT = {"private_key": MARKER, "private_key_id": "id", "client_email": "me@host"}
GOOGLE = json.dumps({**ACCOUNT, "disable_oauth": True})
STREAMS = [
    TarDataset, JSONLinesDataset, TextDataset, ParquetDataset, ArrowDataset, CSVDataset,
]  # fmt: skip
ENCODED = "".join(f"%{ord(char):02X}" for char in MARKER)
FORMS = (MARKER, ENCODED, KEY, base64.b64encode(f"me:{MARKER}".encode()).decode())
# Addresses that hold a secret themselves.
URLS = [
    f"https://me:{MARKER}@host/a.tar",
    f"https://{MARKER}@host/a.tar",
    f"https://me:{ENCODED}@host/a.tar",
    f"HTTPS://me:{MARKER}@host:8443/a/{{0..3}}.tar",
    f"https://host/a.tar?X-Amz-Signature={MARKER}&X-Amz-Expires=60",
    f"https://b.s3.amazonaws.com/a.tar?X-Amz-Signature={MARKER}",
    f"https://a.blob.core.windows.net/c/a.tar?sv=2024&sig={MARKER}",
    f"https://host/a.tar?{MARKER}",
    f"https://host/a.tar#token={MARKER}",
    f"http://[::1]:80/a.tar?sig={MARKER}",
    f"s3://me:{MARKER}@bucket/a.tar",
    f"s3://bucket/a.tar?X-Amz-Signature={MARKER}",
    f"gs://bucket/*.tar?token={MARKER}",
    f"abfss://box:{MARKER}@account.dfs.core.windows.net/a.tar",
]


def client(**options: Any) -> dict[str, Any]:
    return {"client_options": options}


MINE, BEARER = {"X-Mine": MARKER}, {"authorization": f"Bearer {MARKER}"}
# A store, its options, and the secret's name in the error of a refused pickle.
OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("s3://b", {"aws_access_key_id": "me", "aws_secret_access_key": MARKER}, "aws_s"),
    ("s3://b", {"config": S3_KEYS}, "config.access_key_id"),
    ("s3://b", {**S3_KEYS, "AWS_SESSION_TOKEN": MARKER}, "AWS_SESSION_TOKEN"),
    ("s3://b", client(default_headers=MINE), "client_options.default_headers.X-Mine"),
    ("s3://b", client(proxy_url=f"http://me:{MARKER}@proxy"), "client_options.proxy_u"),
    ("s3://b", {"endpoint": f"https://me:{MARKER}@host"}, "endpoint"),
    ("gs://b", {"service_account_key": GOOGLE}, "service_account_key"),
    ("az://box", {"account_name": "a", "account_key": KEY}, "account_key"),
    ("az://box", {"account_name": "a", "sas_key": f"sig={MARKER}"}, "sas_key"),
    ("https://host", client(default_headers=BEARER), "default_headers.authorization"),
]
STORES = [
    (lambda: S3Store("b", **S3_KEYS), "secret_access_key"),
    (lambda: GCSStore("b", service_account_key=GOOGLE), "service_account_key"),
    (lambda: AzureStore("box", account_name="a", account_key=KEY), "account_key"),
    (lambda: HTTPStore(f"https://me:{MARKER}@host/?sig={MARKER}"), "the URL's user"),
    (lambda: HTTPStore("https://host", **client(default_headers=MINE)), "s.x-mine"),
]
POSTGRES = [
    f"postgresql://me:{MARKER}@host/db",
    f"postgres://me:{ENCODED}@host:5432/db",
    f"postgresql://host/db?user=me&password={MARKER}",
    f"postgresql:///db?host=/tmp&password={ENCODED}",
    f"postgresql://me:{MARKER}@a,b:1/db?sslpassword={MARKER}",
    f"postgresql://[::1]/db?password={MARKER}&scram_client_key={MARKER}",
]


def everything_said(error: BaseException) -> str:
    """Return everything that a log or another process may see of an error."""
    seen: list[str] = []
    chain: list[BaseException | None] = [error]
    while chain:
        link = chain.pop()
        if link is not None:
            seen += [str(link), repr(link), repr(vars(link))]
            seen += getattr(link, "__notes__", [])
            chain += [link.__cause__, link.__context__]
    return "\n".join([*seen, repr(pickle.dumps(error))])


def has_canary(text: object) -> str | None:
    return next((form for form in FORMS if form.lower() in str(text).lower()), None)


def dumped(value: Any, seen: set[int] | None = None) -> Iterator[str]:
    """Yield what a debugger shows of an object, its attributes and theirs."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    yield repr(value)
    parts: list[Any] = []
    if isinstance(value, Mapping):
        parts += [*value.keys(), *value.values()]
    elif isinstance(value, (list, tuple, set)):
        parts += value
    elif "aioloader" in type(value).__module__:
        parts += vars(value).values() if hasattr(value, "__dict__") else ()
    for part in parts:
        yield from dumped(part, seen)


def check(made: Any, named: str = "") -> None:
    """Check that an object and its pickle show no canary.

    A pickle may be refused, with an error that names the secret as in ``named``.
    """
    assert named in pickled(made)
    steps = [made]
    if hasattr(made, "shuffle"):
        steps += [made.shuffle(8), made.map(repr).batch(2), made.mix(made)]
        steps += [made.shard(0, 2), made.made_by, made.describe()]
        json.dumps(made.describe())
    if not hasattr(made, "keys") and not hasattr(made, "shards"):
        steps.append(DataLoader(made))
    for step in steps:
        for text in (str(step), repr(step), reprlib.repr(step), *dumped(step)):
            assert has_canary(text) is None, text
        assert has_canary(pickled(step)) is None


def pickled(made: Any) -> str:
    """Return a pickle, or everything that its error says."""
    try:
        return pickle.dumps(made).decode("latin-1")
    except pickle.PicklingError as error:
        said = everything_said(error)
    assert "environment variables" in said or "PGPASS" in said
    return said


# -- what is made -----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("url", URLS, ids=range(len(URLS)))
def test_addresses_show_no_secret(url: str) -> None:
    for make in STREAMS:
        check(make(url))
        check(make([url, url]))
    check(TextDataset("a.txt", store=url.partition("*")[0]))
    check(ObjectDataset(url, ["k"]), "the URL's user, password or query")
    check(TarWriter(url))


@pytest.mark.slow
@pytest.mark.parametrize(("url", "options", "named"), OPTIONS, ids=range(len(OPTIONS)))
def test_options_show_no_secret(url: str, options: dict[str, Any], named: str) -> None:
    check(TarDataset(f"{url}/a.tar", store_options=options))
    check(ParquetDataset("a.parquet", store=url, store_options=options))
    check(ObjectDataset(url, ["k"], store_options=options), named)
    check(TarWriter(url, store_options=options))
    check(ParquetWriter(url, store_options=options))


@pytest.mark.parametrize(("make", "named"), STORES, ids=range(len(STORES)))
def test_given_stores_show_no_secret(make: Callable[[], Any], named: str) -> None:
    check(TarDataset("a.tar", store=make()))
    check(ArrowDataset("a.arrow", store=make()))
    check(ObjectDataset(make(), ["k"]), named)


@pytest.mark.parametrize("url", POSTGRES, ids=range(len(POSTGRES)))
def test_database_urls_show_no_secret(url: str) -> None:
    check(SQLDataset(url, "t", key="id"))
    check(SQLRows(url, "t", key="id", keys=[1, 2]))


async def test_states_and_loaders_show_no_secret(tmp_path: Path, loopback: Any) -> None:
    url = loopback.at("ok", user=f"me:{MARKER}@") + f"/cats/z.bin?sig={MARKER}"
    stream = TextDataset(url)
    async with aiter(stream) as iterator:
        assert await anext(iterator) == "cats-z" * 5
        assert has_canary(json.dumps(iterator.state_dict())) is None
        for text in dumped(iterator):
            assert has_canary(text) is None
    loader: Any = DataLoader(stream, batch_size=1)
    async with loader:
        async for _ in loader:
            assert has_canary(json.dumps(loader.state_dict(), default=repr)) is None
            assert has_canary(repr(loader)) is None


@pytest.mark.parametrize(
    ("store", "options"),
    [
        ("s3://b", {"region": "us-east-1", "skip_signature": True}),
        ("s3://b", {"endpoint": "http://localhost:9000", "config": {"bucket": "b"}}),
        ("s3://b", {"web_identity_token_file": "/f", "sse_kms_key_id": "k"}),
        ("az://b", {"account_name": "me", "authority_id": "t", "client_id": "c"}),
        ("gs://b", {"service_account": "/f", "application_credentials": "/g"}),
        ("abfss://box@me.dfs.core.windows.net/p", {}),
        ("https://host", {"client_options": {"default_headers": {"Accept": "*/*"}}}),
        ("s3://b", {"credential_provider": len, "retry_config": {"max_retries": 2}}),
        (LocalStore("/"), {}),
        (S3Store("b", region="us-east-1"), {}),
    ],
)
def test_harmless_options_are_pickled(store: Any, options: dict[str, Any]) -> None:
    made = ObjectDataset(store, ["k"], store_options=options)
    assert repr(pickle.loads(pickle.dumps(made))) == repr(made)


async def test_credentials_of_the_environment_are_not_pickled(s3: str) -> None:
    async with await ObjectDataset.discover(s3) as dataset:
        await dataset[0]
    assert MARKER.encode() not in pickle.dumps(dataset)
    assert MARKER.encode() not in pickle.dumps(ObjectDataset(S3Store("bucket"), ["k"]))


# -- what is raised ---------------------------------------------------------------

DATABASE = f"postgresql://me:{MARKER}@host/db"


@pytest.mark.parametrize("make", [SQLDataset, SQLRows])
@pytest.mark.parametrize(
    ("url", "options"),
    [
        (DATABASE, {"unknown": 1}),
        (DATABASE, {"columns": "id"}),
        (DATABASE, {"key": 7}),
        (DATABASE, {"numeric": "complex"}),
        # A URL that cannot be parsed may have a password anywhere.
        (f"postgresql://me:{MARKER}/x@host/db", {}),
        (f"postgresql://me:x/{MARKER}@host/db", {}),
        (f"postgresql://me:{MARKER}?x=1@host/db", {}),
        (f"postgresql://me:@{MARKER}@host/db", {}),
        (f"postgresql://me:x#{MARKER}@host/db", {}),
        (f"postgresql://me:x?y={MARKER}@host/db", {}),
        (f"me:{MARKER}@host/db", {}),
        (f"host=h password={MARKER}", {}),
        (f"mysql://me:{MARKER}@host/db", {}),
        (f"sqlite://me:{MARKER}@host/db", {}),
        (f"postgresql://host/db?{MARKER}", {}),
    ],
    ids=range(15),
)
def test_refused_databases_tell_no_secret(make: Any, url: str, options: Any) -> None:
    words = None if options else "url"
    with pytest.raises((TypeError, ValueError), match=words) as said:
        make(url, "t", **{"key": "id", **options})
    said.value.__traceback__ = None
    assert has_canary(everything_said(said.value)) is None


@pytest.mark.parametrize(
    ("make", "url"),
    [
        (TarDataset, "https"),
        (TextDataset, "https"),
        (JSONLinesDataset, "https"),
        (MDSDataset, "https"),
        (ParquetDataset, "https"),
        (ArrowDataset, "https"),
        (CSVDataset, "https"),
        (partial(ObjectDataset, keys=["x"]), "s3"),
        (TarWriter, "s3"),
        (ParquetWriter, "s3"),
    ],
)
def test_constructors_that_raise_tell_no_secret(make: Any, url: str) -> None:
    url = f"{url}://me:{MARKER}@host/x"
    secret = {"secret_access_key": MARKER}
    wrong: list[tuple[Any, Any]] = [
        ([url], {"store_options": secret, "unknown": 1}),
        ([url], {"store_options": {**secret, "secret_acces_key": MARKER}}),
        ([url], {"store_options": {**secret, 7: MARKER}}),
        ([[url, 7]], {}),
        (["x"], {"store": url, "interleave": 0}),
        ([f"ftp://me:{MARKER}@host/x?x={MARKER}"], {}),
        ([f"https://me:{MARKER}@[host/x"], {}),
        ([url], {"store_options": {"client_options": {"timeout": MARKER}}}),
        ([url], {"shard_bytes": 0, "requests": 7, "max_bytes": 0}),
    ]
    for args, options in wrong:
        with pytest.raises((TypeError, ValueError)) as caught:
            make(*args, **options)
        assert MARKER not in everything_said(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["404", "403", "cut", "redirect", "405"])
@pytest.mark.parametrize(
    "kind",
    ["text", "tar", "parquet", "pattern", "few", "object", "given", "key", "listing"],
)
async def test_errors_of_reading_show_no_secret(
    answer: str, kind: str, loopback: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    key = "cats/big.bin" if answer == "cut" else "no/such"
    url = loopback.at(answer, user=f"me:{MARKER}@") + f"/{key}"
    signed = f"{url}?sig={MARKER}"
    client: Any = {"default_headers": {"X-Mine": MARKER}, "allow_http": True}
    once: Any = {"max_retries": 0}
    more: dict[str, Any] = {
        "store_options": {"retry_config": once, "client_options": client},
        "requests": Requests(base_delay=1e12, max_delay=1e12),
    }
    makes: dict[str, Callable[[], Any]] = {
        "text": lambda: TextDataset([signed, url], **more),
        "tar": lambda: TarDataset(signed, **more).shuffle(4).map(len),
        "parquet": lambda: ParquetDataset(signed, **more),
        "pattern": lambda: TextDataset(f"{url}/*.txt", **more),
        "few": lambda: TextDataset([signed, signed], **more).shard(0, 3),
        "object": lambda: ObjectDataset(signed, ["k"], **more),
        "given": lambda: ObjectDataset(
            HTTPStore(signed, client_options=client, retry_config=once),
            ["k"],
            requests=more["requests"],
        ),
        "key": lambda: ObjectDataset(
            loopback.at(answer), [f"{key}?X-Amz-Signature={MARKER}"], **more
        ),
        "listing": lambda: ObjectDataset.discover(signed, **more),
    }
    made = makes[kind]()
    with pytest.raises(Exception, match=r"127\.0\.0\.1|shards") as caught:
        if kind == "listing":
            await made
        elif isinstance(made, ObjectDataset):
            await made[0]
        else:
            async with aiter(made) as iterator:
                await anext(iterator)
    assert has_canary(everything_said(caught.value)) is None
    assert has_canary(caplog.text) is None
    if isinstance(made, ObjectDataset):
        assert has_canary(repr(made)) is None
        await made.aclose()


def provide() -> Any:
    raise RuntimeError(MARKER)


@pytest.mark.parametrize(
    ("answer", "options"),
    [
        ("cut", {"user": f"me:{MARKER}@", "query": f"?sig={MARKER}"}),
        ("403", {"s3": True, **S3_KEYS, "session_token": MARKER}),  # the body has it
        ("ok", {"s3": True, "credential_provider": provide}),
    ],
)
async def test_errors_that_quote_answers_show_no_secret(
    serve: Callable[..., ObjectDataset], answer: str, options: dict[str, Any]
) -> None:
    dataset = serve(answer, "cats/big.bin", **options)
    with pytest.raises(DatasetError) as caught:
        await dataset[0]
    assert has_canary(everything_said(caught.value) + repr(dataset)) is None
