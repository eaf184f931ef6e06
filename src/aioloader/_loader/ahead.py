"""The next epoch of persistent workers, begun while this one's last batches are used.

It is a guess: that the next epoch comes, and that nobody draws from the generator that
orders it, or chooses another epoch, before it does. What is drawn for the guess is put
back; if the guess was right, it is drawn for good, and else forgotten.
"""

import weakref
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _InfiniteConstantSampler

from aioloader._order.epochs import Epochs
from aioloader._order.permutation import ShuffledIndices

# Above this, drawing a permutation would hold up the consumer for milliseconds.
_MOST_INDICES = 1 << 18


def is_foreseeable(sampler: Any, batch_sampler: Any) -> bool:
    """Tell whether the order of the next epoch can be drawn now, and put back.

    So it is with torch's own samplers and ours; a user's may depend on anything.
    """
    if type(batch_sampler) not in {BatchSampler, type(None)}:
        return False
    if type(sampler) is RandomSampler:
        return sampler.num_samples <= _MOST_INDICES
    return type(sampler) in {
        SequentialSampler,
        ShuffledIndices,
        _InfiniteConstantSampler,
    }


def generator_of(sampler: Any) -> torch.Generator:
    """Return what ``sampler`` draws from."""
    generator = getattr(sampler, "generator", None)
    return torch.default_generator if generator is None else generator


class Prepared(Protocol):
    """An epoch that is made, and not begun: its source gives its batches."""

    source: Any


P = TypeVar("P", bound=Prepared)


class Ahead(Generic[P]):
    """An epoch that nobody has asked for yet.

    Args:
        sampler: What orders it.
        epochs: Which epoch it is; left as it was.
        make: Makes it, given its number; it may draw from the generator.
    """

    def __init__(self, sampler: Any, epochs: Epochs, make: Callable[[int], P]) -> None:
        self._epochs = epochs
        self._generator = generator_of(sampler)
        self._before = epochs.state(), self._drawn()
        self.prepared = make(epochs.begin())
        # Nobody iterates over it: whoever drops this ends it.
        self._finalizer = weakref.finalize(self, self.prepared.source.pipeline.dismiss)
        self.prepared.source.issue()
        self._after = self._generator.get_state()
        self._generator.set_state(self._before[1])
        epochs.restore(self._before[0])

    def issue(self) -> None:
        """Issue one request more: one of the epoch before has been taken.

        The last batch may draw: that, too, is for this epoch alone.
        """
        now = self._drawn()
        self._generator.set_state(self._after)
        self.prepared.source.issue()
        self._after = self._drawn()
        self._generator.set_state(now)

    def claim(self) -> bool:
        """Tell whether the epoch is what was guessed; else end it.

        What was drawn for it is drawn for good by then, and the epoch is begun.
        """
        state, drawn = self._before
        is_right = state == self._epochs.state() and torch.equal(drawn, self._drawn())
        if not is_right:
            self.dismiss()
            return False
        self._generator.set_state(self._after)
        self._epochs.begin()
        self._finalizer.detach()
        return True

    def dismiss(self) -> None:
        """Forget it."""
        self._finalizer()

    def _drawn(self) -> torch.Tensor:
        return self._generator.get_state()
