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
        self._held = dict.fromkeys(range(readers), 0)  # by those that have not ended

    def __iter__(self) -> Iterator[int]:
        """Yield the next number, for the reader with the fewest requests."""
        while self._held:
            reader = min(self._held, key=lambda one: (self._held[one], self._next[one]))
            number = self._next[reader]
            self._next[reader] += len(self._next)
            self._held[reader] += 1
            yield number

    def may_issue(self, window: int) -> bool:
        """Tell whether a reader has less than its share of the window, or all ended."""
        share = max(1, window // max(1, len(self._held)))
        return min(self._held.values(), default=0) < share

    def take(self, number: int, *, has_ended: bool) -> None:
        """Note that a request was answered, and whether its reader has ended."""
        reader = number % len(self._next)
        if has_ended:
            self._held.pop(reader, None)
        elif reader in self._held:
            self._held[reader] -= 1
