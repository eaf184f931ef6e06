"""Import of obstore, checks of store options, and tracking of obstore's requests.

The checks are needed because obstore rejects most unknown options without a hint, and
bad values without the option's name; it ignores unknown names in ``retry_config``. The
tracking is needed because obstore's threads use the interpreter just after a request.
"""

import asyncio
import base64
import copy
import difflib
import os
import re
import sys
from collections import deque
from collections.abc import Awaitable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from urllib.parse import unquote
from weakref import ref

from aioloader._base.extras import imported
from aioloader.datasets._stores.failures import Reason, failure_of
from aioloader.datasets._stores.redact import Sealed, revealed, secret_options

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")

# Timeout for obstore's threads to release finished requests; 200 of them take 10 ms.
_RELEASE_SECONDS = 1.0
# Options of a store, sealed if one of them is secret.
StoreOptions: TypeAlias = Mapping[str, Any] | Sealed[Mapping[str, Any]]

_RETRY_CONFIG = {"max_retries": 2}
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


def import_obstore() -> ModuleType:
    """Return obstore, imported at the first call; later calls are fast."""
    if sys.modules.get("obstore.store") is None:
        imported("obstore.store", "objects", "object stores and HTTP need obstore")
    return sys.modules["obstore"]


def obstore_errors() -> tuple[type[Exception], ...]:
    """Return the exception types that obstore raises; their texts may hold secrets."""
    base: type[Exception] = import_obstore().exceptions.BaseError
    return base, NotImplementedError, OSError, TypeError, ValueError


class Flights:
    """Tracks one loop's requests until obstore's threads have released them."""

    def __init__(self) -> None:
        self._open: set[asyncio.Future[Any]] = set()
        self._ended: deque[ref[asyncio.Future[Any]]] = deque(maxlen=4096)

    async def follow(self, request: Awaitable[T]) -> T:
        """Await a request of obstore; cancellation also cancels the request.

        Raises a copy of the request's exception: obstore's threads may keep the
        original until their next call, and its traceback would keep frames alive.
        """
        future = asyncio.ensure_future(request)
        self._open.add(future)
        try:
            return await future
        except Exception as exc:  # noqa: BLE001  (a copy is raised)
            failure = copy.copy(exc.with_traceback(None))
        finally:
            self._open.discard(future)
            self._ended.append(ref(future))
            # References from a traceback's frames would look like those of a thread.
            del future, request
        try:
            raise failure
        finally:
            del failure

    async def drain(self, seconds: float | None) -> None:
        """Wait for the release of ended requests; cancel others after ``seconds``."""
        if self._open and seconds is not None:
            # No variable for the finished requests: it would keep references to them.
            late = (await asyncio.wait(self._open, timeout=seconds))[1]
            while late:
                (future := late.pop()).cancel()
                self._ended.append(ref(future))
                del future
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _RELEASE_SECONDS
        # Polling is needed: Rust drops its reference at the end of its last use of the
        # GIL; a callback there would itself have to be waited for.
        while self._are_held() and loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        self._ended.clear()

    def _are_held(self) -> bool:
        if self._ended:
            # References that Rust drops without the GIL are subtracted in a later call.
            import_obstore().Bytes()
        return any(future() is not None for future in self._ended)


def hidden(options: Mapping[str, Any] | None) -> StoreOptions:
    """Check and copy store options; seal the copy if an option is secret."""
    given: Any = {} if options is None else options
    if not isinstance(given, Mapping) or not all(isinstance(n, str) for n in given):
        raise TypeError(
            "store_options must be a dict of names to values, such as "
            f"{{'region': 'eu-west-1'}}, got {type(given).__name__}"
        )
    secrets = ", ".join(secret_options(given))
    return Sealed({**given}, f"the store options {secrets}") if secrets else {**given}


def check_no_options(path: str, options: StoreOptions) -> None:
    if names := ", ".join(revealed(options)):
        raise ValueError(f"{path!r} is local, and takes no store_options: {names}")


def open_store(url: str, label: str, options: Mapping[str, Any]) -> "ObjectStore":
    if (text := _invalid_option(options)) is None:
        try:
            return _new_store(url, options)
        except obstore_errors() as exc:
            failure = failure_of("open", label, exc)
            text = None if Reason(exc).code else _hint(url, options, exc)
        if text is None:
            raise failure  # outside `except`: a context's text may hold secrets
    raise ValueError(f"cannot open {label!r}: {text}")


