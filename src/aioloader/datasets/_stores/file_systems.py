"""Stores for fsspec's file systems, such as SFTP and HDFS, and for ``hf://`` URLs.

The file systems' calls block, so they run in separate threads. On the Hugging Face Hub,
the first read pins a branch to its commit. Without store options, the Hub's address is
``HF_ENDPOINT``, and the token is ``HF_TOKEN`` or the one saved by the user's login.
"""

import contextlib
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from aioloader._base.cancellation import in_thread
from aioloader._base.extras import imported
from aioloader._base.forks import fork_safe
from aioloader.datasets._stores.addresses import Address
from aioloader.datasets._stores.failures import Piece, Version
from aioloader.datasets._stores.options import StoreOptions
from aioloader.datasets._stores.per_loop import PerLoop
from aioloader.datasets._stores.redact import (
    Sealed,
    redact_url,
    revealed,
    secret_options,
)
from aioloader.datasets._stores.sources import (
    PAGE_KEYS,
    Sized,
    Store,
    failure_of_source,
    words_of,
)

T = TypeVar("T")

_HUB = "hf://"
_new_threads = partial(ThreadPoolExecutor, 32, "aioloader-system")
_OPTIONS = {"endpoint", "token"}
# Keys for the entity tag and for the time in fsspec's info about a file.
_TAGS = ("ETag", "etag", "e_tag", "blob_id", "md5Hash", "md5")
_TIMES = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")


class FileSystemStore(Store):
    """An fsspec file system as a store; keys are paths."""

    # A subclass whose file system is not thread-safe has a real lock.
    _lock: Any = contextlib.nullcontext()

    def __init__(self, system: Any) -> None:
        if getattr(system, "asynchronous", False):
            raise ValueError(
                "store must be a file system made without asynchronous=True: it is "
                "called in threads"
            )
        below, folder = system, ""
        while type(below).__name__ == "DirFileSystem":
            folder = f"{below.path.strip('/')}/{folder}".rstrip("/")
            below = below.fs
        options = getattr(below, "storage_options", {})
        kind = below.protocol if isinstance(below.protocol, str) else below.protocol[0]
        host = options.get("host", "")
        root = f"{host}/" if host else below.root_marker
        super().__init__(f"{kind}://{root}{folder}")
        # Equal file systems have equal hashes in every process.
        self.cache_name = f"{self.label} {hash(below)}" if kind != "memory" else None
        secret = ", ".join(secret_options(options))
        self._system: Any = Sealed(system, secret) if secret else system
        self._threads = PerLoop(_new_threads)

    async def get(
        self, key: str, start: int, stop: int, _version: Version | None = None
    ) -> Piece:
        return await self._run(self._get, key, start, stop)

    async def pages(self, prefix: str, after: str | None) -> AsyncIterator[Sized]:
        pairs = await self._run(self._find, prefix)
        pairs = [pair for pair in pairs if after is None or pair[0] > after]
        for start in range(0, len(pairs), PAGE_KEYS):
            yield pairs[start : start + PAGE_KEYS]

    def failure(self, key: str, error: Exception, verb: str) -> Exception:
        """Return the exception to raise, without any secrets of ``error``."""
        words = words_of(error)
        return failure_of_source(verb, self.locate(key), error, words, self._hint)

    _hint = ""

    async def _run(self, function: Callable[..., T], *args: Any) -> T:
        return await in_thread(function, *args, executor=self._threads.here())

    def _get(self, key: str, start: int, stop: int) -> Piece:
        with self._lock:
            system, path = self._resolve(key)
            info = system.info(path)
            if info["type"] == "directory":
                raise IsADirectoryError
            size = info["size"]
            start, stop = min(start, size), min(stop, size)
            is_plain = _reads_ahead(system)
            file = system.open(path, "rb", cache_type="none") if is_plain else None
        if file is None:
            data = system.cat_file(path, start, stop) if start < stop else b""
        else:
            with file:
                file.seek(start)
                data = file.read(stop - start)
        return Piece(data, _version_of(info))

    def _find(self, prefix: str) -> list[tuple[str, int]]:
        with self._lock:
            system, path = self._resolve(prefix)
            infos = system.find(path, detail=True)
        start = len(system._strip_protocol(path).rstrip("/"))  # noqa: SLF001
        below = f"{prefix}/" if prefix else ""
        return sorted(
            (below + name[start:].lstrip("/"), info["size"])
            for name, info in infos.items()
            if len(name) > start
        )

    def _resolve(self, key: str) -> tuple[Any, str]:
        system = revealed(self._system)
        return system, f"{system.root_marker}{key}"

    async def aclose(self, _seconds: float | None = None) -> None:
        """Stop this loop's threads, and drop cached listings."""
        self._threads.drop()  # threads end when their pool is garbage-collected
        self._forget()

    def _forget(self) -> None:
        self._resolve("")[0].invalidate_cache()


