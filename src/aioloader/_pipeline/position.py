"""The position of a stream: its own state, or how many samples were read from it.

The state follows torchdata's protocol: ``state_dict`` and ``load_state_dict`` of the
iterator, of the dataset, or of both. A stream without it is read again from its
beginning, and the delivered samples are dropped.
"""

import copy
import pickle
from typing import Any, TypeAlias

from aioloader.protocols import BlockIterator, is_own_stream, is_stateful

# "read": samples read in total; "skip": samples read after the states below;
# "iterator", "dataset": their states, if they have one; "is_dataset": the iterator is
# the dataset; "is_over": the states are from the end of the previous epoch;
# "is_first": the states are from before the first read; "ended": the stream has ended.
StreamState: TypeAlias = dict[str, Any]
STATES = ("dataset", "iterator")


class Position:
    """The position of one stream that is being read.

    Args:
        dataset: The dataset that is iterated.
        resume: Where to start; None: at the beginning.
        every: Batches between two states of a stateful stream; 0: only the first
            state.

    Attributes:
        read: Samples read so far, by all ranks that read the same stream.
        to_skip: Samples that must be read and dropped first.
        has_ended: Whether the stream had ended where it is resumed.
    """

    def __init__(self, dataset: Any, resume: StreamState | None, every: int) -> None:
        self._dataset = dataset
        self._every = every
        self._resume: StreamState = resume or {}
        if self._resume.get("is_over"):
            # Only a state that outlives an epoch applies to the next one.
            name = "iterator" if "is_dataset" in self._resume else "dataset"
            kept = name in self._resume
            self._resume = {"dataset": self._resume[name]} if kept else {}
        self.read: int = self._resume.get("read", 0)
        self.has_ended = bool(self._resume.get("ended"))
        self.to_skip: int = 0 if self.has_ended else self._resume.get("skip", 0)
        self._is_own = is_own_stream(dataset)
        # The objects with a state, by "dataset" and "iterator"; known once it is open.
        self._stateful: dict[str, Any] = {}
        self._latest: StreamState = {
            name: self._resume[name]
            for name in (*STATES, "is_dataset")
            if name in self._resume
        }
        self._at = self.read - self.to_skip

    def load_dataset(self) -> bool:
        """Load the dataset's state before it is iterated; return whether it did."""
        if "dataset" not in self._resume or self._is_as_at_first():
            return False
        self._dataset.load_state_dict(self._resume["dataset"])
        return True

    def _is_as_at_first(self) -> bool:
        """Tell whether nothing was read and the dataset's state is unchanged.

        A dataset that is its own iterator may take any state as one from mid-epoch.
        """
        if "is_first" not in self._resume:
            return False
        now, then = self._dataset.state_dict(), self._resume["dataset"]
        try:
            return pickle.dumps(now) == pickle.dumps(then)
        except Exception:  # not picklable: load the state
            return False

    def load_iterator(self, iterator: Any) -> None:
        """Load the iterator's state before it is read."""
        dataset = self._dataset
        if self._is_own and isinstance(iterator, BlockIterator):
            # The dataset loads its state, and the next iterator starts there.
            self._stateful = {"dataset": iterator}
            if self.read:
                # The state may be of another number of ranks, each of which read more.
                self.read = self._at = iterator.at
        else:
            parts = {"iterator": iterator}
            if dataset is not iterator:
                parts["dataset"] = dataset
            self._stateful = {k: v for k, v in parts.items() if is_stateful(v)}
        if "iterator" in self._resume:
            iterator.load_state_dict(self._resume["iterator"])
        elif not self._every and not self.read:
            self._latest = self._states()

    def state(self, number: int, *, has_ended: bool = False) -> StreamState:
        """Return where the stream is after batch ``number``.

        Args:
            number: The batch.
            has_ended: Whether the stream has ended: a dataset that restarts then, as
                generators do, must not be read again in the same epoch.
        """
        every = self._every
        if has_ended or (every and (number % every == 0 or not self._latest)):
            latest = self._states()
            if latest:
                self._latest, self._at = latest, self.read
        state = {"read": self.read, "skip": self.read - self._at, **self._latest}
        if has_ended and not self._is_own:  # our streams record it in their state
            state["ended"] = True
        return state

    def _states(self) -> StreamState:
        """Return the states of dataset and iterator, if they have any."""
        found: StreamState = {}
        for name, part in self._stateful.items():
            state = part.state_dict()
            found[name] = state if self._is_own else copy.deepcopy(state)
            if name == "iterator" and part is self._dataset:
                found["is_dataset"] = True
        return found


def has_state(position: StreamState) -> bool:
    """Tell whether a position holds the stream's own state."""
    return any(name in position for name in STATES)
