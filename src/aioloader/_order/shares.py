"""One global order, divided among readers and, independently, among ranks.

In the order, ``readers`` take strict turns: position ``p`` is sample ``p // readers``
of reader ``p % readers``, or a hole if that has ended by then. Rank ``r`` of ``ranks``
takes the positions ``r``, ``r + ranks``, ``r + 2 * ranks``... So the order depends on
the readers alone, not on the ranks. Pure arithmetic; reads nothing.
"""

from dataclasses import dataclass
from math import gcd, lcm


@dataclass(frozen=True)
class Share:
    """Which part of a stream one reader reads.

    Attributes:
        reader: Number of this reader.
        readers: Number of readers.
        hosted: How many of them this rank reads; they share its memory.
        in_turns: Whether it must yield the same samples in the same order whenever and
            wherever it is read, because ranks or readers take turns.
        ranks: Number of ranks (times workers).
    """

    reader: int = 0
    readers: int = 1
    hosted: int = 1
    in_turns: bool = False
    ranks: int = 1


def evened(count: int, ranks: int, tail: str) -> int:
    """Return how many samples an epoch of ``count`` has, split between ranks.

    Args:
        count: The samples asked for.
        ranks: Number of ranks (times workers).
        tail: What happens to a remainder, as in ``Part``.
    """
    if tail == "drop":
        return count - count % ranks
    return count if tail == "uneven" else count + -count % ranks


@dataclass(frozen=True)
class Deal:
    """Which positions of the order one rank takes.

    Attributes:
        rank: Its number, among all ranks' workers.
        ranks: Number of ranks (times workers).
        readers: Number of readers in the order.
    """

    rank: int
    ranks: int
    readers: int

    @property
    def is_alone(self) -> bool:
        """Whether the rank takes all of one reader and nothing else."""
        return self.ranks == self.readers

    @property
    def stride(self) -> int:
        """How many ranks take turns at each reader; 1: no reader is read twice."""
        return self.ranks // gcd(self.ranks, self.readers)

    def hosted(self) -> list[int]:
        """Return the readers of this rank, in the order of their turns."""
        count = self.readers // gcd(self.ranks, self.readers)
        return [(self.rank + at * self.ranks) % self.readers for at in range(count)]

    def wanted(self, at: int) -> list[int]:
        """Return the next sample to take from each reader in ``hosted``.

        Args:
            at: How many positions this rank has taken.
        """
        count = self.readers // gcd(self.ranks, self.readers)
        nexts = [at + (place - at) % count for place in range(count)]
        return [(self.rank + one * self.ranks) // self.readers for one in nexts]

    def share(self, reader: int) -> Share:
        """Return the share of one of the readers in ``hosted``."""
        hosted = self.readers // gcd(self.ranks, self.readers)
        return Share(reader, self.readers, hosted, not self.is_alone, self.ranks)

    def part(self, total: int) -> int:
        """Return how many of the first ``total`` positions are this rank's."""
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
