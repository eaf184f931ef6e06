"""Where an epoch ends if each rank has another, unknown number of batches.

Each rank counts its batches as they are made, ahead of their delivery, and tells the
others. Pure and synchronous: a ``StoreTalk`` of the stream carries the counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class RankCounts(NamedTuple):
    """What is known of all ranks."""

    least: int = 0  # batches of the rank that has told the fewest
    most: int = 0  # of the one that has told the most
    going: int | None = 0  # as ``least``, of ranks that have not ended; None: all have
    cut: int | None = None  # of the rank that ended with the fewest; None: none has
    left: Sequence[int] = ()  # ranks that have left the iteration early

    @classmethod
    def of(cls, told: Sequence[tuple[int, bool, bool]]) -> "RankCounts":
        """Return what follows from what all ranks have told, in order.

        That is: the batches so far, whether the rank has no more, and whether its
        consumer has left the iteration early.
        """
        going = [count for count, has_ended, _ in told if not has_ended]
        ended = [count for count, has_ended, _ in told if has_ended]
        return cls(
            least=min(going + ended),
            most=max(going + ended),
            going=min(going, default=None),
            cut=min(ended, default=None),
            left=[rank for rank, (_, _, has_left) in enumerate(told) if has_left],
        )


@dataclass
class SharedEnd:
    """One rank's side of the end that all ranks share."""

    # Ranks that have ended repeat samples until the last one ends; else all end with
    # the first one.
    pads: bool
    made: int = 0  # batches of this rank
    passed: int = 0  # of them, and repeated ones
    has_ended: bool = False  # this rank has no more of its own
    counts: RankCounts = field(default_factory=RankCounts)
    is_agreed: bool = False  # all ranks know the end

    def has_news(self) -> bool:
        """Tell whether there is more to tell the others.

        That is when few are left of the batches that all ranks have told, compared to
        the new ones: a round takes many, and is over before the few are used up.
        """
        told = self.counts.going
        if self.has_ended or told is None:
            return self.has_ended
        return self.made - told >= max(1, 3 * (told - self.passed))

    def total(self) -> int | None:
        """Return how many batches every rank delivers, if it is known."""
        counts = self.counts
        if self.pads:
            return counts.most if counts.going is None else None
        return counts.cut if counts.cut == counts.least else None

    def may_pass(self) -> bool:
        """Tell whether all ranks have the next batch, or need not."""
        return self.pads or self.passed < self.counts.least

    def needs_others(self) -> bool:
        """Tell whether this rank can do nothing before others have told more."""
        if self.is_over():
            return not self.is_agreed
        if self.pads:
            return self.has_ended and not self.lacking()
        return not self.may_pass() and (self.has_ended or self.made > self.passed)

    def is_over(self) -> bool:
        """Tell whether all batches were passed on."""
        return self.passed == self.total()

    def lacking(self) -> int:
        """Return how many batches other ranks have that this one must repeat."""
        if not (self.pads and self.has_ended):
            return 0
        return max(0, self.counts.most - self.passed)  # others may not have heard yet
