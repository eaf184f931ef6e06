"""The common end of an epoch in which ranks have different, unknown numbers of batches.

Each rank counts its batches when they are made, before delivery, and reports the count
to the others. Nothing here communicates: ``EpochEndRounds`` exchanges the counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class RankCounts(NamedTuple):
    """A summary of how many batches each rank has reported."""

    least: int = 0  # the fewest batches of a rank
    most: int = 0  # the most batches of a rank
    going: int | None = 0  # the fewest of a rank that continues; None: all have ended
    cut: int | None = None  # the fewest of a rank that has ended; None: none has
    left: Sequence[int] = ()  # ranks whose consumers stopped early

    @classmethod
    def of(cls, reports: Sequence[tuple[int, bool, bool]]) -> "RankCounts":
        """Summarize the reports of all ranks, given in the order of ranks.

        Each report is the number of batches so far, whether the rank has ended, and
        whether its consumer has left the iteration early.
        """
        going = [count for count, has_ended, _ in reports if not has_ended]
        ended = [count for count, has_ended, _ in reports if has_ended]
        return cls(
            least=min(going + ended),
            most=max(going + ended),
            going=min(going, default=None),
            cut=min(ended, default=None),
            left=[rank for rank, (_, _, has_left) in enumerate(reports) if has_left],
        )


@dataclass
class SharedEnd:
    """What one rank knows of the common end of an epoch."""

    # Ranks that have ended repeat samples until the last rank ends; otherwise all end
    # with the first rank.
    pads: bool
    made: int = 0  # batches that this rank has made
    passed: int = 0  # batches that this rank has delivered, also repeated ones
    has_ended: bool = False  # this rank makes no more batches
    counts: RankCounts = field(default_factory=RankCounts)
    is_agreed: bool = False  # all ranks know the end

    def has_news(self) -> bool:
        """Tell whether this rank should report its count now.

        Exchanging reports takes time, so a report should cover many new batches, and
        start before the batches that all ranks have reported are used up.
        """
        reported = self.counts.going
        if self.has_ended or reported is None:
            return self.has_ended
        return self.made - reported >= max(1, 3 * (reported - self.passed))

    def total(self) -> int | None:
        """Return how many batches every rank delivers, or None if not known yet."""
        counts = self.counts
        if self.pads:
            return counts.most if counts.going is None else None
        return counts.cut if counts.cut == counts.least else None

    def may_pass(self) -> bool:
        """Tell whether this rank may deliver its next batch without waiting."""
        return self.pads or self.passed < self.counts.least

    def needs_others(self) -> bool:
        """Tell whether this rank must wait for the reports of other ranks."""
        if self.is_over():
            return not self.is_agreed
        if self.pads:
            return self.has_ended and not self.lacking()
        return not self.may_pass() and (self.has_ended or self.made > self.passed)

    def is_over(self) -> bool:
        """Tell whether this rank has delivered all batches."""
        return self.passed == self.total()

    def lacking(self) -> int:
        """Return how many batches this rank must repeat to keep up with the others."""
        if not (self.pads and self.has_ended):
            return 0
        return max(0, self.counts.most - self.passed)  # counts may be older
