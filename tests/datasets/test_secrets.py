"""Credentials are in no error, no repr and no pickle, whoever may have said them."""

import base64
import inspect
import json
import pickle
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st
from obstore.store import HTTPStore, LocalStore, S3Store

from aioloader.datasets import (
    ArrowDataset,
    CSVDataset,
    JSONLinesDataset,
    MDSDataset,
    ObjectDataset,
    ParquetDataset,
    ParquetWriter,
    SQLDataset,
    SQLRows,
    TarDataset,
    TarWriter,
    TextDataset,
)
from aioloader.datasets._stores.redact import carries_secret, redact_url, secret_options
from aioloader.errors import DatasetError

if TYPE_CHECKING:
    from datasets.conftest import Loopback

Serve: TypeAlias = Callable[..., ObjectDataset]
MARKER = "MARKER7secret"
KEY = base64.b64encode(MARKER.encode()).decode()
S3_KEYS = {"access_key_id": "me", "secret_access_key": MARKER}
GOOGLE = json.dumps(
    {
        "private_key": MARKER,
        "private_key_id": "id",
        "client_email": "me@host",
        "disable_oauth": True,
    }
)


def everything_said(error: BaseException) -> str:
    """Return all that a log or another process may see of an error."""
    seen: list[str] = []
    chain: list[BaseException | None] = [error]
    while chain:
        link = chain.pop()
        if link is not None:
            seen += [str(link), repr(link), repr(vars(link))]
            seen += getattr(link, "__notes__", [])
            chain += [link.__cause__, link.__context__]
    return "\n".join([*seen, repr(pickle.dumps(error))])


def from_s3_options(serve: Serve) -> ObjectDataset:
    """Keys among the options, and a body that the server echoes them in."""
    return serve(
        "403",
        "cats/z.bin",
        s3=True,
        access_key_id=f"id-{MARKER}",
        secret_access_key=MARKER,
        session_token=f"token-{MARKER}",
    )


def from_provider(serve: Serve) -> ObjectDataset:
    """A credential provider that fails and tells."""

    def provide() -> Any:
        raise RuntimeError(MARKER)

    return serve("ok", "cats/z.bin", s3=True, credential_provider=provide)


@pytest.mark.parametrize(
    "make",
    [from_s3_options, from_provider],
)
async def test_errors_tell_no_secret(
    serve: Serve, make: Callable[[Serve], ObjectDataset]
) -> None:
    """Wherever the secret was, a failed read does not show it."""
    dataset = make(serve)
    with pytest.raises(DatasetError) as caught:
        await dataset[0]
    assert MARKER not in everything_said(caught.value)
    assert MARKER not in repr(dataset)


async def test_errors_of_a_given_store_tell_no_secret(loopback: "Loopback") -> None:
    """A store that the caller made, with secrets in it, is not shown either."""
    url = loopback.url("404", user=f"me:{MARKER}@", query=f"?sig={MARKER}")
    store = HTTPStore(url, client_options={"allow_http": True})
    async with ObjectDataset(store, ["x"]) as dataset:
        with pytest.raises(DatasetError) as caught:
            await dataset[0]
        assert MARKER not in everything_said(caught.value) + repr(dataset)


async def test_a_signature_in_the_key_is_not_told(serve: Serve) -> None:
    """Whoever passes the tail of a signed URL as a key finds none in the log."""
    with pytest.raises(DatasetError) as caught:
        await serve("404", f"x.png?X-Amz-Signature={MARKER}")[0]
    assert MARKER not in f"{caught.value!r} {vars(caught.value)}"


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
    """What names a place, a file or a switch travels."""
    copy = pickle.loads(
        pickle.dumps(ObjectDataset(store, ["k"], store_options=options))
    )
    assert repr(copy) == repr(ObjectDataset(store, ["k"], store_options=options))


async def test_credentials_of_the_environment_stay_there(s3: str) -> None:
    """They are read where the store is made, and are in no pickle."""
    async with await ObjectDataset.discover(s3) as dataset:
        await dataset[0]
    assert MARKER.encode() not in pickle.dumps(dataset)
    assert MARKER.encode() not in pickle.dumps(ObjectDataset(S3Store("bucket"), ["k"]))


@given(
    st.from_regex(r"[a-z]{1,5}(:[a-z0-9]{0,9})?", fullmatch=True),
    st.from_regex(r"[a-zA-Z0-9=&%/?+]{1,20}", fullmatch=True),
)
def test_redacted_urls_have_neither_user_nor_query(user: str, query: str) -> None:
    """What is shown does not depend on what is secret."""
    url = f"https://{user}@host:81/a/b?{query}"
    assert carries_secret(url)
    assert redact_url(url) == "https://host:81/a/b"


@pytest.mark.parametrize("url", ["/data/x?y", "https://[", "s3://bucket/a"])
def test_secrets_are_told_from_addresses(url: str) -> None:
    """A path is no URL; what cannot be parsed may be anything."""
    assert carries_secret(url) is (url == "https://[")


def test_options_are_searched_in_depth() -> None:
    """Names are given with their path."""
    options = {"a": {"b": {"password": 1}, "c": 2}, "Master-Key": b"", "key": 3}
    assert list(secret_options(options)) == ["a.b.password", "Master-Key"]


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
    """In what they raise."""
    url = f"{url}://me:{MARKER}@host/x"
    secret = {"secret_access_key": MARKER}
    wrong: list[tuple[Any, Any]] = [
        ([url], {"store_options": secret, "unknown": 1}),
        ([url], {"store_options": {**secret, "secret_acces_key": MARKER}}),
        ([url], {"store_options": {**secret, 7: MARKER}}),
        ([[url, 7]], {}),
        (["x"], {"store": url, "interleave": 0}),
        ([url], {"shard_bytes": 0, "requests": 7, "max_bytes": 0}),
    ]
    for args, options in wrong:
        with pytest.raises((TypeError, ValueError)) as caught:
            make(*args, **options)
        assert MARKER not in everything_said(caught.value)


@pytest.mark.parametrize("make", [SQLDataset, SQLRows])
def test_databases_that_are_refused_tell_no_secret(make: Any) -> None:
    """In what they raise."""
    url = f"postgresql://me:{MARKER}@host/db"
    wrong: list[tuple[str, str, dict[str, Any]]] = [
        (url, "t", {"key": "id", "unknown": 1}),
        (url, "t", {"key": "id", "columns": "id"}),
        (url, "t", {"key": 7}),
        (url, "t", {"key": "id", "numeric": "complex"}),
        (f"postgresql://me:{MARKER}?x=1@host/db", "t", {"key": "id"}),
        (f"mysql://me:{MARKER}@host/db", "t", {"key": "id"}),
        (f"postgresql://host/db?{MARKER}", "t", {"key": "id"}),
    ]
    for where, table, options in wrong:
        with pytest.raises((TypeError, ValueError)) as caught:
            make(where, table, **options)
        caught.value.__traceback__ = None
        assert MARKER not in everything_said(caught.value)


def test_wrapped_constructors_keep_their_signatures() -> None:
    """For editors, and for those who ask."""
    for make, names in (
        (TextDataset, ["addresses", "encoding", "max_sample_bytes", "options"]),
        (ParquetWriter, ["destination", "name", "schema", "compression"]),
    ):
        assert [*inspect.signature(make).parameters][: len(names)] == names
