"""The key-value store that ranks share, and a comparison of how long ranks wait.

The user or torch's process group provides the store. Operations block. They use new
connections, because torch locks busy ones. No function here waits for other ranks.
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
# Default limits in seconds, which `agree` can change: on one operation of the store,
# and on the wait for the other ranks (as in torch's process groups).
TIMEOUT = 60.0
PATIENCE = 1800.0
# With the process id, this token identifies a process among all of a run.
_TOKEN = os.urandom(4).hex()


class RankStore:
    """The store through which ranks agree; picklable if it can be reopened.

    ``store``: a ``torch.distributed`` store; if None, ``resolved`` returns the process
    group's. ``timeout``: limit in seconds on each operation and each wait for ranks.
    """

    def __init__(self, store: Any = None, timeout: float | None = None) -> None:
        self._store = store
        # Opens the store again, in any process; None if that is impossible.
        self._again = None if store is None else _opener_of(store)
        self._timeout = timeout
        self._process = f"{_TOKEN}.{os.getpid()}"

    @property
    def process(self) -> int | str:
        """The identity of this process or, in a worker, of the loader's process.

        With a process group, the identity is the rank in the group. A loader's rank
        does not identify a process, because several processes may read one rank's part.
        """
        place = group()
        return self._process if place is None else place[0]

    @property
    def patience(self) -> float:
        """How many seconds a rank waits for the other ranks."""
        return PATIENCE if self._timeout is None else self._timeout

    def resolved(self) -> "RankStore | None":
        """Return this store, or the process group's; None if there is neither."""
        if self._store is not None or self._again is not None:
            return self
        if group() is None:
            return None
        return RankStore(dist.distributed_c10d._get_default_store(), self._timeout)  # noqa: SLF001

    def open(self) -> Any:
        """Return a new connection, or the store itself if it cannot be reopened."""
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
    """Return this process's rank and the process group's size; None without a group."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.get_rank(), dist.get_world_size()


def _opener_of(store: Any) -> "partial[Any] | None":
    """Return a function that reopens a store with a timeout; None if impossible."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        given = {"is_master": False, "wait_for_workers": False}
        return partial(dist.TCPStore, store.host, store.port, **given)
    is_file = isinstance(store, dist.FileStore)
    return partial(_file_store, path=store.path) if is_file else None


def _file_store(path: str, timeout: timedelta) -> Any:  # noqa: ARG001  (as in TCPStore)
    Path(path).parent.stat()  # without the folder, the store would wait for minutes
    return dist.FileStore(path)


def key_of(subject: Any) -> str:
    """Return the prefix for the store's keys about ``subject``, unique to this run."""
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

    This rank replaces its numbers in the process group's store and reads the numbers
    that other ranks have written so far.

    Args:
        name: Name that ranks use for the compared loader, such as ``"train"``.
        epoch: The epoch number; numbers of other epochs do not count.
        waited: Seconds that this rank waited for batches, in total.
        batches: How many batches this rank waited for.
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
