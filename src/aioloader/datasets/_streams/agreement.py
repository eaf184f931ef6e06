"""How ranks agree on their shards and on an epoch's end, through a key-value store.

The store's operations block, so they run in threads, if possible on new connections.
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
    """A comparison of the shards that the ranks found, for one iteration.

    The first rank to arrive stores a summary of its shards. Later ranks read that
    summary, and theirs must equal it, so no rank waits. Each worker counts as a rank:
    ``rank`` is its number among ``ranks``. Processes with the same ``rank`` are peers.
    """

    store: RankStore
    rank: int
    ranks: int
    epoch: int
    workers: int  # per rank

    @property
    def name(self) -> str:
        """The rank's number, for errors; with several workers, also the worker's."""
        rank, worker = divmod(self.rank, self.workers)
        return f"{rank} (worker {worker})" if self.workers > 1 else f"{rank}"

    async def on(
        self,
        subject: Any,
        location: str,
        stack: AsyncExitStack,
        find: Callable[[AsyncExitStack, Any], Awaitable[Any]],
    ) -> Any:
        """Return the result of ``find``, whose summary must equal the first rank's.

        ``subject``: identifies the comparison; JSON-serialisable, equal on all ranks.
        ``location``: names the stream in errors. ``stack``: closes what ``find`` opens.
        ``find``: gets a stack and the first rank's summary (None if there is none yet).
        Its result has a JSON-serialisable ``summary``.
        """
        key = key_of([self.ranks, self.epoch, subject])
        key, first = await self._do(partial(self._look_up, key), location)
        for _ in range(2):
            theirs = first and first["summary"]
            async with AsyncExitStack() as opened:
                listing = await find(opened, theirs)
                summary = json.loads(json.dumps(listing.summary))
                if first is None:
                    first = await self._do(partial(self._save, key, summary), location)
                if first["summary"] == summary:
                    stack.push_async_callback(opened.pop_all().aclose)
                    return listing
            if theirs is not None:
                break  # a second try would adopt the same summary again
        own, expected = _shown(summary), _shown(first["summary"])
        peer = "a peer of " if first["rank"] == self.rank else ""
        raise DatasetError(
            f"{location}: rank {self.name} found {own}, and {peer}rank "
            f"{first['name']}, before, {expected}: shards were added or removed "
            "meanwhile, or the ranks were given different ones, and samples would be "
            "lost or duplicated; let all ranks read the same names, and start again",
            location=location,
        )

    def _look_up(self, key: str, store: Any) -> tuple[str, Any]:
        """Return this comparison's key and the first rank's entry (None if missing)."""
        # The nth comparison of this process matches the nth one of every other rank.
        counter = f"{key}/rank {self.rank} of process {self.store.process}"
        key = f"{key}/{store.add(counter, 1)}"
        return key, json.loads(store.get(key)) if store.check([key]) else None

    def _save(self, key: str, summary: Any, store: Any) -> Any:
        """Store this rank's summary unless one is stored; return the stored entry."""
        mine = {"rank": self.rank, "name": self.name, "summary": summary}
        return json.loads(store.compare_set(key, "", json.dumps(mine)))

    async def _do(self, job: Callable[[Any], Any], location: str) -> Any:
        """Run a store operation in a thread, on a new connection if possible."""
        run = lambda: job(self.store.open())  # noqa: E731
        try:
            return await in_thread(run, abandon_on_cancel=True)
        except Exception as error:
            raise DatasetError(
                f"{location}: rank {self.name} could not compare its shards with those "
                f"of the other ranks, through {self.store!r}: {error}; start again, or "
                "give the ranks another store with agree()",
                location=location,
            ) from error


def _shown(summary: Any) -> str:
    return f"{summary['count']:,} shards (digest {digest(summary)})"


