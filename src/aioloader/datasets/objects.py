"""Datasets of objects in a store; each object is one sample, as a buffer.

Objects are in the order of the given keys, or sorted if listed. Memory holds the keys
(two buffers), their sizes if listed, and the reads in flight. If the size of an object
is known, reading it takes one call of obstore, not two. For 100 KB over loopback HTTP,
CPU time then falls from 119 to 90 us in total, and from 20 to 15 us on the loop.
"""

from collections.abc import Coroutine, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

from anyio.from_thread import start_blocking_portal
from torch.utils.data import Dataset

from aioloader._base.cancellation import in_thread
from aioloader.datasets._checks import check_is, names_options
from aioloader.datasets._stores.bytes import Client, StoredObject
from aioloader.datasets._stores.listing import Listing, list_async
from aioloader.datasets._stores.names import NameTable
from aioloader.datasets._stores.options import hidden
from aioloader.datasets._stores.per_loop import LoopDataset, PerLoop
from aioloader.datasets._stores.sources import Requests, policy_of
from aioloader.datasets._stores.stores import store_of
from aioloader.datasets.named import Named

if TYPE_CHECKING:
    import os

    import numpy as np
    import numpy.typing as npt
    from obstore import Bytes
    from obstore.store import ObjectStore

    from aioloader.datasets._stores.sources import Source


class ObjectDataset(
    Dataset[Coroutine[Any, Any, "Bytes | bytes | memoryview"]], LoopDataset, Named
):
    """Reads whole objects of a store, many at a time, by ``async def __getitem__``.

    Several event loops can read one dataset at once. It can be pickled if no option is
    a secret: pass credentials through the environment or a ``credential_provider``.
    Each process creates the store of a URL at its first read. Leaving the dataset's
    async context calls ``aclose``; a loader does this.

    Args:
        store: A URL such as ``s3://bucket/train``, ``gs://``, ``az://``, ``https://``,
            ``hf://`` or ``file://``; a local directory; an obstore store; an fsspec
            file system; or a ``Source``.
        keys: Keys relative to ``store``. Default: list them now, which blocks; on an
            event loop use ``await ObjectDataset.discover(...)``.
        prefix: Leading path segments of the keys to list.
        store_options: Options of the store that a URL names, such as ``{"region":
            "eu-west-1"}``; as for ``obstore.store.from_url``.
        requests: Timeouts and retries of requests.

    Raises:
        ImportError: If the store needs a package that is not installed.
        ValueError: If no keys are listed, or an argument is wrong.
        DatasetError: If listing fails.

    Example:
        >>> from obstore.store import MemoryStore
        >>> store = MemoryStore()
        >>> _ = store.put("train/a", b"1"), store.put("train/b", b"2")
        >>> ObjectDataset(store, prefix="train").keys
        <2 names: 'train/a', 'train/b'>
    """

    @names_options
    def __init__(
        self,
        store: "str | os.PathLike[str] | ObjectStore | Source",
        keys: Iterable[str] | None = None,
        *,
        prefix: str = "",
        store_options: Mapping[str, Any] | None = None,
        requests: Requests | None = None,
    ) -> None:
        _check(prefix)
        if keys is not None:
            check_is(keys, Iterable, "keys", "an iterable of keys")
        if isinstance(keys, (str, bytes)):
            raise TypeError(
                f"keys must be an iterable of keys, got the string {keys!r}"
            )
        if keys is not None and prefix:
            raise ValueError("prefix is for listing: pass keys or prefix, not both")
        self._store = store_of(store, hidden(store_options))
        policy = policy_of(requests)
        if keys is None:
            with start_blocking_portal() as portal:
                keys = portal.call(list_async, self._store, prefix, policy)
        self._sizes: npt.NDArray[np.int64] | None = None
        if isinstance(keys, Listing):
            self._sizes, keys = keys.sizes, keys.keys
        self._names = keys if isinstance(keys, NameTable) else NameTable(keys)
        self._readers = PerLoop(partial(Client, policy))

    @classmethod
    @names_options
    async def discover(
        cls,
        store: "str | os.PathLike[str] | ObjectStore | Source",
        *,
        prefix: str = "",
        store_options: Mapping[str, Any] | None = None,
        requests: Requests | None = None,
    ) -> Self:
        """Create a dataset without blocking the loop; arguments as for the class."""
        _check(prefix)
        # In a thread, because creating a store reads certificates.
        options = hidden(store_options)
        opened = await in_thread(store_of, store, options)
        try:
            listing = await list_async(opened, prefix, policy_of(requests))
        finally:
            await opened.aclose()
        return cls(store, listing, store_options=store_options, requests=requests)

    @property
    def keys(self) -> NameTable:
        """The objects' keys in order, relative to the store."""
        return self._names

    async def __getitem__(self, index: SupportsIndex) -> "Bytes | bytes | memoryview":
        """Read one object.

        Args:
            index: Position in ``keys``; negative ones count from the end.

        Returns:
            A read-only buffer, owned by the caller; ``memoryview``, ``np.frombuffer``
            and ``io.BytesIO`` accept it. It holds the bytes as sent by the server: a
            ``Content-Encoding`` is not decoded.

        Raises:
            IndexError: If ``index`` is out of range.
            ObjectNotFoundError: If the store has no such object.
            ObjectPermissionError: If the store refuses access.
            TruncatedReadError: If the body is not as long as announced.
            DatasetError: If reading failed otherwise, after all retries.
        """
        position = self._names.position(index)
        key = self._names[position]
        size = 0 if self._sizes is None else int(self._sizes[position])
        return await StoredObject(self._readers.here(), self._store, key).whole(size)

    async def _release(self) -> None:
        await self.aclose()

    async def aclose(self, seconds: float = 5.0) -> None:
        """Wait for this loop's requests to end, and close idle connections.

        A process that exits with requests in flight, even cancelled ones, may crash in
        obstore. The dataset stays usable.

        Args:
            seconds: Timeout after which requests are cancelled.
        """
        await self._store.aclose(seconds)

    def __repr__(self) -> str:
        return f"ObjectDataset({self._store.label!r}, {self._names!r})"


def _check(prefix: Any) -> None:
    check_is(prefix, str, "prefix", "a string")
    if not {".", ".."}.isdisjoint(prefix.split("/")):
        raise ValueError(
            f"prefix={prefix!r} must be the first segments of keys, which have no '.' "
            "and no '..'"
        )
