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
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed

from aioloader.errors import DatasetError

# torch's type stubs do not name the stores.
dist: Any = torch.distributed
# Seconds that one operation of the store may take, and that a rank waits for others (as
# long as torch's process groups do), unless `agree` says otherwise.
TIMEOUT = 60.0
PATIENCE = 1800.0


class _Address(NamedTuple):
    """Address at which another process can open a store again."""

    host: str | None
    port: int
    path: str | None

    def open(self, timeout: timedelta) -> Any:
        if self.path is not None:
            Path(self.path).parent.stat()  # a store would wait for minutes
            return dist.FileStore(self.path)
        return dist.TCPStore(
            self.host,
            self.port,
            is_master=False,
            timeout=timeout,
            wait_for_workers=False,
        )


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
        self._address = None if store is None else _address_of(store)
        self._timeout = timeout

    @property
    def patience(self) -> float:
        """Seconds that a rank waits for others."""
        return PATIENCE if self._timeout is None else self._timeout

    def found(self) -> "RankStore | None":
        """Return this store or that of the process group; None if there is neither."""
        if self._store is not None or self._address is not None:
            return self
        if not (dist.is_available() and dist.is_initialized()):
            return None
        return RankStore(dist.distributed_c10d._get_default_store(), self._timeout)  # noqa: SLF001

    def open(self) -> Any:
        """Return a new connection to the store. Blocks."""
        seconds = TIMEOUT if self._timeout is None else self._timeout
        timeout = timedelta(seconds=seconds)
        store = self._store if self._address is None else self._address.open(timeout)
        store.set_timeout(timeout)
        return store

    def __getstate__(self) -> dict[str, Any]:
        if self._store is not None and self._address is None:
            raise pickle.PicklingError(
                f"a {type(self._store).__name__} cannot be reached from another "
                "process; give agree() a TCPStore or a FileStore, which workers open "
                "again"
            )
        found = self.found()
        address = getattr(found, "_address", None)
        return {"_store": None, "_address": address, "_timeout": self._timeout}

    def __repr__(self) -> str:
        address = self._address
        if address is None:
            return type(self._store).__name__
        return f"FileStore({address.path!r})" if address.path else "TCPStore"


def _address_of(store: Any) -> _Address | None:
    """Return the address of a store; None if it cannot be opened again."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        return _Address(store.host, store.port, None)
    if isinstance(store, dist.FileStore):
        return _Address(None, 0, store.path)
    return None


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

    async def ask(self, what: Any, who: str) -> "Question":
        """Look up what another rank has found.

        Args:
            what: What identifies the list: equal on all ranks, JSON-serialisable.
            who: Name of the stream, for errors.
        """
        return await Question.opened(self, what, who)


class Question:
    """One list of shards that ranks compare.

    Attributes:
        first: Summary that the first rank found; None if this rank is the first.
    """

    first: Any = None

    def __init__(self, agreement: Agreement, what: Any, who: str) -> None:
        self._agreement = agreement
        self._who = who
        self._key = key_of([agreement.ranks, agreement.epoch, what])

    @classmethod
    async def opened(cls, agreement: Agreement, what: Any, who: str) -> "Question":
        """Look the list up and return the question."""
        question = cls(agreement, what, who)
        await question._do(question._look)
        return question

    async def settle(self, summary: Any) -> bool:
        """Store this rank's summary if it is the first; return whether all agree.

        If they do not, ``first`` is the other rank's summary.
        """
        summary = json.loads(json.dumps(summary))
        if self.first is None:
            mine = {"rank": self._agreement.rank, "summary": summary}
            await self._do(lambda store: self._leave(store, mine))
        return bool(self.first["summary"] == summary)

    def refuse(self, summary: Any) -> DatasetError:
        """Return the error for a list that differs from the first rank's."""
        theirs, rank = self.first["summary"], self.first["rank"]
        return DatasetError(
            f"{self._who}: rank {self._agreement.rank} found {_shown(summary)}, and "
            f"rank {rank}, before, {_shown(theirs)}: shards were added or removed "
            "meanwhile, or the ranks were given different ones, and samples would be "
            "lost or duplicated; let all ranks read the same names, and start again",
            location=self._who,
        )

    def _look(self, store: Any) -> None:
        # How often this rank has looked: its first look is compared with the first of
        # the others, its second with their second.
        time = store.add(f"{self._key}/rank {self._agreement.rank}", 1)
        self._key = f"{self._key}/{time}"
        if store.check([self._key]):
            self.first = json.loads(store.get(self._key))

    def _leave(self, store: Any, mine: Any) -> None:
        self.first = json.loads(store.compare_set(self._key, "", json.dumps(mine)))

    async def _do(self, job: Callable[[Any], None]) -> None:
        """Run an operation in a thread, on a separate connection."""
        store = self._agreement.store

        def run() -> None:
            job(store.open())

        try:
            await asyncio.to_thread(run)
        except Exception as error:
            raise DatasetError(
                f"{self._who}: rank {self._agreement.rank} could not compare its "
                f"shards with those of the other ranks, through {store!r}: {error}; "
                "start again, or give the ranks another store with agree()",
                location=self._who,
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
