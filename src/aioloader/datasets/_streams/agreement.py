"""Ranks compare their lists of shards through a key-value store.

The store is that of torch's process group, or the user's. The first rank to arrive
leaves the list's summary there; the others cut their shards at the same places, and
compare. No rank waits for another, so a rank that iterates alone continues. Operations
block, so they run in a thread, on a separate connection: torch's holds a lock.
"""

import asyncio
import json
import os
import pickle
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch.distributed

from aioloader.errors import DatasetError


class HasSummary(Protocol):
    """What ranks compare."""

    @property
    def summary(self) -> Any:
        """What must be equal, JSON-serialisable."""


Found = TypeVar("Found", bound=HasSummary)
# torch's type stubs do not name the stores.
dist: Any = torch.distributed
# Seconds that one operation of the store may take, and that a rank waits for others (as
# long as torch's process groups do), unless `agree` says otherwise.
TIMEOUT = 60.0
PATIENCE = 1800.0


class RankStore:
    """The store through which ranks compare their lists.

    Args:
        store: One of ``torch.distributed``, shared by all ranks; None: that of the
            process group when an iteration begins, if there is one.
        timeout: Seconds that one operation of the store may take, and that a rank waits
            for others; None: the defaults.
    """

    def __init__(self, store: Any = None, timeout: float | None = None) -> None:
        self._store = store
        # Opens it again, in another process too; None: it cannot be.
        self._again = None if store is None else _opener_of(store)
        self._timeout = timeout

    @property
    def patience(self) -> float:
        """Seconds that a rank waits for others."""
        return PATIENCE if self._timeout is None else self._timeout

    def found(self) -> "RankStore | None":
        """Return this store or that of the process group; None if there is neither."""
        if self._store is not None or self._again is not None:
            return self
        if not (dist.is_available() and dist.is_initialized()):
            return None
        return RankStore(dist.distributed_c10d._get_default_store(), self._timeout)  # noqa: SLF001

    def open(self) -> Any:
        """Return a new connection to the store. Blocks."""
        seconds = TIMEOUT if self._timeout is None else self._timeout
        timeout = timedelta(seconds=seconds)
        store = self._store if self._again is None else self._again(timeout)
        store.set_timeout(timeout)
        return store

    def __getstate__(self) -> dict[str, Any]:
        if self._store is not None and self._again is None:
            raise pickle.PicklingError(
                f"a {type(self._store).__name__} cannot be reached from another "
                "process; give agree() a TCPStore or a FileStore, which workers open "
                "again"
            )
        again = getattr(self.found(), "_again", None)
        return {"_store": None, "_again": again, "_timeout": self._timeout}

    def __repr__(self) -> str:
        if self._again is None:
            return type(self._store).__name__
        path = self._again.keywords.get("path")
        return f"FileStore({path!r})" if path else "TCPStore"


def _opener_of(store: Any) -> "partial[Any] | None":
    """Return what opens a store once more, given a timeout; None if nothing does."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        return partial(_tcp_store, host=store.host, port=store.port)
    return (
        partial(_file_store, path=store.path)
        if isinstance(store, dist.FileStore)
        else None
    )


def _tcp_store(timeout: timedelta, host: str, port: int) -> Any:
    return dist.TCPStore(
        host, port, is_master=False, timeout=timeout, wait_for_workers=False
    )


def _file_store(_timeout: timedelta, path: str) -> Any:
    Path(path).parent.stat()  # a store would wait for minutes
    return dist.FileStore(path)


@dataclass(frozen=True)
class Agreement:
    """What one rank compares with the others in one iteration.

    Attributes:
        store: The store to compare through.
        rank: This worker's rank, among the workers of all ranks.
        ranks: Number of those workers.
        epoch: Number of the epoch.
    """

    store: RankStore
    rank: int
    ranks: int
    epoch: int

    async def on(
        self,
        what: Any,
        who: str,
        stack: AsyncExitStack,
        find: Callable[[AsyncExitStack, Any], Awaitable[Found]],
    ) -> Found:
        """Return what this rank finds, if the first rank has found the same.

        Args:
            what: What identifies it: equal on all ranks, JSON-serialisable.
            who: Name of the stream, for errors.
            stack: Closes what was opened to find it.
            find: Finds it, given the summary that the first rank found, if any.

        Raises:
            DatasetError: If ranks have found others, or cannot compare.
        """
        key = key_of([self.ranks, self.epoch, what])
        key, first = await self._do(partial(self._looked, key), who)
        for _ in range(2):
            theirs = first and first["summary"]
            async with AsyncExitStack() as opened:
                found = await find(opened, theirs)
                summary = json.loads(json.dumps(found.summary))
                if first is None:
                    first = await self._do(partial(self._left, key, summary), who)
                if first["summary"] == summary:
                    stack.push_async_callback(opened.pop_all().aclose)
                    return found
            if theirs is not None:
                break  # what can adopt the others' cuts has done so
        shown, others = _shown(summary), _shown(first["summary"])
        raise DatasetError(
            f"{who}: rank {self.rank} found {shown}, and rank {first['rank']}, before, "
            f"{others}: shards were added or removed meanwhile, or the ranks were "
            "given different ones, and samples would be lost or duplicated; let all "
            "ranks read the same names, and start again",
            location=who,
        )

    def _looked(self, key: str, store: Any) -> tuple[str, Any]:
        """Return the key of this look, and what the first rank left there."""
        # How often this rank has looked: its first look is compared with the first of
        # the others, its second with their second.
        key = f"{key}/{store.add(f'{key}/rank {self.rank}', 1)}"
        return key, json.loads(store.get(key)) if store.check([key]) else None

    def _left(self, key: str, summary: Any, store: Any) -> Any:
        """Leave a summary unless another rank was faster; return the first one."""
        mine = {"rank": self.rank, "summary": summary}
        return json.loads(store.compare_set(key, "", json.dumps(mine)))

    async def _do(self, job: Callable[[Any], Any], who: str) -> Any:
        """Run an operation in a thread, on a separate connection."""
        try:
            return await asyncio.to_thread(lambda: job(self.store.open()))
        except Exception as error:
            raise DatasetError(
                f"{who}: rank {self.rank} could not compare its shards with those of "
                f"the other ranks, through {self.store!r}: {error}; start again, or "
                "give the ranks another store with agree()",
                location=who,
            ) from error


def key_of(what: Any) -> str:
    """Return the beginning of the keys of ``what`` in this run."""
    run = ".".join(
        os.environ.get(f"TORCHELASTIC_{name}", "")
        for name in ("RUN_ID", "RESTART_COUNT")
    )
    return f"aioloader/{_digest([run, what])}"


def _digest(value: Any) -> str:
    words = json.dumps(value, sort_keys=True).encode()
    return blake2b(words, digest_size=8).hexdigest()


def _shown(summary: Any) -> str:
    return f"{summary['count']:,} shards (digest {_digest(summary)})"
