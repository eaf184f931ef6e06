"""Where a stream is: its own state, or how many samples were read from it.

The state follows torchdata's protocol: ``state_dict`` and ``load_state_dict`` of the
iterator, of the dataset, or of both. A stream without it is read again from the front,
and what was delivered is dropped.
"""

import copy
from typing import Any, TypeAlias

from aioloader.protocols import is_stateful

# "read": samples read in all; "skip": those of them behind the state below;
# "iterator", "dataset": their states, where they have one; "is_dataset": the iterator
# is the dataset; "is_over": they are those behind the epoch before.
StreamState: TypeAlias = dict[str, Any]
STATES = ("dataset", "iterator")


class Position:
    """The position of one stream that is being read.

    Args:
        dataset: What is iterated.
        resume: Where to begin; None: at the beginning.
        every: Batches from one state of a stateful stream to the next.

    Attributes:
        read: Samples read so far, by all ranks that read alike.
        to_skip: Samples that are to be read and dropped first.
    """

    def __init__(self, dataset: Any, resume: StreamState | None, every: int) -> None:
        self._dataset = dataset
        self._every = every
        self._resume: StreamState = resume or {}
        if self._resume.get("is_over"):
            # Only what outlives an epoch is for the next one.
            name = "iterator" if "is_dataset" in self._resume else "dataset"
            kept = name in self._resume
            self._resume = {"dataset": self._resume[name]} if kept else {}
        self.read: int = self._resume.get("read", 0)
        self.to_skip: int = self._resume.get("skip", 0)
        self._iterator: Any = None
        self._latest: StreamState = {
            name: self._resume[name]
            for name in (*STATES, "is_dataset")
            if name in self._resume
        }
        self._at = self.read - self.to_skip

    def load_dataset(self) -> None:
        """Give the dataset its state back, before it is iterated."""
        if "dataset" in self._resume:
            self._dataset.load_state_dict(self._resume["dataset"])

    def load_iterator(self, iterator: Any) -> None:
        """Give the iterator its state back, before it is read."""
        self._iterator = iterator
        if "iterator" in self._resume:
            iterator.load_state_dict(self._resume["iterator"])

    def state(self, number: int) -> StreamState:
        """Return where the stream is, behind batch ``number``."""
        if number % self._every == 0 or not self._latest:
            latest = self._states()
            if latest:
                self._latest, self._at = latest, self.read
        return {"read": self.read, "skip": self.read - self._at, **self._latest}

    def end(self) -> StreamState:
        """Return where the stream is at its end."""
        return {"read": self.read, "skip": 0, **self._states()}

    def _states(self) -> dict[str, Any]:
        """Return the states of what has one, by who is to be given it."""
        iterator, dataset = self._iterator, self._dataset
        # It gives its own state, and the dataset makes another one that begins there.
        if hasattr(iterator, "pull") and hasattr(dataset, "load_state_dict"):
            return {"dataset": iterator.state_dict()}
        found: StreamState = {}
        if is_stateful(iterator):
            found["iterator"] = copy.deepcopy(iterator.state_dict())
            if iterator is dataset:
                found["is_dataset"] = True
        if dataset is not iterator and is_stateful(dataset):
            found["dataset"] = copy.deepcopy(dataset.state_dict())
        return found


def has_state(position: StreamState) -> bool:
    """Tell whether a position holds the stream's own state."""
    return any(name in position for name in STATES)


def is_read_again(position: StreamState) -> bool:
    """Tell whether resuming costs a second read of what was delivered."""
    return bool(position["skip"]) and not has_state(position)
