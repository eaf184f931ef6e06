"""The key-value store of ranks, and which rank waits longest for data.

The store is torch's process group's, or the user's. Operations block. They use separate
connections, because torch's holds a lock. No rank waits for another here.
"""

import json
import os
import pickle
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch.distributed

from aioloader._base.formatting import seconds_text

# torch's type stubs do not name the stores.
dist: Any = torch.distributed
# Seconds that one operation of the store may take, and that a rank waits for the other
# ranks (as in torch's process groups), unless `agree` says otherwise.
TIMEOUT = 60.0
PATIENCE = 1800.0
# With the process id, it tells a process from all others of a run.
_TOKEN = os.urandom(4).hex()


class RankStore:
    """The store through which ranks agree.

    A store of ``torch.distributed``; None: the process group's store when an iteration
    begins, if there is a group. ``timeout`` bounds each operation, and each wait for
    other ranks, in seconds.
    """

    def __init__(self, store: Any = None, timeout: float | None = None) -> None:
        self._store = store
        # Opens it again, in another process too; None: it cannot be.
        self._again = None if store is None else _opener_of(store)
        self._timeout = timeout
        self._process = f"{_TOKEN}.{os.getpid()}"

    @property
    def process(self) -> int | str:
        """The identity of this process; in a worker, of its loader's process.

        It is the rank in the process group, if there is a group. A loader's rank would
        not do: several processes may read the part of one rank.
        """
        place = group()
        return self._process if place is None else place[0]

    @property
    def patience(self) -> float:
        """Seconds that a rank waits for others."""
        return PATIENCE if self._timeout is None else self._timeout

    def resolved(self) -> "RankStore | None":
        """Return this store, or the process group's; None if there is neither."""
        if self._store is not None or self._again is not None:
            return self
        if group() is None:
            return None
        return RankStore(dist.distributed_c10d._get_default_store(), self._timeout)  # noqa: SLF001

    def open(self) -> Any:
        """Return a new connection to the store. Blocks."""
        seconds = TIMEOUT if self._timeout is None else self._timeout
        timeout = timedelta(seconds=seconds)
        store = self._store if self._again is None else self._again(timeout=timeout)
        store.set_timeout(timeout)
        return store

    def __getstate__(self) -> dict[str, Any]:
        if self._store is not None and self._again is None:
            raise pickle.PicklingError(
                f"a {type(self._store).__name__} cannot be reached from another "
                "process; give agree() a TCPStore or a FileStore, which workers open "
                "again"
            )
        again = getattr(self.resolved(), "_again", None)
        values = {"_timeout": self._timeout, "_process": self.process}
        return {"_store": None, "_again": again, **values}

    def __repr__(self) -> str:
        if self._again is None:
            return type(self._store).__name__
        path = self._again.keywords.get("path")
        return f"FileStore({path!r})" if path else "TCPStore"


def group() -> tuple[int, int] | None:
    """Return this process's rank in the process group and the group's size, if any."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.get_rank(), dist.get_world_size()


def _opener_of(store: Any) -> "partial[Any] | None":
    """Return a function that opens a store again, given a timeout, if possible."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        given = {"is_master": False, "wait_for_workers": False}
        return partial(dist.TCPStore, store.host, store.port, **given)
    is_file = isinstance(store, dist.FileStore)
    return partial(_file_store, path=store.path) if is_file else None


def _file_store(path: str, timeout: timedelta) -> Any:  # noqa: ARG001  (of TCPStore)
    Path(path).parent.stat()  # a store would wait for minutes
    return dist.FileStore(path)


def key_of(subject: Any) -> str:
    """Return the prefix of the keys for ``subject`` in this run."""
    run = ".".join(
        os.environ.get(f"TORCHELASTIC_{name}", "")
        for name in ("RUN_ID", "RESTART_COUNT")
    )
    return f"aioloader/{digest([run, subject])}"


def digest(value: Any) -> str:
    words = json.dumps(value, sort_keys=True).encode()
    return blake2b(words, digest_size=8).hexdigest()


def slowest_rank(name: str, epoch: int, waited: float, batches: int) -> tuple[str, ...]:
    """Return sentences that say which rank waits longest for data.

    This rank writes its numbers to the store of the process group, over its earlier
    numbers, and reads those that other ranks have written so far.

    Args:
        name: What ranks compare, such as ``"train"``.
        epoch: The epoch; numbers of other epochs do not count.
        waited: Seconds that this rank waited for batches.
        batches: For how many.
    """
    place, ranks_store = group(), RankStore().resolved()
    if place is None or ranks_store is None:
        return ("Ranks are not compared: there is no process group.",)
    rank, ranks = place
    key = key_of(["report", ranks, name])
    try:
        store = ranks_store.open()
        store.set(f"{key}/{rank}", json.dumps([epoch, waited, batches]))
        keys = {rank: f"{key}/{rank}" for rank in range(ranks)}
        reports = {
            rank: json.loads(store.get(key))
            for rank, key in keys.items()
            if store.check([key])
        }
    except (OSError, RuntimeError) as error:
        return (f"Ranks are not compared: {error}.",)
    waits = {
        rank: seconds / count
        for rank, (number, seconds, count) in reports.items()
        if count and number == epoch
    }
    if not waits:
        return (f"No rank has reported a batch of epoch {epoch} of {name!r}.",)
    slowest = max(waits, key=lambda rank: waits[rank])
    missing = [str(rank) for rank in range(ranks) if rank not in waits]
    median = sorted(waits.values())[(len(waits) - 1) // 2]
    says = (
        f"Rank {slowest} of {ranks} waits longest for data: "
        f"{seconds_text(waits[slowest])} a batch; the median rank waits "
        f"{seconds_text(median)}."
    )
    if not missing:
        return (says,)
    plural = "s" * (len(missing) > 1)
    lack = f"Not reported yet in epoch {epoch}: rank{plural} {', '.join(missing)}."
    return says, lack
