"""How to reach an object store: an address that can be shown, shipped and opened.

The store of a URL is made by the process that uses it, at its first read, and is never
pickled; a pickle holds the URL and the options, and is refused if those hold secrets.
"""

import base64
import os
import pickle
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, get_args
from urllib.parse import unquote, urlsplit

from aioloader.datasets._stores.failures import open_failure
from aioloader.datasets._stores.redact import carries_secret, redact_url, secret_options

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


def import_obstore() -> ModuleType:
    """Import obstore, or say how to install it.

    Raises:
        ImportError: If it is not installed.
    """
    try:
        import obstore.store  # noqa: PLC0415  (an optional dependency)
    except ImportError as exc:
        raise ImportError(
            "ObjectDataset needs obstore: pip install aioloader[objects]"
        ) from exc
    return obstore


def obstore_errors() -> tuple[type[Exception], ...]:
    """Return what calls of obstore raise; the texts are not fit to be shown."""
    base: type[Exception] = import_obstore().exceptions.BaseError
    return base, NotImplementedError, OSError, TypeError, ValueError


class _Runtime:
    """Know which process obstore's runtime, one for a process, was started in."""

    def __init__(self) -> None:
        self._pid = 0

    def claim(self) -> None:
        """Mark the runtime as used here.

        Raises:
            RuntimeError: If it was used before this process was forked: every call
                would hang, for obstore's threads are not in the child.
        """
        pid = os.getpid()
        if self._pid not in {0, pid}:
            raise RuntimeError(
                f"obstore was used in process {self._pid} before process {pid} was "
                f"forked from it, and does not survive a fork; start workers without "
                f"fork, or read nothing and list nothing (pass keys=) before it"
            )
        self._pid = pid


_RUNTIME = _Runtime()


class StoreSource:
    """Open one store, anew in each process that asks for it.

    Args:
        store: A URL, a local path, or a store of obstore, which stays the caller's.
        options: Keyword arguments of ``obstore.store.from_url``.

    Raises:
        ImportError: If obstore is not installed.
        TypeError: If ``store`` is none of these, or options come with a store.
        ValueError: If the URL is not of a known kind.
    """

    def __init__(
        self, store: "str | os.PathLike[str] | ObjectStore", options: Mapping[str, Any]
    ) -> None:
        obstore = import_obstore()
        self._url = ""
        self._given: ObjectStore | None = None
        self._options = dict(options)
        if isinstance(store, (str, os.PathLike)):
            self._url = os.fspath(store)
            self.label = _label_of_url(self._url)
        elif not isinstance(store, get_args(obstore.store.ObjectStore)):
            kind = type(store).__name__
            raise TypeError(
                f"store must be a URL, path or store of obstore, got {kind}"
            )
        elif options:
            raise TypeError(f"{', '.join(options)}: options of a store go to its maker")
        else:
            self._given = store
            self.label = _label_of_store(store)
        self._made: tuple[int, ObjectStore] | None = None

    def open(self) -> "ObjectStore":
        """Return the store, made at the first call in this process.

        Raises:
            RuntimeError: If obstore was used before this process was forked.
            ObjectNotFoundError: If a local directory does not exist.
            ValueError: If obstore refuses the options.
        """
        _RUNTIME.claim()
        if self._given is not None:
            return self._given
        # Threads may make two, or close meanwhile: then one goes with its request.
        made = self._made
        if made is None or made[0] != os.getpid():
            made = self._made = os.getpid(), self._make()
        return made[1]

    def locate(self, key: str) -> str:
        """Return what may be shown of the address of ``key``."""
        if self.label.startswith("http"):
            # The tail of a signed URL, passed as a key, puts no signature into the log.
            key = key.partition("?")[0]
        return f"{self.label.rstrip('/')}/{key}" if key else self.label

    def close(self) -> None:
        """Let go of a store that was made here, and of its idle connections."""
        self._made = None

    def _make(self) -> "ObjectStore":
        stores = import_obstore().store
        try:
            if "://" not in self._url:
                local: ObjectStore = stores.LocalStore(self._url, **self._options)
                return local
            url, options = _prepare(self._url, self._options)
            store: ObjectStore = stores.from_url(url, **options)
        except obstore_errors() as exc:
            failure = open_failure(self.label, exc)
        else:
            return store
        raise failure

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle may hold.

        Raises:
            pickle.PicklingError: If that would hold secrets, or a memory store.
        """
        if self.label == "memory://" and self._given is not None:
            raise pickle.PicklingError("a MemoryStore lives in one process only")
        if secrets := list(self._secrets()):
            raise pickle.PicklingError(
                f"ObjectDataset of {self.label!r} cannot be pickled: "
                f"{', '.join(secrets)} would be written in clear; set environment "
                f"variables, or pass a credential_provider"
            )
        return {**self.__dict__, "_made": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Not at the first read: that is on an event loop, and an import reads files.
        import_obstore()
        self.__dict__.update(state)

    def _secrets(self) -> Iterator[str]:
        given = self._given
        url = self._url if given is None else getattr(given, "url", "")
        if carries_secret(url):
            yield "the URL's user, password or query"
        yield from secret_options(self._options)
        for name in ("config", "client_options"):
            yield from secret_options(getattr(given, name, None) or {})


def _label_of_url(url: str) -> str:
    """Return what may be shown of ``url``, if it is of a known kind.

    Raises:
        ValueError: If it is not; the message shows no more than the label.
    """
    if "://" not in url:
        return url
    label = redact_url(url)
    try:
        known = bool(import_obstore().parse_scheme(url))
    except Exception:  # noqa: BLE001  (its text may show the whole URL)
        known = False
    if known:
        return "memory://" if label == "memory:" else label
    raise ValueError(f"no object store is known for the URL {label!r}")


def _label_of_store(store: "ObjectStore") -> str:
    """Return an address for a store that the caller made."""
    kind = type(store).__name__.removesuffix("Store").lower()
    config: Mapping[str, Any] = getattr(store, "config", None) or {}
    prefix = str(getattr(store, "prefix", None) or "")
    match kind:
        case "http":
            return redact_url(store.url)  # type: ignore[union-attr]
        case "local":
            return prefix or "/"
        case "memory":
            return "memory://"
        case _:
            scheme = {"s3": "s3", "gcs": "gs", "azure": "az"}.get(kind, kind)
            bucket = config.get("bucket") or config.get("container_name", "")
            return f"{scheme}://{bucket}/{prefix}".rstrip("/")


def _prepare(url: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return URL and options as obstore needs them.

    Plain HTTP is allowed where an address asks for it. User and password of a URL,
    which obstore would not send, become the header that they stand for.
    """
    parts = urlsplit(url)
    client = dict(options.get("client_options") or {})
    if any(address.startswith("http://") for address in _addresses(url, options)):
        client.setdefault("allow_http", True)
    user, _, host = parts.netloc.rpartition("@")
    if user and parts.scheme in {"http", "https"}:
        token = base64.b64encode(unquote(user).encode()).decode()
        headers = {"authorization": f"Basic {token}"}
        client["default_headers"] = headers | (client.get("default_headers") or {})
        url = parts._replace(netloc=host).geturl()
    prepared = dict(options)
    if client:
        prepared["client_options"] = client
    return url, prepared


def _addresses(url: str, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the URL and every endpoint that the options or the environment name."""
    yield url
    for name, value in {**(options.get("config") or {}), **options}.items():
        if "endpoint" in name.lower() or name.lower().endswith("base_url"):
            yield str(value)
    if url.startswith(("s3://", "s3a://")):
        yield from (os.environ.get(name, "") for name in _ENDPOINT_VARIABLES)
