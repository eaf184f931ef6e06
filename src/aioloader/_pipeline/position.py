"""The position in a stream, by its own state or the number of samples read.

The state follows torchdata's protocol: ``state_dict`` and ``load_state_dict`` of the
iterator, of the dataset, or of both. To resume a stream without a state, the delivered
samples are read again and dropped.
"""

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any, TypeAlias

from aioloader._base.raising import saved_state, usable
from aioloader.protocols import BlockIterator, OwnStream, is_stateful

# "read": samples read in total; "skip": samples read after the states below;
# "iterator", "dataset": their states, if they have one; "is_dataset": the iterator is
# the dataset; "is_over": the states are from the end of the previous epoch;
# "is_first": the states are from before the first read; "ended": the stream has ended;
# "again": of our streams, where samples are repeated after the end.
StreamState: TypeAlias = dict[str, Any]
STATES = ("dataset", "iterator")


class StateLoads:
    """A record of states loaded into a dataset, to detect epochs that wrongly resume.

    Hugging Face's datasets start later epochs from the loaded state as well. In such an
    epoch, the state after the first sample is the same as in the resumed epoch, or no
    sample comes and the dataset did not report the loaded state after loading. The
    dataset's first state is then loaded. A process has one record per dataset.
    """

    _first: tuple[Any] | None = None  # the state before anything was read or loaded
    _loaded: Any = None
    _is_deferred = False  # the dataset did not report the loaded state after loading
    _after_first: Any = None  # the state after the first sample of the resumed epoch
    is_pending = False  # an epoch may start from the loaded state by mistake
    is_early = False  # a state was loaded before its epoch was opened
    # Keep torch's RNG state while the dataset resumes; the dataset's saved one may be
    # older.
    keeps_generator = False

    def save_first(self, dataset: Any) -> None:
        if self._first is None:
            self._first = (saved_state(dataset),)

    def load(self, dataset: Any, state: Any) -> None:
        dataset.load_state_dict(state)
        self.is_early, self.is_pending = False, True
        self._loaded, self._after_first = copy.deepcopy(state), None
        self._is_deferred = not _are_equal(dataset.state_dict(), state)

    def load_early(self, dataset: Any, position: StreamState) -> None:
        """Load a dataset's state between two epochs, before random numbers are drawn.

        An unchanged state from before the first read is not loaded: a dataset that is
        its own iterator may treat any loaded state as a mid-epoch state.
        """
        state = position["iterator" if "is_dataset" in position else "dataset"]
        self.save_first(dataset)
        if "is_over" in position or not _are_equal(dataset.state_dict(), state):
            self.load(dataset, copy.deepcopy(state))
        self.is_early = True

    def note_resumed(self, dataset: Any) -> None:
        """Save the state after the first sample of a resumed epoch."""
        self._after_first = copy.deepcopy(dataset.state_dict())

    def correction(self, dataset: Any, *, is_empty: bool) -> StreamState:
        """Return the state to load if an epoch wrongly resumed, or an empty dict.

        Called after the first sample, or at the end if the epoch ``is_empty``.
        """
        assert self._first is not None
        (first,), now, self.is_pending = self._first, dataset.state_dict(), False
        is_kept = self._after_first is not None and _are_equal(now, self._after_first)
        moves = self._is_deferred or not _are_equal(now, self._loaded)
        is_again = (is_kept and moves) or (is_empty and self._is_deferred)
        return {"dataset": first} if is_again else {}