def _hint(url: str, options: Mapping[str, Any], exc: Exception) -> str:
    """Return the end of an error message, about options that obstore rejected."""
    line, kind = str(exc).partition("\n")[0].rstrip("."), type(exc).__name__
    if kind == "UnknownConfigurationKeyError" or line.startswith("Invalid key"):
        name = line.partition("key: ")[2].split()[0].strip("'").lower()
        near = difflib.get_close_matches(name, _option_names(), 1)
        hint = "its options are in the documentation of obstore"
        return f"{line}: {f'did you mean {near[0]!r}?' if near else hint}"
    if "does not accept" in line:
        return (
            f"{line}; it accepts only the store_options client_options and retry_config"
        )
    reason = line.rpartition(": ")[2]
    if "Missing" in reason or "must be" in reason:
        return f"{reason}: name it in store_options, or set it in the environment"
    if (option := _refused_option(url, options, exc)) is not None:
        return f"it refuses the value of the store option {option!r} ({kind})"
    return f"{kind}; check its options"


def _new_store(url: str, options: Mapping[str, Any]) -> "ObjectStore":
    """Open a store; turn the credentials of an HTTP URL into a header."""
    stores, client = import_obstore().store, dict(options.get("client_options") or {})
    scheme, _, rest = url.partition("://")
    is_web = scheme.lower() in {"http", "https"}
    if any(address.startswith("http://") for address in _addresses(url, options)):
        client.setdefault("allow_http", True)
    user = re.split("[/?#]", rest, maxsplit=1)[0].rpartition("@")[0]
    if not is_web:  # obstore would parse ? and #, which may be part of a key
        url = url.replace("#", "%23").replace("?", "%3F")
    elif user:
        token = base64.b64encode(unquote(user).encode()).decode()
        headers = {"authorization": f"Basic {token}"}
        client["default_headers"] = headers | (client.get("default_headers") or {})
        url = f"{scheme}://{rest[len(user) + 1 :]}"
    # obstore makes two quick retries; `sources.Tries` makes the others.
    prepared = {"retry_config": _RETRY_CONFIG, **options}
    if client:
        prepared["client_options"] = client
    # obstore's S3, Google and Azure stores would drop the query of a signed URL.
    make = stores.HTTPStore if is_web and "?" in url else stores.from_url
    store: ObjectStore = make(url, **prepared)
    return store


def _addresses(url: str, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the URL, and the endpoints in the options and, for S3, the environment."""
    yield url
    for name, value in {**(options.get("config") or {}), **options}.items():
        if "endpoint" in name.lower() or name.lower().endswith("base_url"):
            yield str(value)
    if url.startswith(("s3://", "s3a://")):
        yield from (os.environ.get(name, "") for name in _ENDPOINT_VARIABLES)


def _invalid_option(options: Mapping[str, Any]) -> str | None:
    """Return a message about the first option obstore would misread, or None."""
    for name in (*options, *(options.get("config") or ())):
        if _is_of_client(name):
            return (
                f"{name!r} is an option of the HTTP client; pass it in client_options, "
                f"as store_options={{'client_options': {{{name!r}: ...}}}}"
            )
    retry = options.get("retry_config")
    backoff = retry.get("backoff") if isinstance(retry, Mapping) else None
    parts = {
        "retry_config": (retry, ("backoff", "max_retries", "retry_timeout")),
        "retry_config.backoff": (backoff, ("base", "init_backoff", "max_backoff")),
        "client_options": (options.get("client_options"), None),
    }
    for path, (part, known) in parts.items():
        if part is not None and not isinstance(part, Mapping):
            kind = type(part).__name__
            return f"the store option {path!r} must be a dict, got {kind}"
        for name in part or ():
            if known and name not in known:
                return (
                    f"the store does not know the option {f'{path}.{name}'!r}: known "
                    f"are {', '.join(known)}"
                )
    return None


def _is_of_client(name: str) -> bool:
    """Return whether an option is one of the HTTP client, on which stores panic."""
    try:
        import_obstore().store.S3Store(client_options={name: ""})
    except obstore_errors() as exc:
        return not str(exc).startswith("Invalid key")
    return True


def _option_names() -> list[str]:
    """Return the names of all store options, read from obstore's type stubs."""
    stubs = Path(import_obstore().__file__ or "").parent.glob("_store/*.pyi")
    text = "".join(stub.read_text("utf-8") for stub in sorted(stubs))
    return re.findall(r"(?m)^    (\w+): ", text)


def _refused_option(
    url: str, options: Mapping[str, Any], refusal: Exception
) -> str | None:
    """Return the name of the option that alone causes the same ``refusal``, or None."""
    refused = None
    for name, value in options.items():
        inside = value.items() if isinstance(value, Mapping) else ()
        parts = {f"{name}.{inner}": {inner: part} for inner, part in inside}
        for path, part in {name: value, **parts}.items():
            try:
                _new_store(url, {name: part})
            except Exception as exc:  # noqa: BLE001  (only compared)
                if (type(exc), str(exc)) == (type(refusal), str(refusal)):
                    refused = path  # parts come after the whole option
    return refused
