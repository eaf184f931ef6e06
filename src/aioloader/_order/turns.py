"""Choose the next reader if each worker reads a stream and batches come unordered.

Batch k is for reader k modulo their number. With ``in_order=False`` a reader gets a
request when one of its requests was answered: a slow one does not delay the others.
Source: ``_try_put_index`` of torch 2.9's ``_MultiProcessingDataLoaderIter``.
"""

from collections.abc import Iterator


class Turns:
    """The numbers of the next requests; they do not ascend. Pure and synchronous.

    Args:
        readers: Number of readers.
        start: Batches below this number were delivered.
    """

    def __init__(self, readers: int, start: int) -> None:
        self._next = [start + (reader - start) % readers for reader in range(readers)]
        self._held = [0] * readers
        self._active = set(range(readers))

    def __iter__(self) -> Iterator[int]:
        """Yield the next number, for the reader with the fewest requests."""
        while self._active:
            reader = min(
                self._active, key=lambda one: (self._held[one], self._next[one])
            )
            number = self._next[reader]
            self._next[reader] += len(self._next)
            self._held[reader] += 1
            yield number

    def may_issue(self, window: int) -> bool:
        """Tell whether some reader has less than its share of the window."""
        if not self._active:
            return False
        share = max(1, window // len(self._active))
        return min(self._held[reader] for reader in self._active) < share

    def take(self, number: int, *, has_ended: bool) -> None:
        """Note that a request was answered, and whether its reader has ended."""
        reader = number % len(self._next)
        self._held[reader] -= 1
        if has_ended:
            self._active.discard(reader)

    def are_over(self) -> bool:
        """Tell whether all readers have ended."""
        return not self._active