def _are_equal(a: Any, b: Any) -> bool:
    """Tell whether two states are equal, even if only one has been through JSON."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        a, b = ({str(k): v for k, v in state.items()} for state in (a, b))
        return a.keys() == b.keys() and all(
            _are_equal(part, b[name]) for name, part in a.items()
        )
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_are_equal, a, b))
    try:
        is_equal = a == b
        return bool(is_equal.all() if hasattr(is_equal, "all") else is_equal)
    except Exception:  # the user's
        return False


class StreamPosition:
    """The position in a stream being read; ``resume`` is the state to start from."""

    def __init__(
        self, dataset: Any, resume: StreamState | None, loads: StateLoads
    ) -> None:
        self._dataset = dataset
        self.is_own = isinstance(dataset, OwnStream)  # one of aioloader's streams
        self._loads = loads
        resume = resume or {}
        is_next = self._is_next = "is_over" in resume
        self._resumes = bool(resume) and not is_next
        # Samples of the previous epoch, if this one resumes at its start.
        self.last_epoch: int = resume.get("read", 0) if is_next else 0
        if resume.get("is_over"):
            # Only a state that outlives an epoch applies to the next one.
            name = "iterator" if "is_dataset" in resume else "dataset"
            resume = {"dataset": resume[name]} if name in resume else {}
        self._resume = resume
        self.read: int = resume.get("read", 0)  # samples, by all ranks of this stream
        self.has_ended = bool(resume.get("ended"))  # at the state to resume from
        self.repeats_from: StreamState | None = resume.get("again")
        # Samples that must be read and dropped first.
        self.to_skip: int = 0 if self.has_ended else resume.get("skip", 0)
        # Objects with a state, by "dataset" and "iterator"; known once it is open.
        self._stateful: dict[str, Any] = {}
        # Their latest states, and how many samples were read then.
        self._latest = {k: resume[k] for k in (*STATES, "is_dataset") if k in resume}
        self._read_at_state = self.read - self.to_skip

    def load_dataset(self) -> bool:
        """Load the dataset's state, if needed; return whether this call loaded it."""
        loads, dataset = self._loads, self._dataset
        if not self.is_own and is_stateful(dataset):
            loads.save_first(dataset)
        is_loaded = "is_first" in self._resume
        if self._is_next and loads.is_early:
            is_loaded, loads.is_early = True, False
        if "dataset" not in self._resume or is_loaded:
            return False
        load = dataset.load_position if self.is_own else partial(loads.load, dataset)
        load(usable(self._resume["dataset"]))
        return True

    def load_iterator(self, iterator: Any) -> None:
        """Load the iterator's state, if any; find the objects that have states."""
        if self.is_own and isinstance(iterator, BlockIterator):
            # The dataset loads its state, and the next iterator starts there.
            self._stateful = {"dataset": iterator}
            if self.read:
                # The state may be from another number of ranks, with another count.
                self.read = self._read_at_state = iterator.at
        else:
            parts = {"iterator": iterator}
            if self._dataset is not iterator:
                parts["dataset"] = self._dataset
            self._stateful = {k: v for k, v in parts.items() if is_stateful(v)}
        if "iterator" in self._resume:
            iterator.load_state_dict(usable(self._resume["iterator"]))

    def is_stateful(self) -> bool:
        """Tell whether the dataset or its iterator has a state."""
        return bool(self._stateful)

    def must_reopen(self, *, is_empty: bool) -> bool:
        """Tell, by the first sample, whether the epoch started from a wrong state."""
        if self._resumes:
            self._loads.note_resumed(self._dataset)
            return False
        self._resume = self._loads.correction(self._dataset, is_empty=is_empty)
        return bool(self._resume)

    def advance(self, count: int, position: StreamState) -> StreamState:
        """Count ``count`` more samples as read; return the state at ``position``."""
        self.read += count
        self._latest, self._read_at_state = {"dataset": position}, self.read
        return {"read": self.read, "skip": 0, "dataset": position}

    def state(self, *, has_ended: bool) -> StreamState:
        """Return the state after the latest batch.

        The state records that the stream ``has_ended``, because some datasets restart
        after their end and must not be read again in this epoch.
        """
        latest: StreamState = {}
        for name, part in self._stateful.items():
            if self.is_own:
                latest[name] = part.position()
                continue
            latest[name] = saved_state(part)
            if name == "iterator" and part is self._dataset:
                latest["is_dataset"] = True
        if latest:
            self._latest, self._read_at_state = latest, self.read
        skip = self.read - self._read_at_state
        state = {"read": self.read, "skip": skip, **self._latest}
        if has_ended and not self.is_own:  # our streams record it in their state
            state["ended"] = True
        return state


def has_state(position: StreamState) -> bool:
    """Tell whether a position includes a state of the dataset or its iterator."""
    return any(name in position for name in STATES)
