"""The next epoch of persistent workers, started while this one's last batches are used.

It is a guess: the next epoch comes, and before that the generator of its order is not
used, no other epoch is chosen and no argument replaced. What is drawn for the guess is
put back; if the guess was right, it is drawn for good.
"""

import weakref
from collections.abc import Callable

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _InfiniteConstantSampler

from aioloader._loader.options import Options
from aioloader._order.epoch import Epoch, EpochNumbers
from aioloader._order.permutation import ShuffledIndices
from aioloader._pipeline.pipeline_iterator import PipelineIterator

# Above this, drawing a permutation would hold up the consumer for milliseconds.
_MOST_INDICES = 1 << 18


def can_look_ahead(options: Options) -> bool:
    """Tell whether the order of the next epoch can be drawn now, and put back.

    So it is with torch's own samplers and ours; a user's may depend on anything.
    """
    sampler, batch_type = options.index_sampler, type(options.batch_sampler)
    if not options.has_copies or batch_type not in {BatchSampler, type(None)}:
        return False
    if type(sampler) is RandomSampler:
        return sampler.num_samples <= _MOST_INDICES
    return type(sampler) in {
        SequentialSampler,
        ShuffledIndices,
        _InfiniteConstantSampler,
    }


class Ahead:
    """An epoch that was not asked for yet.

    Args:
        options: What it is made with.
        numbers: Which epoch it is; left as it was.
        make: Makes it; it may draw from the generator.
    """

    def __init__(
        self,
        options: Options,
        numbers: EpochNumbers,
        make: Callable[[], tuple[Epoch, PipelineIterator]],
    ) -> None:
        generator = getattr(options.index_sampler, "generator", None)
        self._generator = torch.default_generator if generator is None else generator
        self._options = options
        self._numbers = numbers
        self._before = numbers.state(), self._drawn()
        self.epoch, self.source = make()
        # It has no iterator yet: it ends when this object is dropped.
        self._finalizer = weakref.finalize(self, self.source.pipeline.dismiss)
        self._issue(self._before[1])

    def issue(self) -> None:
        """Issue one request more: one of the epoch before has been taken.

        The last batch may draw: that, too, is for this epoch alone.
        """
        now = self._drawn()
        self._generator.set_state(self._after)
        self._issue(now)

    def _issue(self, now: torch.Tensor) -> None:
        self.source.issue()
        self._after = self._drawn()
        self._generator.set_state(now)

    def claim(self, options: Options) -> bool:
        """Tell whether the epoch is what was guessed; else end it.

        What was drawn for it is drawn for good by then.
        """
        state, drawn = self._before
        is_right = (
            options is self._options
            and state == self._numbers.state()
            and torch.equal(drawn, self._drawn())
        )
        if not is_right:
            self.dismiss()
            return False
        self._generator.set_state(self._after)
        self._finalizer.detach()
        self._numbers.reserve(self.epoch)
        return True

    def dismiss(self) -> None:
        """End the epoch: the guess was wrong."""
        self._finalizer()

    def _drawn(self) -> torch.Tensor:
        return self._generator.get_state()
