"""The parts of a sampler's order and of a stream's readers that each rank gets.

Rank r of R has the positions p of the global order with ``p % R == r``, as in torch's
``DistributedSampler``, so global batch k has the same samples on any number of ranks.
Position p of a stream is sample ``p // readers`` of reader ``p % readers``, or empty if
that reader has ended: the order depends on the number of readers, not that of ranks.
"""

from dataclasses import dataclass
from math import gcd, lcm
from typing import Literal, NamedTuple, TypeAlias

Tail: TypeAlias = Literal["wrap", "pad", "drop", "uneven"]


class RankPart(NamedTuple):
    """One rank's part of each global batch."""

    rank: int = 0
    world_size: int = 1
    # How a last global batch that cannot be split evenly is handled: filled from the
    # beginning of the order, as in torch's ``DistributedSampler`` ("wrap"); the same
    # with a mask ("pad"); cut ("drop"); or split unevenly ("uneven").
    tail: Tail = "wrap"
    has_peers: bool = False  # other processes may deliver the same part

    def share(self, count: int) -> tuple[int, int]:
        """Return the number of this rank's samples out of ``count``, and of padding."""
        mine = max(0, -(-(count - self.rank) // self.world_size))
        least, left_over = divmod(count, self.world_size)
        if not left_over or self.tail == "uneven":
            return mine, 0
        if self.tail == "drop":
            return least, 0
        return mine, least + 1 - mine

    def batches(self, n: int, size: int, *, drop_last: bool) -> int:
        """Return how many batches of ``size`` this rank gets out of ``n`` samples."""
        whole, left_over = divmod(n, size * self.world_size)
        if drop_last or not left_over:
            return whole
        return whole + any(self.share(left_over))

    def positions(self, first: int, stop: int) -> range:
        """Return this rank's positions in a global batch, ``range(first, stop)``."""
        return range(first + self.rank, stop, self.world_size)


WHOLE = RankPart()


def evened(count: int, ranks: int, tail: str) -> int:
    """Return ``count``, made a multiple of ``ranks`` unless ``tail`` is "uneven"."""
    if tail == "drop":
        return count - count % ranks
    return count if tail == "uneven" else count + -count % ranks


@dataclass(eq=False, repr=False)
class ReaderShare:
    """The part of a stream that one reader reads."""

    reader: int = 0
    readers: int = 1
    per_rank: int = 1  # readers on this rank, which share its memory
    # Ranks or readers alternate, so each reading must yield the same samples in order.
    in_turns: bool = False
    ranks: int = 1  # the number of ranks, times workers if those read

    def parts(self, total: int, tail: Tail) -> tuple[int, int]:
        """Return this reader's sample count out of ``total``, with and without padding.

        ``tail`` says how ranks get equal parts; the counts differ only for ``"pad"``.
        """
        count = evened(total, self.ranks, tail)
        real = min(count, total) if tail == "pad" else count
        assignment = ReaderAssignment(self.reader, self.readers, self.readers)
        return assignment.part(count), assignment.part(real)


@dataclass(eq=False, repr=False)
class ReaderAssignment:
    """The positions of a stream that one rank takes, and the readers of these."""

    rank: int  # among all workers of all ranks
    ranks: int  # the number of ranks, times workers if those read
    readers: int  # of the stream

    @property
    def is_alone(self) -> bool:
        """Whether the rank takes all samples of one reader, and no others."""
        return self.ranks == self.readers

    @property
    def stride(self) -> int:
        """How many ranks share each reader, and take its samples in turn."""
        return self.ranks // gcd(self.ranks, self.readers)

    @property
    def _count(self) -> int:
        return self.readers // gcd(self.ranks, self.readers)

    def assigned(self) -> list[int]:
        """Return the readers of this rank, in the order of their turns."""
        turns = range(self._count)
        return [(self.rank + turn * self.ranks) % self.readers for turn in turns]

    def upcoming(self, taken: int) -> list[int]:
        """Return each assigned reader's next sample number, after ``taken`` samples."""
        turns = [taken + (turn - taken) % self._count for turn in range(self._count)]
        return [(self.rank + turn * self.ranks) // self.readers for turn in turns]

    def share(self, reader: int) -> ReaderShare:
        in_turns = not self.is_alone
        return ReaderShare(reader, self.readers, self._count, in_turns, self.ranks)

    def part(self, total: int) -> int:
        """Return how many of ``total`` positions this rank takes."""
        return max(0, -(-(total - self.rank) // self.ranks))

    def cost(self) -> str | None:
        """Return a warning's text if each reader is read more than once, or None."""
        if self.stride == 1:
            return None
        return (
            f"{self.ranks} ranks (times workers) take turns at {self.readers} readers, "
            f"so that everything is read and made {self.stride} times; "
            f"with readers({lcm(self.ranks, self.readers)}), or another multiple of "
            f"{self.ranks}, nothing would be read twice"
        )
