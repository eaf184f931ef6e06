"""What may be shown or written of a store's address and options, and what may not.

Pure functions. They err on the safe side: a name that sounds like a secret is one.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

_SECRET_NAME = re.compile(
    r"secret|passw|token|credential|signature|auth|cookie|bearer|private|"
    r"(^|_)sas(_|$)|access_key|(account|api|customer|encryption|master|shared)_key"
)
# Names that sound like one of the above and are not: files, addresses, switches.
_HARMLESS_NAME = re.compile(
    r"_(file|uri|url|host|endpoint|provider|type|algorithm)$|"
    r"(?<!access_key)_id$|(^|_)(skip_signature|application_credentials)$"
)
_HARMLESS_HEADERS = frozenset({
    "accept", "accept-encoding", "cache-control", "content-type", "range",
    "user-agent", "x-amz-request-payer", "x-goog-user-project", "x-ms-version",
})  # fmt: skip


def redact_url(url: str) -> str:
    """Return ``url`` without user, password, query and fragment.

    The user part of an ``abfs://container@account`` address is its container and stays.

    Raises:
        ValueError: If ``url`` cannot be parsed.
    """
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    netloc = parts.netloc if _is_container(parts.scheme, user) else host
    return f"{parts.scheme}://{netloc}{parts.path}".rstrip("/")


def carries_secret(url: str) -> bool:
    """Tell whether a URL carries a user or password, or a query (a signature)."""
    if "://" not in url:
        return False
    try:
        parts = urlsplit(url)
    except ValueError:
        return True
    user = parts.netloc.rpartition("@")[0]
    return bool(parts.query or (user and not _is_container(parts.scheme, user)))


def _is_container(scheme: str, user: str) -> bool:
    return scheme in {"abfs", "abfss"} and ":" not in user


def secret_options(options: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield the dotted names of options that hold, or sound like, a secret."""
    for name, value in options.items():
        where = f"{path}{name}"
        if name.lower() == "default_headers":
            yield from _secret_headers(value, where)
        elif isinstance(value, Mapping):
            yield from secret_options(value, f"{where}.")
        elif _sounds_secret(name) or (isinstance(value, str) and carries_secret(value)):
            yield where


def _secret_headers(headers: Mapping[str, Any], path: str) -> Iterator[str]:
    for name in headers:
        if name.lower() not in _HARMLESS_HEADERS:
            yield f"{path}.{name}"


def _sounds_secret(name: str) -> bool:
    plain = name.lower().replace("-", "_")
    return bool(_SECRET_NAME.search(plain)) and not _HARMLESS_NAME.search(plain)
