"""Hide secrets in store URLs and options; an option's name may mark it as secret."""

import pickle
import re
from collections.abc import Iterator, Mapping
from typing import Any, Generic, Self, TypeVar
from urllib.parse import urlsplit

from aioloader._transport.codec import ONLY_TO_WORKERS

T = TypeVar("T")

_SECRET_NAME = re.compile(
    r"secret|passw|token|credential|signature|auth|cookie|bearer|private|"
    r"(^|_)sas(_|$)|access_key|(account|api|customer|encryption|master|shared)_key"
)
# Names that match the pattern above but are harmless: files, addresses, switches.
_HARMLESS_NAME = re.compile(
    r"_(file|uri|url|host|endpoint|provider|type|algorithm)$|"
    r"(?<!access_key)_id$|(^|_)(skip_signature|application_credentials)$"
)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
OF_A_URL = "the URL's user, password or query"
_HARMLESS_HEADERS = frozenset({
    "accept", "accept-encoding", "cache-control", "content-type", "range",
    "user-agent", "x-amz-request-payer", "x-goog-user-project", "x-ms-version",
})  # fmt: skip


class _Hidden:
    """Base of values hidden by ``repr`` and pickled only for the loader's workers."""

    __slots__ = ()
    label = OF_A_URL

    def __repr__(self) -> str:
        return "<hidden>"

    def __deepcopy__(self, _memo: Any) -> Self:
        return self

    def __reduce__(self) -> Any:
        raise pickle.PicklingError(
            f"a pickle would hold {self.label} in clear; set environment variables (of "
            "PostgreSQL: PGPASSWORD or PGPASSFILE), or pass a credential_provider"
        )


class Sealed(_Hidden, Generic[T]):
    """A wrapper that hides a secret ``value``; equality compares values."""

    __slots__ = ("label", "value")

    def __init__(self, value: T, label: str) -> None:
        self.value: T = value
        self.label: str = label

    def __eq__(self, sealed: object) -> bool:
        return isinstance(sealed, Sealed) and self.value == sealed.value

    def __hash__(self) -> int:
        return hash((Sealed, self.value))


class SecretURL(_Hidden, str):
    """A URL with a secret, hidden by ``repr`` and pickled only for loader workers."""

    __slots__ = ()


def revealed(value: Any) -> Any:
    """Return the value, unsealed if ``Sealed``; do not store it in an attribute."""
    return value.value if isinstance(value, Sealed) else value


ONLY_TO_WORKERS[Sealed] = lambda sealed: (Sealed, (sealed.value, sealed.label))
ONLY_TO_WORKERS[SecretURL] = lambda url: (SecretURL, (str(url),))


def seal_url(url: str) -> str:
    """Return a URL, as a ``SecretURL`` if it contains a secret."""
    return SecretURL(url) if carries_secret(url) else url


def redact_url(url: str) -> str:
    """Return ``url`` without user, password, query and fragment.

    The user part of ``abfs://container@account`` is a container and is kept. Outside of
    HTTP, ``#`` is part of a name, and so is ``?`` unless a ``=`` follows.
    """
    scheme, _, rest = url.partition("://")
    if _is_web(scheme):
        rest = re.split("[?#]", rest, maxsplit=1)[0]
    netloc, slash, path = rest.partition("/")
    user, _, host = netloc.rpartition("@")
    if _is_container(scheme, user):
        host = netloc
    return f"{scheme}://{redact_key(host + slash + path)}".rstrip("/")


def redact_key(key: str) -> str:
    """Cut a signed URL's query off a key: from the first ``?``, if a ``=`` follows."""
    name, _, query = key.partition("?")
    return name if "=" in query else key


def redact_text(text: str) -> str:
    return _URL.sub(lambda match: redact_url(match[0]), text)


def carries_secret(url: str) -> bool:
    """Return whether a URL has a user, password, query, or (HTTP) fragment."""
    scheme, separator, rest = url.partition("://")
    if not separator or not ("@" in rest or "?" in rest or "#" in rest or "[" in rest):
        return False
    user = re.split("[/?#]", rest, maxsplit=1)[0].rpartition("@")[0]
    if user and not _is_container(scheme, user):
        return True
    if not _is_web(scheme):
        return redact_key(rest) != rest
    try:
        parts = urlsplit(url)
    except ValueError:
        return True
    return bool(parts.query or parts.fragment)


def _is_web(scheme: str) -> bool:
    return scheme.lower() in {"http", "https"}


def _is_container(scheme: str, user: str) -> bool:
    return scheme.lower() in {"abfs", "abfss"} and ":" not in user


def secret_options(options: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield the dotted names of options whose name or value suggests a secret."""
    for name, value in options.items():
        where, plain = f"{path}{name}", str(name).lower().replace("-", "_")
        sounds = _SECRET_NAME.search(plain) and not _HARMLESS_NAME.search(plain)
        if plain == "default_headers":
            for header in value:
                if header.lower() not in _HARMLESS_HEADERS:
                    yield f"{where}.{header}"
        elif isinstance(value, Mapping):
            yield from secret_options(value, f"{where}.")
        elif sounds or (isinstance(value, str) and carries_secret(value)):
            yield where
