"""Split an order between ranks. Pure arithmetic: it reads nothing.

Samples go to ranks in turn: rank r of R has the positions p of the global order with
p mod R == r, as with torch's ``DistributedSampler``. Global batch k is then the same
set of samples on any number of ranks. A stream's order is that of readers in strict
turns: position ``p`` is sample ``p // readers`` of reader ``p % readers``, or a hole if
that has ended by then. So the order depends on the readers alone, not on the ranks.
"""

from dataclasses import dataclass
from math import gcd, lcm
from typing import Literal, NamedTuple, TypeAlias

Tail: TypeAlias = Literal["wrap", "pad", "drop", "uneven"]


class RankPart(NamedTuple):
    """One rank's part of each global batch."""

    rank: int = 0
    world_size: int = 1
    # What happens to a last global batch that cannot be split evenly: it is filled from
    # the beginning of the order, as with torch's ``DistributedSampler``; the same, and
    # a mask shows the padding; the remainder is dropped; ranks differ.
    tail: Tail = "wrap"
    has_peers: bool = False  # other processes may deliver the same part

    def share(self, found: int) -> tuple[int, int]:
        """Return how many of ``found`` samples are ours, and how many are added.

        At most one is added to our part of a global batch, so that all ranks have the
        same number.
        """
        mine = max(0, -(-(found - self.rank) // self.world_size))
        least, left_over = divmod(found, self.world_size)
        if not left_over or self.tail == "uneven":
            return mine, 0
        if self.tail == "drop":
            return least, 0
        return mine, least + 1 - mine

    def batches(self, n: int, size: int, *, drop_last: bool) -> int:
        """Return how many batches of ``size`` samples we get out of ``n`` in total."""
        whole, left_over = divmod(n, size * self.world_size)
        if drop_last or not left_over:
            return whole
        return whole + any(self.share(left_over))

    def places(self, first: int, stop: int) -> range:
        """Return our positions from ``first``, the start of a global batch."""
        return range(first + self.rank, stop, self.world_size)


WHOLE = RankPart()


def evened(count: int, ranks: int, tail: str) -> int:
    """Return how many samples an epoch of ``count`` has, split between ranks."""
    if tail == "drop":
        return count - count % ranks
    return count if tail == "uneven" else count + -count % ranks


@dataclass(eq=False, repr=False)
class ReaderShare:
    """Which part of a stream one reader reads."""

    reader: int = 0
    readers: int = 1
    hosted: int = 1  # how many of them this rank reads; they share its memory
    # It must yield the same samples in the same order whenever and wherever it is read,
    # because ranks or readers take turns.
    in_turns: bool = False
    ranks: int = 1  # (times workers)

    def parts(self, total: int, tail: Tail) -> tuple[int, int]:
        """Return how many samples the reader has, and how many are not padding.

        An epoch has ``total`` samples, and ranks have equal parts, as ``tail`` says.
        """
        count = evened(total, self.ranks, tail)
        real = min(count, total) if tail == "pad" else count
        deal = ReaderAssignment(self.reader, self.readers, self.readers)
        return deal.part(count), deal.part(real)


@dataclass(eq=False, repr=False)
class ReaderAssignment:
    """Which positions of a stream's order one rank takes: every ``ranks``-th."""

    rank: int  # among all ranks' workers
    ranks: int  # (times workers)
    readers: int  # in the order

    @property
    def is_alone(self) -> bool:
        """Whether the rank takes all of one reader and nothing else."""
        return self.ranks == self.readers

    @property
    def stride(self) -> int:
        """How many ranks take turns at each reader; 1: no reader is read twice."""
        return self.ranks // gcd(self.ranks, self.readers)

    @property
    def _count(self) -> int:
        return self.readers // gcd(self.ranks, self.readers)

    def hosted(self) -> list[int]:
        """Return the readers of this rank, in the order of their turns."""
        turns = range(self._count)
        return [(self.rank + at * self.ranks) % self.readers for at in turns]

    def wanted(self, at: int) -> list[int]:
        """Return the next sample to take from each, after ``at`` positions of ours."""
        nexts = [at + (place - at) % self._count for place in range(self._count)]
        return [(self.rank + one * self.ranks) // self.readers for one in nexts]

    def share(self, reader: int) -> ReaderShare:
        in_turns = not self.is_alone
        return ReaderShare(reader, self.readers, self._count, in_turns, self.ranks)

    def part(self, total: int) -> int:
        return max(0, -(-(total - self.rank) // self.ranks))

    def cost(self) -> str | None:
        """Return a text on the cost if readers are read more than once, or None."""
        if self.stride == 1:
            return None
        return (
            f"{self.ranks} ranks (times workers) take turns at {self.readers} readers, "
            f"so that everything is read and made {self.stride} times; "
            f"with readers({lcm(self.ranks, self.readers)}), or another multiple of "
            f"{self.ranks}, nothing would be read twice"
        )
