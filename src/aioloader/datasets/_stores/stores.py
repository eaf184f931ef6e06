"""Object stores accessed through obstore: ranges, listings, and whole objects.

Each process opens a URL's store at the first read, or at once with options. A pickle
has the URL and the options; if these are secret, only the loader's workers can get it.
"""

import asyncio
import contextlib
import os
import pickle
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, get_args
from urllib.parse import unquote

from aioloader._base.cancellation import in_thread
from aioloader.datasets._stores.addresses import Address, is_local, path_of, sealed
from aioloader.datasets._stores.failures import (
    Piece,
    Reason,
    Version,
    changed,
    compressed,
    failure_of,
    file_failure,
    no_ranges,
    truncated,
)
from aioloader.datasets._stores.options import (
    Flights,
    StoreOptions,
    check_no_options,
    import_obstore,
    obstore_errors,
    open_store,
)
from aioloader.datasets._stores.per_loop import PerLoop
from aioloader.datasets._stores.redact import (
    OF_A_URL,
    Sealed,
    carries_secret,
    redact_url,
    revealed,
    secret_options,
)
from aioloader.datasets._stores.sources import (
    FINAL,
    PAGE_KEYS,
    OwnStore,
    RefusedError,
    Sized,
    Source,
    Store,
    Tries,
    UnreachableError,
)
from aioloader.datasets._stores.unpack import unpacker_of
from aioloader.errors import DatasetError

if TYPE_CHECKING:
    from obstore import Bytes
    from obstore.store import ObjectStore

_PRECONDITION_FAILED = 412
_CHUNK = 1 << 20
# Compressions. Other codings, such as "aws-chunked", may be remnants in metadata.
_CODINGS = {"gzip", "x-gzip", "deflate", "br", "zstd"}
_HINT = "; to read from others, pass a file system of fsspec or a Source as store="
# Endings of names whose objects may really be HTML.
_HTML_ENDINGS = {"html", "htm", "xhtml", "shtml", "php", "asp", "aspx", "jsp", "cgi"}


def store_of(store: Any, options: StoreOptions) -> Store:
    """Return the ``Store`` for a given URL, path, store, file system or source."""
    spec = sys.modules.get("fsspec.spec")  # None: no file systems
    is_system = isinstance(store, getattr(spec, "AbstractFileSystem", ()))
    is_hub = isinstance(store, str) and store.startswith("hf://")
    if options and (is_system or isinstance(store, Source)):
        raise _misplaced(store, options)
    if isinstance(store, Source):
        return OwnStore(store)
    if not (is_hub or is_system):
        return ObstoreStore(store, options)
    from aioloader.datasets._stores import file_systems  # noqa: PLC0415  (if needed)

    if is_hub:
        return file_systems.HubStore(store, options)
    return file_systems.FileSystemStore(store)


# The pid of the process that started obstore's runtime; a fork inherits it.
_STARTED_IN: list[int] = []


def _claim_runtime() -> None:
    """Raise if obstore's runtime was started before this process was forked."""
    pid = os.getpid()
    if not _STARTED_IN:
        _STARTED_IN.append(pid)
    if [pid] != _STARTED_IN:
        raise RuntimeError(
            f"obstore was used in process {_STARTED_IN[0]} before process {pid} was "
            "forked from it, and does not survive a fork; start workers without fork, "
            "or read nothing and list nothing (pass keys=) before it"
        )


