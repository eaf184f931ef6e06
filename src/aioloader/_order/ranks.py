"""Split the global order between ranks.

Samples go to ranks in turn: rank r of R has the positions p of the global order with
p mod R == r, as with torch's ``DistributedSampler``. Global batch k is then the same
set of samples on any number of ranks. Pure and synchronous.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Tail: TypeAlias = Literal["wrap", "pad", "drop", "uneven"]


@dataclass(frozen=True)
class Part:
    """One rank's part of each global batch.

    Attributes:
        rank: Number of this rank.
        world_size: Number of ranks.
        tail: What happens to a last global batch that cannot be split evenly:
            ``"wrap"``: it is filled from the beginning of the order, as with torch's
            ``DistributedSampler``; ``"pad"``: the same, and a mask shows the padding;
            ``"drop"``: the remainder is dropped; ``"uneven"``: ranks differ.
    """

    rank: int = 0
    world_size: int = 1
    tail: Tail = "wrap"

    def share(self, found: int) -> tuple[int, int]:
        """Return how many samples of a global batch are ours, and how many are added.

        At most one is added, so that all ranks have the same number.

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
        """Return how many batches of ``size`` samples we get out of ``n`` in total."""
        whole, left_over = divmod(n, size * self.world_size)
        if drop_last or not left_over:
            return whole
        return whole + any(self.share(left_over))

    def places(self, first: int, stop: int) -> range:
        """Return our positions from ``first``, the start of a global batch."""
        return range(first + self.rank, stop, self.world_size)

    def masks(self) -> bool:
        """Tell whether batches come with a mask."""
        return self.tail == "pad"


WHOLE = Part()
