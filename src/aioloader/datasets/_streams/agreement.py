"""What ranks agree on through a key-value store: lists of shards, ends of epochs.

Operations of the store block, so they run in threads, on separate connections.
"""

import itertools
import json
import queue
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from aioloader._base.cancellation import in_thread
from aioloader._base.cpu_threads import CpuThread
from aioloader._base.rank_store import RankStore, digest, group, key_of
from aioloader._order.shared_end import RankCounts, SharedEnd
from aioloader.errors import DatasetError


@dataclass(frozen=True)
class Agreement:
    """What one process compares with the others in one iteration.

    The first one to arrive leaves the summary of what it found in the store; the others
    adopt it, and compare. None waits for another, so one that iterates alone continues.
    ``rank`` is this worker's, among the workers of all ranks; its peers have it too.
    """

    store: RankStore
    rank: int
    ranks: int
    epoch: int
    workers: int  # of each rank

    @property
    def name(self) -> str:
        """The number of the rank, with that of its worker if it has several."""
        rank, worker = divmod(self.rank, self.workers)
        return f"{rank} (worker {worker})" if self.workers > 1 else f"{rank}"

    async def on(
        self,
        what: Any,
        who: str,
        stack: AsyncExitStack,
        find: Callable[[AsyncExitStack, Any], Awaitable[Any]],
    ) -> Any:
        """Return what this rank finds, if the first rank has found the same.

        ``what`` identifies it: equal on all ranks, JSON-serialisable. ``who`` names the
        stream, for errors; ``stack`` closes what was opened to find it. ``find``
        gets the summary that the first rank found, if any, and returns what has a
        ``summary``, JSON-serialisable.
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
        peer = "a peer of " if first["rank"] == self.rank else ""
        raise DatasetError(
            f"{who}: rank {self.name} found {shown}, and {peer}rank {first['name']}, "
            f"before, {others}: shards were added or removed meanwhile, or the ranks "
            "were given different ones, and samples would be lost or duplicated; let "
            "all ranks read the same names, and start again",
            location=who,
        )

    def _looked(self, key: str, store: Any) -> tuple[str, Any]:
        """Return the key of this look, and what the first rank left there."""
        # How often this process has looked: its first look is compared with the first
        # of the others, its second with their second.
        mine = f"{key}/rank {self.rank} of process {self.store.process}"
        key = f"{key}/{store.add(mine, 1)}"
        return key, json.loads(store.get(key)) if store.check([key]) else None

    def _left(self, key: str, summary: Any, store: Any) -> Any:
        mine = {"rank": self.rank, "name": self.name, "summary": summary}
        return json.loads(store.compare_set(key, "", json.dumps(mine)))

    async def _do(self, job: Callable[[Any], Any], who: str) -> Any:
        """Run an operation in a thread, on a separate connection."""
        try:
            return await in_thread(
                lambda: job(self.store.open()), abandon_on_cancel=True
            )
        except Exception as error:
            raise DatasetError(
                f"{who}: rank {self.name} could not compare its shards with those of "
                f"the other ranks, through {self.store!r}: {error}; start again, or "
                "give the ranks another store with agree()",
                location=who,
            ) from error


def _shown(summary: Any) -> str:
    return f"{summary['count']:,} shards (digest {digest(summary)})"


# How many iterations this process has begun, by what they read: each has separate keys,
# equal in all processes if these iterate equally often.
_BEGUN: dict[tuple[str, int], Iterator[int]] = {}
_LONG = timedelta(days=1)  # the consumer's wait is bounded
_GRACE = 10.0  # seconds for the threads to end
_LEFT = b"left"  # wakes the thread that listens


class EpochEndRounds:
    """Agrees on the end of an epoch, in rounds.

    In each round every rank tells how many batches it has, as soon as these are more
    than the slowest rank had told before; the last one to tell works out what follows,
    for all. So a round takes as many batches as were read ahead, and normally nobody
    waits. One thread tells and another listens; to end, the first wakes the second.
    Each rank has one key, which it overwrites; those of a round are deleted in it.

    Where there are more processes than ranks, peers deliver the same batches, and it
    does not matter which of them talk: the first to arrive of each rank form one circle
    of ranks, the second ones another.

    ``what`` identifies the stream: equal on all ranks, JSON-serialisable. ``at`` is the
    epoch, and how many of its batches were delivered before.
    """

    def __init__(
        self,
        store: RankStore,
        rank: int,
        ranks: int,
        *,
        what: Any,
        at: Sequence[int],
        name: str,
    ) -> None:
        self.timeout: float = store.patience
        self.who: str = f"rank {rank} of {ranks}"
        self._store, self._rank, self._ranks = store, rank, ranks
        self._what, self._at, self._name = what, list(at), name
        self._key = ""
        self._round = 0
        self._is_heard = True  # the counts of the latest round that this rank told
        self._is_closed = False
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._told: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._threads: list[CpuThread] = []

    def begin(self, end: SharedEnd, wake: Callable[[Exception | None], None]) -> None:
        """Start to tell what ``end`` knows of this rank, and to update it.

        ``wake`` is called after each update, in another thread, and with an error.
        """
        if self._threads or self._is_closed:
            return
        self._end, self._wake = end, wake
        key = key_of(["end", self._ranks, self._what])
        begun = _BEGUN.setdefault((key, self._rank), itertools.count(1))
        self._key = f"{key}/{next(begun)}"
        place = group()
        self._may_have_peers = place is not None and place[1] > self._ranks
        # Python's exit aborts the process if a thread is in a call of the store.
        weakref.finalize(self, _end, weakref.ref(self))
        for job in (self._tell, self._listen):
            self._threads.append(thread := CpuThread.once("aioloader-end"))
            thread.post(partial(self._run, job))

    def note(self) -> None:
        """Note that there is news for the others; any thread."""
        if self._is_heard:  # otherwise it is seen after this round
            self._bell.put(None)

    def close(self) -> None:
        """Start to end; any thread, and finalizers."""
        self._is_closed = True
        self._bell.put(None)

    def join(self) -> bool:
        for thread in self._threads:
            thread.join(_GRACE)
        return not any(thread.is_alive() for thread in self._threads)

    def waits_for(self) -> str:
        """Return which other ranks it waits for: those that have told less; blocks."""
        store = self._store.open()
        others = [rank for rank in range(self._ranks) if rank != self._rank]
        late = [
            rank
            for rank in others
            if not store.check([self._key_of(rank)])
            or self._told_by(store, rank)[0] < self._round
        ]
        late = late or others  # all have told, and one has not said what follows
        return f"rank{'s' * (len(late) > 1)} {', '.join(map(str, late))}"

    # -- in the threads -----------------------------------------------------------

    def _run(self, job: Callable[[Any], None]) -> None:
        end = self._end
        try:
            job(self._store.open())
        except Exception as error:  # noqa: BLE001  (handed to the consumer)
            end.is_agreed = end.total() is not None  # all know it, or are gone
            self._wake(None if end.is_agreed else self._failed(str(error), error))
        finally:
            self.close()
            self._told.put(None)

    def _tell(self, store: Any) -> None:
        """Tell this rank's count in each round, and once more when the end is known."""
        end, number = self._end, 0
        if self._may_have_peers:  # the counter stays: nobody knows who is still to come
            self._key += f"/circle {store.add(f'{self._key}/of rank {self._rank}', 1)}"
        try:
            while not self._is_closed:
                is_known = end.total() is not None
                if self._is_heard and (is_known or end.has_news()):
                    self._is_heard, self._round = False, number
                    self._post(store, number)
                    self._told.put(number)
                    number += 1
                self._bell.get()
            if not end.is_agreed:
                self._post(store, number, has_left=True)
        finally:
            if not (end.is_agreed or self._is_heard):
                store.set(self._heard(number - 1, self._rank), _LEFT)

    def _listen(self, store: Any) -> None:
        while (number := self._told.get()) is not None:
            name = self._heard(number, self._rank)
            store.wait([name], _LONG)
            found = store.get(name)
            store.delete_key(name)
            why = "" if found == _LEFT else self._hear(json.loads(found))
            if why:
                self._wake(self._failed(why))
            if why or found == _LEFT:
                return

    def _hear(self, found: Any) -> str:
        """Take what is known of all ranks after a round; return why none follows."""
        end = self._end
        if "error" in found:
            return str(found["error"])
        is_last = end.total() is not None  # all ranks have heard it
        if not is_last:
            end.counts = RankCounts(**found)
        left = end.counts.left
        end.is_agreed = is_last or (bool(left) and end.total() is not None)
        if left and not end.is_agreed:
            return f"rank {left[0]} has left its iteration, and all must end together"
        self._is_heard = True
        self._is_closed |= end.is_agreed
        self._wake(None)
        self._bell.put(None)
        return ""

    def _key_of(self, rank: int) -> str:
        return f"{self._key}/rank {rank}"

    def _told_by(self, store: Any, rank: int) -> Any:
        return json.loads(store.get(self._key_of(rank)))

    def _heard(self, number: int, rank: int) -> str:
        return f"{self._key}/round {number} to rank {rank}"

    def _post(self, store: Any, number: int, *, has_left: bool = False) -> None:
        """Tell this rank's count; the last rank of a round tells all what follows."""
        count = self._end.made, self._end.has_ended, has_left
        words = json.dumps([number, self._at, count])
        store.set(self._key_of(self._rank), words)
        counter = f"{self._key}/round {number}"
        if store.add(counter, 1) < self._ranks:
            return
        store.delete_key(counter)
        ranks = range(self._ranks)
        result = json.dumps(_result([self._told_by(store, one) for one in ranks]))
        if self._end.total() is not None:
            for rank in ranks:
                store.delete_key(self._key_of(rank))
        for rank in sorted(ranks, key=lambda one: one == self._rank):
            store.set(self._heard(number, rank), result)

    def _failed(self, why: str, cause: Exception | None = None) -> DatasetError:
        error = DatasetError(
            f"{self._name}: {self.who} could not agree with the others on the end of "
            f"the epoch, through {self._store!r}: {why}; start again, or give the "
            "ranks another store with agree()",
            location=self._name,
        )
        error.__cause__ = cause
        return error


def _result(found: Sequence[Any]) -> dict[str, Any]:
    """Return what follows from what all ranks told, or why nothing does."""
    if len({tuple(at) for _, at, _ in found}) > 1:
        text = "; ".join(
            f"rank {rank} is at batch {batch} of epoch {epoch}"
            for rank, (_, (epoch, batch), _) in enumerate(found)
        )
        return {"error": f"{text}; start or resume all ranks at one moment"}
    return RankCounts.of([count for _, _, count in found])._asdict()


def _end(found: "weakref.ref[EpochEndRounds]") -> None:
    """End the threads of a rank; they hold it, so it is alive if they run."""
    if (talk := found()) is not None:
        talk.close()
        talk.join()
