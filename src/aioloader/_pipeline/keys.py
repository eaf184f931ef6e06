"""The keys that generators are seeded with for a batch, by its position."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from aioloader._order.ranks import Part

# Maps a batch's number and the position of its first sample to a ``BatchTask``'s keys.
Keys: TypeAlias = Callable[[int, int], tuple[int, tuple[int, int, int] | None]]


@dataclass(frozen=True)
class BatchSeeds:
    """The seeds of the batches of one reader of a stream.

    Attributes:
        keys: The maker's keys.
        part: The rank's part.
        reader: Number of the reader.
        readers: How many readers take turns.
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
            number: Its position among the reader's batches.
            whole: Samples per batch on all ranks together.
        """
        number = number * self.readers + self.reader
        return self.keys(number, number * whole + self.part.rank)