class ObstoreStore(Store):
    """An object store accessed through obstore, which each process opens itself."""

    _has_ranges = True  # until the server refuses a range in ``whole``

    def __init__(
        self, store: "Address | os.PathLike[str] | ObjectStore", options: StoreOptions
    ) -> None:
        obstore = import_obstore()
        self._url: Address = ""
        self._given: ObjectStore | Sealed[ObjectStore] | None = None
        self._options = options
        # With the pid of its process. Sealed, because its repr shows the URL's query.
        self._made: tuple[int, Sealed[ObjectStore]] | None = None
        self._flights = PerLoop(Flights)
        if isinstance(store, (str, os.PathLike)):
            (self._url,) = sealed(store)
            label = _label_of_url(self._url)
            if is_local(self._url):
                check_no_options(label, options)
        elif not isinstance(store, get_args(obstore.store.ObjectStore)):
            kind = type(store).__name__
            raise TypeError(
                f"store must be a URL, path or store of obstore, got {kind}{_HINT}"
            )
        elif options:
            raise _misplaced(store, options)
        else:
            label = _label_of_store(store)
            secret = ", ".join(_secrets_of(store))
            self._given = Sealed(store, secret) if secret else store
        super().__init__(label)
        if label == "memory://":  # all memory stores share this label
            self.cache_name: str | None = None
        if options:  # check them now, but a file may exist only on the reading machine
            with contextlib.suppress(DatasetError):
                self._made = os.getpid(), Sealed(self._make(), "")

    def _opened(self) -> "ObjectStore | None":
        """Return the store if it was given or this process has opened it, or None."""
        _claim_runtime()
        if (given := self._given) is not None:
            store: ObjectStore = revealed(given)
            return store
        made = self._made
        return made[1].value if made is not None and made[0] == os.getpid() else None

    def open(self) -> "ObjectStore":
        if (store := self._opened()) is None:
            # Two threads may each open a store; one is dropped after its request.
            store = self._make()
            self._made = os.getpid(), Sealed(store, "")
        return store

    async def opened(self) -> "ObjectStore":
        """Return the store; open it in a thread if needed, because that reads files."""
        if (store := self._opened()) is not None:
            return store
        try:
            return await in_thread(self.open)
        except (ValueError, DatasetError) as error:
            raise RefusedError(error) from None

    def _make(self) -> "ObjectStore":
        if not is_local(self._url):
            return open_store(self._url, self.label, revealed(self._options))
        folder = path_of(self._url)
        try:
            os.stat(folder)  # noqa: PTH116  (obstore's error does not say why)
            return import_obstore().store.LocalStore(folder)  # type: ignore[no-any-return]
        except OSError as cause:
            raise file_failure(folder, cause) from None

    @property
    def follow(self) -> Any:
        return self._flights.here().follow

    async def drain(self, seconds: float | None = None) -> None:
        await self._flights.here().drain(seconds)

    async def aclose(self, seconds: float | None = None) -> None:
        await self.drain(seconds)
        self.close()

    def close(self) -> None:
        self._made = None

    def __getstate__(self) -> dict[str, Any]:
        if self.label == "memory://" and self._given is not None:
            raise pickle.PicklingError(
                "a MemoryStore is of one process: use worker threads"
            )
        return {**self.__dict__, "_made": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Import obstore now: the first read is on a loop, which an import would block.
        import_obstore()
        self.__dict__.update(state)

    async def get(
        self, key: str, start: int, stop: int, version: Version | None = None
    ) -> Piece:
        obstore, follow = import_obstore(), self.follow
        store = self._opened() or await self.opened()
        options: dict[str, Any] = {"range": (start, stop)}
        if version is not None and version.strong:
            options["if_match"] = version.strong
        try:
            # A variable for the request would keep a reference: see ``Flights.follow``.
            result = await follow(obstore.get_async(store, key, options=options))
            self.check_coding(key, result)
            data, meta = await follow(result.bytes_async()), result.meta
            if version is not None and _is_same(meta, version):
                return Piece(data, version)
            return Piece(data, version_of(meta))
        except obstore.exceptions.BaseError as exc:
            reason = Reason(exc)
            if reason.is_cut_short or not reason.is_out_of_range:
                raise
        # The object ends before the range. Get its size, which the error does not have.
        now = (await self.get(key, 0, 1)).version if start else await self.head(key)
        return Piece(b"", now)

    async def head(self, key: str) -> Version:
        """Return an object's version, by a HEAD request."""
        obstore, store = import_obstore(), await self.opened()
        return version_of(await self.follow(obstore.head_async(store, key)))

    async def pages(self, prefix: str, after: str | None) -> AsyncIterator[Sized]:
        # obstore puts a web server's path before listed keys, but not before read keys.
        root = _path_of_web(self.label)
        stream = import_obstore().list(
            await self.opened(), prefix or None, offset=after, chunk_size=PAGE_KEYS
        )
        while page := await self.follow(anext(stream, None)):
            yield [(meta["path"].removeprefix(root), meta["size"]) for meta in page]

    def failure(self, key: str, error: Exception, verb: str) -> Exception:
        """Return the exception to raise; only obstore's errors are converted.

        The result wraps a ``NoRangesError`` if the server sends no range or total size.
        """
        if isinstance(error, DatasetError) or not isinstance(error, obstore_errors()):
            return error
        name, reason, location = type(error).__name__, Reason(error), self.locate(key)
        if name == "NotSupportedError" or reason.has_no_total:
            return RefusedError(no_ranges(location))
        if name == "PreconditionError" or reason.status == _PRECONDITION_FAILED:
            text = f"{location!r} changed while being read; write new shards instead"
            return RefusedError(DatasetError(text, location=location))
        failure = failure_of(verb, location, error, self._url)
        bugs = (ValueError, TypeError, NotImplementedError)
        is_final = isinstance(failure, (FileNotFoundError, PermissionError))
        is_final |= isinstance(error, bugs) or reason.is_bad_key
        is_final |= reason.has_no_length or reason.is_circular
        # Most HTTP servers have no listing.
        is_web_listing = verb == "list" and location.startswith("http")
        is_final |= is_web_listing and type(failure) is DatasetError
        if is_final or reason.status in FINAL:
            return RefusedError(failure)
        return UnreachableError(failure) if reason.is_unreachable else failure

    async def whole(self, key: str, size: int) -> "Bytes":
        """Read a whole object, first by one ranged request if its ``size`` is known."""
        obstore, follow = import_obstore(), self.follow
        store = self._opened() or await self.opened()
        try:
            if size and self._has_ranges:
                # Request one byte more than listed, to notice an object that has grown.
                # This needs a quarter less CPU than ``get`` and ``bytes``.
                body: Bytes = await follow(
                    obstore.get_range_async(store, key, start=0, end=size + 1)
                )
                if len(body) == size:
                    return body
        except obstore.exceptions.NotSupportedError:
            self._has_ranges = False
        except obstore.exceptions.GenericError as exc:
            if not (reason := Reason(exc)).is_cut_short and not reason.is_out_of_range:
                raise
        body = await self._announced(store, key)
        if not body or (size and len(body) != size):
            # It is empty, has changed since the listing, or is not the object.
            expected = (await self.head(key)).size
            if expected != len(body):
                raise truncated(self.locate(key), expected, len(body))
        return body

    async def _announced(self, store: "ObjectStore", key: str) -> "Bytes":
        """Read a whole object; check the body's length against the announced one."""
        obstore, follow = import_obstore(), self.follow
        result = await follow(obstore.get_async(store, key))
        self.check_page(key, result)
        body: Bytes
        try:
            body = await follow(result.bytes_async())
        except obstore.exceptions.GenericError as exc:
            if not Reason(exc).is_cut_short:
                raise
            # Read it again in small chunks, to find out how many bytes arrive.
            whole, pieces = WholeObject(self, key, chunk=1), []
            while piece := (await whole.next()).data:
                pieces.append(piece)
            return obstore.Bytes(b"".join(pieces))  # type: ignore[no-any-return]
        # obstore does not notice a body that ends early.
        if len(body) != result.meta["size"]:
            raise truncated(self.locate(key), result.meta["size"], len(body))
        return body

    def check_coding(self, key: str, result: Any) -> None:
        """Raise if the server sends a compressed object whose name does not show it."""
        coding = result.attributes.get("Content-Encoding")
        if coding in _CODINGS and unpacker_of(location := self.locate(key)) is None:
            raise RefusedError(compressed(location, coding))

    def check_page(self, key: str, result: Any) -> None:
        """Raise if the response is a web page, as from a proxy, and not the object."""
        kind = str(result.attributes.get("Content-Type", ""))
        if "text/html" not in kind.lower():
            return
        location = self.locate(key)
        _, dot, ending = location.rpartition("/")[2].lower().rpartition(".")
        has_tag = version_of(result.meta)[1:] != (None, None)
        is_web = location.startswith("http")
        if ending in _HTML_ENDINGS or (has_tag and not (dot and is_web)):
            return
        raise DatasetError(
            f"{location!r}: the answer is a web page ({kind}, {result.meta['size']:,} "
            "bytes), not the object; check the endpoint, the proxy and the login",
            location=location,
        )


class WholeObject:
    """Streams an object without range requests; retries skip delivered bytes."""

    def __init__(
        self,
        store: ObstoreStore,
        key: str,
        tries: Tries | None = None,
        chunk: int = _CHUNK,
    ) -> None:
        self._store, self._key, self._tries = store, key, tries
        self._chunk = chunk
        self._version: Version | None = None
        self._returned = 0  # bytes delivered
        self._requests = 0  # sent for the next piece
        self._stream: Any = None
        self._received = 0  # bytes of the current response

    async def read(self) -> Piece:
        """Return the next piece, with retries; an empty piece at the end."""
        store, began = self._store, asyncio.get_running_loop().time()
        assert self._tries is not None
        make = partial(self._tries.make, server=store, key=self._key, began=began)
        self._requests = 0
        while True:
            attempt = lambda: store.ask(self._key, self.next())  # noqa: E731
            piece = await make(attempt, sent=self._requests, may_hedge=False)
            data = memoryview(piece.data)
            if not data and not self._returned:  # check that the object is empty
                current = await make(
                    lambda: store.ask(self._key, store.head(self._key))
                )
                if current.size:
                    raise truncated(store.locate(self._key), current.size, 0)
            fresh = data[max(0, self._returned - (self._received - len(data))) :]
            if fresh or not data:
                self._returned += len(fresh)
                return Piece(fresh, piece.version)

    async def next(self) -> Piece:
        """Return the current response's next chunk; send a request if there is none."""
        obstore, follow = import_obstore(), self._store.follow
        location = self._store.locate(self._key)
        stream, self._stream = self._stream, None  # restored after a good read
        if stream is None:
            store = await self._store.opened()
            self._requests += 1
            result = await follow(obstore.get_async(store, self._key))
            self._store.check_page(self._key, result)
            self._store.check_coding(self._key, result)
            version, self._received = version_of(result.meta), 0
            self._version = self._version or version
            if not version.is_of(self._version):
                del result  # a traceback would keep its connection open
                raise RefusedError(changed(location, self._version, version))
            stream = result.stream(min_chunk_size=self._chunk)
            del result
        try:
            chunk = await follow(anext(stream, b""))
        except obstore.exceptions.GenericError as exc:
            if not Reason(exc).is_cut_short:
                raise
            chunk = b""
        assert self._version is not None
        self._received += len(chunk)
        if not chunk and self._received != self._version.size:
            del stream  # as above
            raise truncated(location, self._version.size, self._received)
        self._stream = stream
        return Piece(chunk, self._version)


def _misplaced(store: Any, options: StoreOptions) -> TypeError:
    return TypeError(
        f"{', '.join(revealed(options))}: store_options are for a URL; pass them to "
        f"{type(store).__name__}() where the store is made"
    )


def _secrets_of(store: "ObjectStore") -> Iterator[str]:
    if carries_secret(getattr(store, "url", "")):
        yield OF_A_URL
    for name in ("config", "client_options"):
        yield from secret_options(getattr(store, name, None) or {})


def _label_of_url(address: Address) -> str:
    """Return a path, or a URL without secrets; reject URLs of unknown schemes."""
    if is_local(address):
        return path_of(address)
    label = redact_url(address)
    try:
        known = bool(import_obstore().parse_scheme(address))
    except Exception:  # noqa: BLE001  (not shown: its text may have the whole URL)
        known = False
    if known:
        return "memory://" if label == "memory:" else label
    raise ValueError(
        f"no object store is known for the URL {label!r}; known are s3, gs, az, abfss, "
        f"https, http, file and memory{_HINT}"
    )


def _label_of_store(store: "ObjectStore") -> str:
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


def _path_of_web(label: str) -> str:
    """Return the path in a web server's URL; obstore puts it before listed keys."""
    if not label.startswith(("http://", "https://")) or label.count("/") < 3:
        return ""
    path = unquote(label.split("/", 3)[3]).strip("/")
    return f"{path}/" if path else ""


def _is_same(meta: Any, known: Version) -> bool:
    """Return whether a response has the ``known`` version, by strong tag and size."""
    tag = known.strong
    return tag is not None and tag == meta["e_tag"] and known.size == meta["size"]


def version_of(meta: Any) -> Version:
    modified = meta["last_modified"].timestamp() or None  # 0 means unknown
    return Version(meta["size"], meta.get("e_tag"), modified)