class HubStore(FileSystemStore):
    """A store of Hugging Face Hub repositories, or of a folder in a repository."""

    _hint = "; is it private, and HF_TOKEN set?"

    def __init__(self, url: Address, options: StoreOptions) -> None:
        imported("huggingface_hub", "hub", "hf:// needs huggingface_hub")
        if unknown := sorted(set(revealed(options)) - _OPTIONS):
            raise TypeError(
                f"unknown store options of hf://: {', '.join(unknown)}; it has "
                "'token' and 'endpoint'"
            )
        Store.__init__(self, redact_url(url))
        self._options = options
        self._system: Any = None
        self._pinned: dict[str, str] = {}
        self._threads = PerLoop(_new_threads)
        self._lock = fork_safe(threading.Lock())  # HfFileSystem is not thread-safe

    def _forget(self) -> None:
        self._system, self._pinned = None, {}

    def _resolve(self, key: str) -> tuple[Any, str]:
        """Return the file system, and a key's path at the pinned commit. Blocks."""
        if self._system is None:
            from huggingface_hub import HfFileSystem  # noqa: PLC0415

            # Not fsspec's shared instance, whose cached listings may be outdated.
            self._system = HfFileSystem(skip_instance_cache=True, **self._access())
        system, pinned = self._system, self._pinned
        path = self.locate(key).removeprefix(_HUB)
        resolved = system.resolve_path(path)
        kind = getattr(resolved, "repo_type", None)
        if kind is None:  # a bucket has no commits
            return system, path
        name = f"{kind}s/{resolved.repo_id}" if kind != "model" else resolved.repo_id
        root = f"{name}@{resolved.revision}"
        if root not in pinned:
            from huggingface_hub import HfApi  # noqa: PLC0415

            commit = HfApi(**self._access()).repo_info(
                resolved.repo_id, repo_type=kind, revision=resolved.revision
            )
            pinned[root] = f"{name}@{commit.sha}"
        return system, f"{pinned[root]}/{resolved.path_in_repo}".rstrip("/")

    def _access(self) -> dict[str, Any]:
        # The Hub's client reads environment variables only at import.
        endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/")
        return {
            **({"endpoint": endpoint} if endpoint else {}),
            **revealed(self._options),
        }

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_system": None, "_pinned": {}}
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=fork_safe(threading.Lock()))


def _reads_ahead(system: Any) -> bool:
    """Return whether ``cat_file`` is fsspec's default, which reads ahead."""
    spec: Any = sys.modules["fsspec.spec"]
    plain: Any = spec.AbstractFileSystem.cat_file
    return getattr(type(system), "cat_file", plain) is plain


def _version_of(info: dict[str, Any]) -> Version:
    tag = next((info[name] for name in _TAGS if info.get(name)), None)
    time = next((info[name] for name in _TIMES if info.get(name)), None)
    if isinstance(time, datetime):
        time = time.timestamp()
    modified = float(time) if isinstance(time, (int, float)) else None
    return Version(info["size"], None if tag is None else str(tag), modified)