# Counters of this process's iterations, by stream and rank. Store keys contain the
# iteration's number, so processes that iterate equally often use the same keys.
_ITERATIONS: dict[tuple[str, int], Iterator[int]] = {}
_NO_TIMEOUT = timedelta(days=1)  # long enough, because the consumer's wait is bounded
_JOIN_SECONDS = 10.0  # the time that each thread gets to end
_STOP = b"left"  # a result that ends the listening thread


class EpochEndRounds:
    """The rounds of messages in which ranks agree on the end of an epoch.

    In each round every rank publishes its number of batches, once the rank has ended or
    is well past the slowest rank's count in the previous round. The last rank to
    publish computes the result for all. A round begins before the reported batches are
    used up, so ranks rarely wait. One thread publishes and another listens. Each rank
    overwrites one key; each round deletes its other keys. If ranks have peers, which
    deliver the same batches, the first processes of all ranks agree with each other,
    and so do the second processes.

    ``subject``: identifies the stream; JSON-serialisable, equal on all ranks.
    ``start``: the epoch, and how many of its batches this rank delivered before.
    """

    def __init__(
        self,
        store: RankStore,
        rank: int,
        ranks: int,
        subject: Any,
        start: Sequence[int],
        name: str,
    ) -> None:
        self.timeout: float = store.patience
        self.who: str = f"rank {rank} of {ranks}"
        self._store, self._rank, self._ranks = store, rank, ranks
        self._subject, self._start, self._name = subject, list(start), name
        self._key = ""
        self._round = 0
        self._is_heard = True  # whether the latest published round has its result
        self._is_closed = False
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._rounds: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._threads: list[CpuThread] = []

    def begin(self, end: SharedEnd, wake: Callable[[Exception | None], None]) -> None:
        """Start the threads that publish this rank's counts and update ``end``.

        ``wake`` is called in either thread, with None after an update or with an error.
        """
        if self._threads or self._is_closed:
            return
        self._end, self._wake = end, wake
        key = key_of(["end", self._ranks, self._subject])
        numbers = _ITERATIONS.setdefault((key, self._rank), itertools.count(1))
        self._key = f"{key}/{next(numbers)}"
        process = group()
        self._may_have_peers = process is not None and process[1] > self._ranks
        # A thread still in a store call at Python's exit would abort the process.
        weakref.finalize(self, _end, weakref.ref(self))
        for job in (self._publish_all, self._listen):
            self._threads.append(thread := CpuThread.once("aioloader-end"))
            thread.post(partial(self._run, job))

    def note(self) -> None:
        """Wake the publishing thread because ``end`` changed. Safe in any thread."""
        if self._is_heard:  # otherwise the thread checks ``end`` after this round
            self._news.put(None)

    def close(self) -> None:
        """Tell the threads to end; do not wait. Safe in any thread and finalizer."""
        self._is_closed = True
        self._news.put(None)

    def join(self) -> bool:
        """Wait up to 10 seconds for each thread; return whether all have ended."""
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)
        return not any(thread.is_alive() for thread in self._threads)

    def waits_for(self) -> str:
        """Return the ranks that delay this round, as text for an error. Blocks."""
        store = self._store.open()
        peers = [rank for rank in range(self._ranks) if rank != self._rank]
        late = [
            rank
            for rank in peers
            if not store.check([self._key_of(rank)])
            or self._published_by(store, rank)[0] < self._round
        ]
        late = late or peers  # all have published, but no result arrived
        return f"rank{'s' * (len(late) > 1)} {', '.join(map(str, late))}"

    # -- in the threads -----------------------------------------------------------

    def _run(self, job: Callable[[Any], None]) -> None:
        end = self._end
        try:
            job(self._store.open())
        except Exception as error:  # noqa: BLE001  (handed to the consumer)
            end.is_agreed = end.total() is not None  # the other ranks know it too
            self._wake(None if end.is_agreed else self._failed(str(error), error))
        finally:
            self.close()
            self._rounds.put(None)

    def _publish_all(self, store: Any) -> None:
        """Publish this rank's counts in each round, and once more on leaving early."""
        end, number = self._end, 0
        if self._may_have_peers:  # the counter stays: more peers may arrive later
            self._key += f"/circle {store.add(f'{self._key}/of rank {self._rank}', 1)}"
        try:
            while not self._is_closed:
                is_known = end.total() is not None
                if self._is_heard and (is_known or end.has_news()):
                    self._is_heard, self._round = False, number
                    self._publish(store, number)
                    self._rounds.put(number)
                    number += 1
                self._news.get()
            if not end.is_agreed:
                self._publish(store, number, has_left=True)
        finally:
            if not (end.is_agreed or self._is_heard):
                store.set(self._result_key(number - 1, self._rank), _STOP)

    def _listen(self, store: Any) -> None:
        while (number := self._rounds.get()) is not None:
            key = self._result_key(number, self._rank)
            store.wait([key], _NO_TIMEOUT)
            result = store.get(key)
            store.delete_key(key)
            why = "" if result == _STOP else self._apply(json.loads(result))
            if why:
                self._wake(self._failed(why))
            if why or result == _STOP:
                return

    def _apply(self, result: Any) -> str:
        """Update ``end`` with a round's result; return an error message or ""."""
        end = self._end
        if "error" in result:
            return str(result["error"])
        is_last = end.total() is not None  # all ranks have the result
        if not is_last:
            end.counts = RankCounts(**result)
        left = end.counts.left
        end.is_agreed = is_last or (bool(left) and end.total() is not None)
        if left and not end.is_agreed:
            return f"rank {left[0]} has left its iteration, and all must end together"
        self._is_heard = True
        self._is_closed |= end.is_agreed
        self._wake(None)
        self._news.put(None)
        return ""

    def _key_of(self, rank: int) -> str:
        return f"{self._key}/rank {rank}"

    def _published_by(self, store: Any, rank: int) -> Any:
        return json.loads(store.get(self._key_of(rank)))

    def _result_key(self, number: int, rank: int) -> str:
        return f"{self._key}/round {number} to rank {rank}"

    def _publish(self, store: Any, number: int, *, has_left: bool = False) -> None:
        """Publish this rank's counts; a round's last rank also publishes the result."""
        count = self._end.made, self._end.has_ended, has_left
        entry = json.dumps([number, self._start, count])
        store.set(self._key_of(self._rank), entry)
        counter = f"{self._key}/round {number}"
        if store.add(counter, 1) < self._ranks:
            return
        store.delete_key(counter)
        ranks = range(self._ranks)
        result = json.dumps(_result([self._published_by(store, k) for k in ranks]))
        if self._end.total() is not None:
            for rank in ranks:
                store.delete_key(self._key_of(rank))
        for rank in sorted(ranks, key=lambda k: k == self._rank):  # this rank last
            store.set(self._result_key(number, rank), result)

    def _failed(self, why: str, cause: Exception | None = None) -> DatasetError:
        error = DatasetError(
            f"{self._name}: {self.who} could not agree with the others on the end of "
            f"the epoch, through {self._store!r}: {why}; start again, or give the "
            "ranks another store with agree()",
            location=self._name,
        )
        error.__cause__ = cause
        return error


def _result(published: Sequence[Any]) -> dict[str, Any]:
    """Return all ranks' counts, or an error if they started at different batches."""
    if len({tuple(position) for _, position, _ in published}) > 1:
        text = "; ".join(
            f"rank {rank} is at batch {batch} of epoch {epoch}"
            for rank, (_, (epoch, batch), _) in enumerate(published)
        )
        return {"error": f"{text}; start or resume all ranks at one moment"}
    return RankCounts.of([count for _, _, count in published])._asdict()


def _end(reference: "weakref.ref[EpochEndRounds]") -> None:
    """End the threads of rounds that still exist at Python's exit."""
    if (rounds := reference()) is not None:
        rounds.close()
        rounds.join()
