"""Which samples are one rank's, so that the ranks' parts make up the global order.

Samples go to ranks in turns: rank r of R has the places p of the global order with
p mod R == r, as with torch's ``DistributedSampler``. Global batch k is then the
same set of samples on any number of ranks. Pure and synchronous.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Tail: TypeAlias = Literal["wrap", "pad", "drop", "uneven"]


@dataclass(frozen=True)
class Part:
    """One rank's part of each global batch.

    Attributes:
        rank: Number of this rank.
        world_size: How many ranks there are.
        tail: What becomes of a last global batch that cannot be shared out evenly:
            ``"wrap"``: it is filled up from the beginning of the order, as with torch's
            ``DistributedSampler``; ``"pad"``: so it is, and a mask shows where;
            ``"drop"``: what is left over is dropped; ``"uneven"``: ranks differ.
    """

    rank: int = 0
    world_size: int = 1
    tail: Tail = "wrap"

    def share(self, found: int) -> tuple[int, int]:
        """Return how many of a global batch's samples are ours, and how many are added.

        At most one is added: then all ranks have the same number.

        Args:
            found: How many samples the global batch has.
        """
        mine = max(0, -(-(found - self.rank) // self.world_size))
        least, left_over = divmod(found, self.world_size)
        if not left_over or self.tail == "uneven":
            return mine, 0
        if self.tail == "drop":
            return least, 0
        return mine, least + 1 - mine

    def batches(self, n: int, size: int, *, drop_last: bool) -> int:
        """Return how many batches of ``size`` samples we get of ``n`` in all."""
        whole, left_over = divmod(n, size * self.world_size)
        if drop_last or not left_over:
            return whole
        return whole + any(self.share(left_over))

    def places(self, first: int, stop: int) -> range:
        """Return our places among those from ``first``, where a global batch begins."""
        return range(first + self.rank, stop, self.world_size)

    def masks(self) -> bool:
        """Tell whether batches come with a mask."""
        return self.tail == "pad"


WHOLE = Part()
