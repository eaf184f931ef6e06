"""Shards on the Hugging Face Hub, by the file system of ``huggingface_hub``.

Its calls block, so they run in threads of their own. A branch is pinned to the commit
that it names at the first read, so all reads are of one version. The Hub's address is
``HF_ENDPOINT``, the token ``HF_TOKEN`` or that of the user's login.
"""

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from anyio import CapacityLimiter
from anyio.to_thread import run_sync

from aioloader._order.forks import fork_safe
from aioloader.datasets._stores.addresses import Address
from aioloader.datasets._stores.options import Options, revealed
from aioloader.datasets._stores.outlast import outlast
from aioloader.datasets._stores.per_loop import PerLoop
from aioloader.datasets._stores.redact import redact_url
from aioloader.datasets._stores.requests import (
    FINAL,
    RefusedError,
    Source,
    UnreachableError,
)
from aioloader.datasets._stores.versions import Piece, Version
from aioloader.errors import (
    DatasetError,
    ObjectNotFoundError,
    ObjectPermissionError,
)

if TYPE_CHECKING:
    from huggingface_hub import HfFileSystem

T = TypeVar("T")

SCHEME = "hf://"
_THREADS = 32
_OPTIONS = {"endpoint", "token"}


class HubSource(Source):
    """The repositories of the Hub, or one folder of one.

    Args:
        url: ``hf://``, or with a folder of all keys: ``hf://datasets/name/of-it``.
        options: ``token`` and ``endpoint``.

    Raises:
        ImportError: If huggingface_hub is not installed.
        TypeError: If there are other options.
    """

    def __init__(self, url: Address, options: Options) -> None:
        try:
            import huggingface_hub  # noqa: F401, PLC0415  (an optional dependency)
        except ImportError as exc:
            raise ImportError(
                'hf:// needs huggingface_hub: pip install "aioloader[hub]"'
            ) from exc
        if unknown := sorted(set(revealed(options)) - _OPTIONS):
            raise TypeError(
                f"unknown store options of hf://: {', '.join(unknown)}; it has "
                "'token' and 'endpoint'"
            )
        self.label = redact_url(url)
        self._options = options
        self._system: HfFileSystem | None = None
        self._pinned: dict[str, str] = {}
        self._limits = PerLoop(partial(CapacityLimiter, _THREADS))
        self._lock = fork_safe(threading.Lock())  # for the file system

    def locate(self, key: str) -> str:
        """Return the address of ``key``, for errors."""
        return f"{self.label}/{key}"

    def close(self) -> None:
        """Drop the open file system and the pinned commits."""
        self._system = None
        self._pinned = {}

    async def get(
        self, _flights: object, key: str, start: int, stop: int, _version: object
    ) -> Piece:
        """Return a range of a file."""
        return await self._run(self._get, key, start, stop)

    async def keys(self, folder: str) -> list[str]:
        """Return the keys of all files in a folder and its subfolders, sorted."""
        return await self._run(self._keys, folder)

    async def _run(self, function: Callable[..., T], key: str, *args: Any) -> T:
        """Run a function in a thread; if cancelled, wait for it to end first.

        Raises:
            DatasetError: If a retry may help.
            RefusedError: If not.
        """
        limiter = self._limits.here()
        job = asyncio.ensure_future(run_sync(function, key, *args, limiter=limiter))
        try:
            result: T = await outlast(job)
        except Exception as error:  # noqa: BLE001  (of several HTTP clients)
            failure = self._failure(key, error)
        else:
            return result
        raise failure  # without a context, whose text may hold secrets

    def _get(self, key: str, start: int, stop: int) -> Piece:
        with self._lock:  # the file system's cache is not thread-safe
            system, path = self._open(), self._pin(key)
            info = system.info(path)
            if info["type"] == "directory":
                raise IsADirectoryError
            file = system.open(path, "rb", cache_type="none")
        size = info["size"]
        with file:
            file.seek(min(start, size))
            data = file.read(max(0, min(stop, size) - start))
        return Piece(data, Version(size, info.get("blob_id")))

    def _keys(self, folder: str) -> list[str]:
        with self._lock:
            path = self._pin(folder)
            found = self._open().find(path)
        start = len(path) + 1
        return sorted(f"{folder}/{name[start:]}".lstrip("/") for name in found)

    def _open(self) -> "HfFileSystem":
        if self._system is None:
            from huggingface_hub import HfFileSystem  # noqa: PLC0415

            # Not fsspec's shared instance: its listings are old.
            self._system = HfFileSystem(skip_instance_cache=True, **self._access())
        return self._system

    def _access(self) -> dict[str, Any]:
        # The Hub's client reads its variables only at import.
        endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/")
        return {
            **({"endpoint": endpoint} if endpoint else {}),
            **revealed(self._options),
        }

    def _pin(self, key: str) -> str:
        """Return the path of a key, at its branch's current commit."""
        path = self.locate(key).removeprefix(SCHEME)
        resolved: Any = self._open().resolve_path(path)
        kind = getattr(resolved, "repo_type", None)
        if kind is None:  # a bucket has no commits
            return path
        name = f"{kind}s/{resolved.repo_id}" if kind != "model" else resolved.repo_id
        root = f"{name}@{resolved.revision}"
        if root not in self._pinned:
            from huggingface_hub import HfApi  # noqa: PLC0415

            commit = HfApi(**self._access()).repo_info(
                resolved.repo_id, repo_type=kind, revision=resolved.revision
            )
            self._pinned[root] = f"{name}@{commit.sha}"
        return f"{self._pinned[root]}/{resolved.path_in_repo}".rstrip("/")

    def _failure(self, key: str, error: Exception) -> Exception:
        """Return the error to raise; the client's messages may hold signed URLs."""
        location = self.locate(key)
        status = getattr(getattr(error, "response", None), "status_code", 0)
        kind = type(error).__name__
        if status in {401, 403} and "NotFound" not in kind:
            text = f"may not read {location!r}: HTTP {status} ({kind})"
            return RefusedError(ObjectPermissionError(text, location=location))
        if isinstance(error, FileNotFoundError) or status in {401, 404}:
            text = (
                f"no such file: {location!r} ({kind}); is it private, and HF_TOKEN set?"
            )
            return RefusedError(ObjectNotFoundError(text, location=location))
        said = f"HTTP {status} ({kind})" if status else kind
        failure = DatasetError(f"cannot read {location!r}: {said}", location=location)
        if not status and _is_unreachable(error):
            return UnreachableError(failure)
        is_final = isinstance(error, (ValueError, IsADirectoryError))
        return RefusedError(failure) if is_final or status in FINAL else failure

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_system": None, "_pinned": {}}
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=fork_safe(threading.Lock()))


def is_hub(store: Any) -> bool:
    """Return whether a store or the root of an address is the Hub."""
    return isinstance(store, str) and store.startswith(SCHEME)


def _is_unreachable(error: BaseException | None) -> bool:
    """Return whether a refused connection or an unknown host caused ``error``."""
    while error is not None:
        if isinstance(error, (ConnectionRefusedError, socket.gaierror)):
            return True
        error = error.__cause__ or error.__context__
    return False
