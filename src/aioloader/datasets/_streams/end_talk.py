"""Ranks agree on the end of an epoch through a key-value store, in rounds.

In each round every rank tells how many batches it has, as soon as these are more than
the slowest rank had told before; the last one to tell works out what follows, for all.
So a round takes as many batches as were read ahead, and normally nobody waits. One
thread tells and another listens; to end, the first wakes the second. Each rank has one
key, which it overwrites; those of a round are deleted in it.
"""

import json
import queue
import threading
import weakref
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from aioloader._order.shared_end import Count, Counts, EndTalk, SharedEnd
from aioloader.datasets._streams.agreement import RankStore, key_of
from aioloader.errors import DatasetError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# How many iterations this process has begun, by what they read: each has separate keys,
# equal on all ranks if these iterate equally often.
_BEGUN: Counter[tuple[str, int]] = Counter()
_LONG = timedelta(days=1)  # the consumer's wait is bounded
_GRACE = 10.0  # seconds for the threads to end
_LEFT = b"left"  # wakes the thread that listens


class StoreTalk(EndTalk):
    """The counts of one rank's iteration, and those of the others, in a store.

    Args:
        store: The store.
        rank: This rank.
        ranks: Number of ranks.
        what: What identifies the stream, equal on all ranks, JSON-serialisable.
        at: The epoch, and how many of its batches were delivered before.
        name: Name of the stream, for errors.
    """

    def __init__(
        self,
        store: RankStore,
        rank: int,
        ranks: int,
        *,
        what: Any,
        at: "Sequence[int]",
        name: str,
    ) -> None:
        self.timeout: float = store.patience
        self._store = store
        self._rank, self._ranks = rank, ranks
        self.who: str = f"rank {rank} of {ranks}"
        self._what, self._at, self._name = what, list(at), name
        self._key = ""
        self._round = 0
        self._is_heard = True  # the counts of the latest round that this rank told
        self._is_closed = False
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._told: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def begin(self, end: SharedEnd, wake: "Callable[[Exception | None], None]") -> None:
        """Start to tell what ``end`` knows of this rank, and to update it."""
        if self._threads or self._is_closed:
            return
        self._end, self._wake = end, wake
        key = key_of(["end", self._ranks, self._what])
        _BEGUN[key, self._rank] += 1
        self._key = f"{key}/{_BEGUN[key, self._rank]}"
        # Python's exit aborts the process if a thread is in a call of the store.
        weakref.finalize(self, _end, weakref.ref(self))
        for job in (self._tell, self._listen):
            thread = threading.Thread(
                target=self._run, args=(job,), name="aioloader-end", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def note(self) -> None:
        """Note that there is news for the others; any thread."""
        if self._is_heard:  # otherwise it is seen after this round
            self._bell.put(None)

    def close(self) -> None:
        """Start to end; any thread, and finalizers."""
        self._is_closed = True
        self._bell.put(None)

    def join(self) -> bool:
        """Wait, bounded, until it has ended; return whether it has."""
        for thread in self._threads:
            thread.join(_GRACE)
        return not any(thread.is_alive() for thread in self._threads)

    def waits_for(self) -> str:
        """Return which other ranks it waits for: those that have told less; blocks."""
        store, late = self._store.open(), []
        others = [rank for rank in range(self._ranks) if rank != self._rank]
        for rank in others:
            has_told = store.check([self._key_of(rank)])
            if not has_told or self._told_by(store, rank)[0] < self._round:
                late.append(rank)
        late = late or others  # all have told, and one has not said what follows
        return f"rank{'s' * (len(late) > 1)} {', '.join(map(str, late))}"

    # -- in the threads -----------------------------------------------------------

    def _run(self, job: "Callable[[Any], None]") -> None:
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
        try:
            while not self._is_closed:
                is_known = end.total() is not None
                if self._is_heard and (is_known or end.has_news()):
                    self._is_heard, self._round = False, number
                    self._post(store, number, Count(end.made, end.has_ended))
                    self._told.put(number)
                    number += 1
                self._bell.get()
            if not end.is_agreed:
                left = Count(end.made, end.has_ended, has_left=True)
                self._post(store, number, left)
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
            end.counts = Counts(**found)
        left = end.counts.left
        end.is_agreed = is_last or (bool(left) and end.total() is not None)
        if left and not end.is_agreed:
            return f"rank {left[0]} has left its iteration, and all must end together"
        self._is_heard = True
        self._is_closed |= end.is_agreed
        self._wake(None)
        self._bell.put(None)
        return ""

    # -- keys ---------------------------------------------------------------------

    def _key_of(self, rank: int) -> str:
        return f"{self._key}/rank {rank}"

    def _told_by(self, store: Any, rank: int) -> Any:
        return json.loads(store.get(self._key_of(rank)))

    def _heard(self, number: int, rank: int) -> str:
        return f"{self._key}/round {number} to rank {rank}"

    def _post(self, store: Any, number: int, count: Count) -> None:
        """Tell a count; the last rank of a round tells all what follows."""
        words = json.dumps([number, self._at, *count])
        store.set(self._key_of(self._rank), words)
        counter = f"{self._key}/round {number}"
        if store.add(counter, 1) < self._ranks:
            return
        store.delete_key(counter)
        ranks = range(self._ranks)
        result = json.dumps(self._result([self._told_by(store, one) for one in ranks]))
        if self._end.total() is not None:
            for rank in ranks:
                store.delete_key(self._key_of(rank))
        for rank in sorted(ranks, key=lambda one: one == self._rank):
            store.set(self._heard(number, rank), result)

    def _result(self, found: "Sequence[Any]") -> dict[str, Any]:
        """Return what follows from what all ranks told, or why nothing does."""
        places = [tuple(at) for _, at, *_ in found]
        if len(set(places)) > 1:
            text = "; ".join(
                f"rank {rank} is at batch {batch} of epoch {epoch}"
                for rank, (epoch, batch) in enumerate(places)
            )
            return {"error": f"{text}; start or resume all ranks at one moment"}
        return Counts.of([Count(*count) for _, _, *count in found])._asdict()

    def _failed(self, why: str, cause: Exception | None = None) -> DatasetError:
        error = DatasetError(
            f"{self._name}: {self.who} could not agree with the others on the end of "
            f"the epoch, through {self._store!r}: {why}; start again, or give the "
            "ranks another store with agree()",
            location=self._name,
        )
        error.__cause__ = cause
        return error


def _end(found: "weakref.ref[StoreTalk]") -> None:
    """End the threads of a rank; they hold it, so it is alive if they run."""
    if (talk := found()) is not None:
        talk.close()
        talk.join()
