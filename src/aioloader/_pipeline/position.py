"""The position of a stream: its own state, or how many samples were read from it.

The state follows torchdata's protocol: ``state_dict`` and ``load_state_dict`` of the
iterator, of the dataset, or of both. A stream without it is read again from its
beginning, and the delivered samples are dropped.
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
    """What a dataset does with a loaded state; one per dataset and process.

    It may start every later epoch from it too, as Hugging Face's do. Then the state
    after the first sample is the same again, or there is no sample although the dataset
    was not in that state: its first state is loaded, and the epoch is whole.
    """

    _first: tuple[Any] | None = None  # before anything was read or loaded
    _loaded: Any = None
    _is_beside = False  # its own state remained another one
    _begun: Any = None  # after the first sample of the resumed epoch
    is_pending = False  # an epoch may start from it by mistake
    is_early = False  # it was loaded before its epoch is opened
    # Torch's, while a dataset resumes: the loader's state has put it where it is, and
    # the dataset's own state may be an earlier one.
    keeps_generator = False

    def begin(self, dataset: Any) -> None:
        if self._first is None:
            self._first = (saved_state(dataset),)

    def load(self, dataset: Any, state: Any) -> None:
        dataset.load_state_dict(state)
        self.is_early = False
        self._loaded, self._begun, self.is_pending = copy.deepcopy(state), None, True
        self._is_beside = not _is_same(dataset.state_dict(), state)

    def load_early(self, dataset: Any, position: StreamState) -> None:
        """Load the state of a dataset between two epochs, before anything is drawn.

        Not one that is as it was before the first read: a dataset that is its own
        iterator may take any state as one from mid-epoch.
        """
        state = position["iterator" if "is_dataset" in position else "dataset"]
        self.begin(dataset)
        if "is_over" in position or not _is_same(dataset.state_dict(), state):
            self.load(dataset, copy.deepcopy(state))
        self.is_early = True

    def resumed(self, dataset: Any) -> None:
        """Note the state after the first sample of an epoch that resumes."""
        self._begun = copy.deepcopy(dataset.state_dict())

    def correction(self, dataset: Any, *, is_empty: bool) -> StreamState:
        """Return what must be loaded for an epoch that does not resume, if anything.

        One sample of the dataset was read, unless it ``is_empty``.
        """
        assert self._first is not None
        (first,), now, self.is_pending = self._first, dataset.state_dict(), False
        is_kept = self._begun is not None and _is_same(now, self._begun)
        moves = self._is_beside or not _is_same(now, self._loaded)
        is_again = (is_kept and moves) or (is_empty and self._is_beside)
        return {"dataset": first} if is_again else {}


def _is_same(one: Any, other: Any) -> bool:
    """Compare two states, one of which may come from JSON; unknown: not the same."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        one, other = ({str(k): v for k, v in part.items()} for part in (one, other))
        return one.keys() == other.keys() and all(
            _is_same(part, other[name]) for name, part in one.items()
        )
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    try:
        found = one == other
        return bool(found.all() if hasattr(found, "all") else found)
    except Exception:  # the user's
        return False


class StreamPosition:
    """The position of one stream that is being read.

    Args:
        resume: Where to start; None: at the beginning.

    Attributes:
        read: Samples read so far, by all ranks that read the same stream.
        to_skip: Samples that must be read and dropped first.
        again: Where samples are repeated, if they were.
        has_ended: Whether the stream had ended where it is resumed.
        is_own: Whether the dataset is one of aioloader's streams.
        owes: Samples of the epoch before, if this one resumes at its start.
    """

    def __init__(
        self, dataset: Any, resume: StreamState | None, loads: StateLoads
    ) -> None:
        self._dataset = dataset
        self.is_own = isinstance(dataset, OwnStream)
        self._loads = loads
        resume = resume or {}
        is_next = self._is_next = "is_over" in resume
        self._resumes = bool(resume) and not is_next
        self.owes: int = resume.get("read", 0) if is_next else 0
        if resume.get("is_over"):
            # Only a state that outlives an epoch applies to the next one.
            name = "iterator" if "is_dataset" in resume else "dataset"
            resume = {"dataset": resume[name]} if name in resume else {}
        self._resume = resume
        self.read: int = resume.get("read", 0)
        self.has_ended = bool(resume.get("ended"))
        self.again: StreamState | None = resume.get("again")
        self.to_skip: int = 0 if self.has_ended else resume.get("skip", 0)
        # The objects with a state, by "dataset" and "iterator"; known once it is open.
        self._stateful: dict[str, Any] = {}
        # Their latest states, and how many samples were read then.
        self._latest = {k: resume[k] for k in (*STATES, "is_dataset") if k in resume}
        self._at = self.read - self.to_skip

    def load_dataset(self) -> bool:
        """Load the dataset's state before it is iterated; return whether it did."""
        loads, dataset = self._loads, self._dataset
        if not self.is_own and is_stateful(dataset):
            loads.begin(dataset)
        is_loaded = "is_first" in self._resume
        if self._is_next and loads.is_early:
            is_loaded, loads.is_early = True, False
        if "dataset" not in self._resume or is_loaded:
            return False
        load = dataset.load_position if self.is_own else partial(loads.load, dataset)
        load(usable(self._resume["dataset"]))
        return True

    def load_iterator(self, iterator: Any) -> None:
        """Load the iterator's state; note which objects have one."""
        if self.is_own and isinstance(iterator, BlockIterator):
            # The dataset loads its state, and the next iterator starts there.
            self._stateful = {"dataset": iterator}
            if self.read:
                # The state may be of another number of ranks, each of which read more.
                self.read = self._at = iterator.at
        else:
            parts = {"iterator": iterator}
            if self._dataset is not iterator:
                parts["dataset"] = self._dataset
            self._stateful = {k: v for k, v in parts.items() if is_stateful(v)}
        if "iterator" in self._resume:
            iterator.load_state_dict(usable(self._resume["iterator"]))

    def has_parts(self) -> bool:
        """Tell whether the dataset or its iterator has a state."""
        return bool(self._stateful)

    def starts_again(self, *, is_empty: bool) -> bool:
        """Tell whether the dataset must be opened again, from the right state.

        One sample was read, unless it ``is_empty``: the dataset may have started from a
        state that was loaded for another epoch.
        """
        if self._resumes:
            self._loads.resumed(self._dataset)
            return False
        self._resume = self._loads.correction(self._dataset, is_empty=is_empty)
        return bool(self._resume)

    def move(self, count: int, position: StreamState) -> StreamState:
        """Return where one of our streams is after so many samples more."""
        self.read += count
        self._latest, self._at = {"dataset": position}, self.read
        return {"read": self.read, "skip": 0, "dataset": position}

    def state(self, *, has_ended: bool) -> StreamState:
        """Return where the stream is after the latest batch.

        A dataset that restarts after its end, as generators do, must not be read again
        in the same epoch: the state says that the stream ``has_ended``.
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
            self._latest, self._at = latest, self.read
        state = {"read": self.read, "skip": self.read - self._at, **self._latest}
        if has_ended and not self.is_own:  # our streams record it in their state
            state["ended"] = True
        return state


def has_state(position: StreamState) -> bool:
    """Tell whether a position holds the stream's own state."""
    return any(name in position for name in STATES)
