"""What the generators are seeded with for a batch, by its place in the epoch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from aioloader._order.ranks import Part

# Batch number and place of its first sample to the keys of a ``BatchTask``.
Keys: TypeAlias = Callable[[int, int], tuple[int, tuple[int, int, int] | None]]


@dataclass(frozen=True)
class BatchSeeds:
    """The seeds of the batches of one reader of a stream.

    Attributes:
        keys: Of the maker.
        part: Which rank's.
        reader: Number of the reader.
        readers: How many take turns.
    """

    keys: Keys
    part: Part
    reader: int = 0
    readers: int = 1

    def __call__(
        self, number: int, whole: int
    ) -> tuple[int, tuple[int, int, int] | None]:
        """Return ``key`` and ``sample_keys`` of one of the reader's batches.

        Args:
            number: Its place among the reader's.
            whole: Samples of a batch of all ranks.
        """
        number = number * self.readers + self.reader
        return self.keys(number, number * whole + self.part.rank)
