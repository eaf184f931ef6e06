"""Object stores: an address that can be shown, pickled and opened.

The process that uses a URL makes its store, at its first read; stores are never
pickled. A pickle holds the URL and the options; if they hold secrets, only the one for
the loader's own workers is made.
"""

import asyncio
import contextlib
import os
import pickle
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, get_args
from urllib.parse import unquote

from aioloader.datasets._stores.addresses import (
    Address,
    is_local,
    path_of,
    sealed,
)
from aioloader.datasets._stores.failures import Reason, failure_of
from aioloader.datasets._stores.flights import Flights, import_obstore, obstore_errors
from aioloader.datasets._stores.options import (
    Options,
    check_no_options,
    open_store,
    revealed,
)
from aioloader.datasets._stores.redact import (
    OF_A_URL,
    Sealed,
    carries_secret,
    redact_url,
    secret_options,
)
from aioloader.datasets._stores.requests import RefusedError, Source, read_failure
from aioloader.datasets._stores.versions import Piece, Version
from aioloader.errors import DatasetError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")


class _Runtime:
    """The process in which obstore's runtime, one per process, was started."""

    def __init__(self) -> None:
        self._pid = 0

    def claim(self) -> None:
        """Mark the runtime as used here.

        Raises:
            RuntimeError: If it was used before this process was forked: every call
                would hang, because obstore's threads are not in the child.
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


class StoreSource(Source):
    """Opens one store, once in each process that uses it.

    Args:
        store: A URL, a local path, or a store of obstore, which the caller owns.
        options: Keyword arguments of ``obstore.store.from_url``; checked at once.

    Raises:
        ImportError: If obstore is not installed.
        TypeError: If ``store`` is of another type, or options come with a store.
        ValueError: If the URL is of an unknown kind, or the store refuses an option.
    """

    def __init__(
        self, store: "Address | os.PathLike[str] | ObjectStore", options: "Options"
    ) -> None:
        obstore = import_obstore()
        self._url: Address = ""
        self._given: ObjectStore | Sealed[ObjectStore] | None = None
        self._options = options
        # The process that made it; sealed, because its repr shows a query.
        self._made: tuple[int, Sealed[ObjectStore]] | None = None
        if isinstance(store, (str, os.PathLike)):
            (self._url,) = sealed(store)
            self.label = _label_of_url(self._url)
            if is_local(self._url):
                check_no_options(self.label, self._options)
            if self._options:  # are they accepted?
                # A file missing here may exist where the dataset is read.
                with contextlib.suppress(DatasetError):
                    self._made = os.getpid(), Sealed(self._make(), "")
        elif not isinstance(store, get_args(obstore.store.ObjectStore)):
            kind = type(store).__name__
            raise TypeError(
                f"store must be a URL, path or store of obstore, got {kind}"
            )
        elif options:
            raise TypeError(
                f"{', '.join(revealed(options))}: store_options are for a URL; pass "
                f"them to {type(store).__name__}() where the store is made"
            )
        else:
            self.label = _label_of_store(store)
            secret = ", ".join(_secrets_of(store))
            self._given = Sealed(store, secret) if secret else store

    def open(self) -> "ObjectStore":
        """Return the store, made at the first call in this process.

        Raises:
            RuntimeError: If obstore was used before this process was forked.
            ObjectNotFoundError: If a local directory does not exist.
            ValueError: If obstore refuses the options.
        """
        _RUNTIME.claim()
        if self._given is not None:
            given = self._given
            return given.value if isinstance(given, Sealed) else given
        # Threads may make two, or close meanwhile: the extra one dies with its request.
        made = self._made
        if made is None or made[0] != os.getpid():
            made = self._made = os.getpid(), Sealed(self._make(), "")
        return made[1].value

    async def ask(
        self,
        key: str,
        request: "Callable[[ObjectStore], Awaitable[T]]",
        verb: str = "read",
    ) -> T:
        """Return the result of a request, given the store.

        Raises:
            Exception: What ``read_failure`` makes of an exception of obstore.
            RefusedError: If the store cannot be opened.
        """
        try:
            if self._given is None and (not self._made or self._made[0] != os.getpid()):
                await asyncio.to_thread(self.open)  # making it reads files
            store = self.open()
        except (ValueError, DatasetError) as error:
            raise RefusedError(error) from None
        try:
            return await request(store)
        except DatasetError:
            raise
        except obstore_errors() as exc:
            failure = read_failure(self.locate(key), exc, verb)
        raise failure  # without a context, whose text may hold secrets

    async def get(
        self,
        flights: Flights,
        key: str,
        start: int,
        stop: int,
        version: Version | None,
    ) -> Piece | None:
        """Return a range, at a version if it can be a condition; None past the end.

        Raises:
            NoRangesError: If the server gave all of the object.
            Exception: As ``ask``.
        """
        obstore = import_obstore()
        options: dict[str, Any] = {"range": (start, stop)}
        if version is not None and version.strong:
            options["if_match"] = version.strong

        async def request(store: "ObjectStore") -> Piece | None:
            try:
                result = await flights.follow(
                    obstore.get_async(store, key, options=options)
                )
                data = await flights.follow(result.bytes_async())
            except obstore.exceptions.BaseError as exc:
                reason = Reason(exc)
                if reason.is_out_of_range and not reason.is_cut_short:
                    return None
                raise
            return Piece(data, version_of(result.meta))

        return await self.ask(key, request)

    def web_root(self) -> str:
        """Return the prefix that obstore adds to the keys that a web server lists.

        Listed keys are relative to the host, unlike those it reads.
        """
        if not self.label.startswith(("http://", "https://")):
            return ""
        path = unquote(self.label.split("/", 3)[3]) if self.label.count("/") > 2 else ""
        return f"{path.strip('/')}/" if path else ""

    def close(self) -> None:
        """Release a store that was made here, and its idle connections."""
        self._made = None

    def _make(self) -> "ObjectStore":
        if not is_local(self._url):
            return open_store(self._url, self.label, revealed(self._options))
        try:
            return import_obstore().store.LocalStore(path_of(self._url))  # type: ignore[no-any-return]
        except obstore_errors() as exc:
            failure = failure_of("open", self.label, exc)
        raise failure

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle may contain.

        Raises:
            pickle.PicklingError: If it would contain a memory store.
        """
        if self.label == "memory://" and self._given is not None:
            raise pickle.PicklingError("a MemoryStore lives in one process only")
        return {**self.__dict__, "_made": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Not at the first read: that runs on an event loop, and an import reads files.
        import_obstore()
        self.__dict__.update(state)


def _secrets_of(store: "ObjectStore") -> Iterator[str]:
    """Yield the names of secrets in a store that the caller made."""
    if carries_secret(getattr(store, "url", "")):
        yield OF_A_URL
    for name in ("config", "client_options"):
        yield from secret_options(getattr(store, name, None) or {})


def _label_of_url(address: Address) -> str:
    """Return a URL as it may be shown, if it is of a known kind.

    Raises:
        ValueError: If it is not; the message shows only the label.
    """
    if is_local(address):
        return path_of(address)
    label = redact_url(address)
    try:
        known = bool(import_obstore().parse_scheme(address))
    except Exception:  # noqa: BLE001  (its text may show the whole URL)
        known = False
    if known:
        return "memory://" if label == "memory:" else label
    raise ValueError(
        f"no object store is known for the URL {label!r}; known are s3, gs, az, abfss, "
        "https, http, file and memory"
    )


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


def version_of(meta: Any) -> Version:
    """Return the version in obstore's metadata of an object."""
    modified = meta["last_modified"].timestamp() or None  # zero means unknown
    return Version(meta["size"], meta.get("e_tag"), modified)
