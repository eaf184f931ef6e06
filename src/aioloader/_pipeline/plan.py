"""What one iteration is to deliver: requests, and how far its consumer is."""

from collections.abc import Iterator
from dataclasses import dataclass

from aioloader._order.indices import IndexBatch
from aioloader._order.progress import Bookmark, Progress
from aioloader._pipeline.turns import Turns


@dataclass(frozen=True, eq=False)
class Plan:
    """The batches of an epoch that are left.

    Attributes:
        batches: Their requests, drawn as they are pulled.
        progress: What was delivered; kept by whoever delivers.
        bookmark: Where this iteration began.
        is_stream: Whether what was delivered beyond the bookmark has to be made again,
            to get behind it.
        turns: What chooses the requests, if they do not ascend.
    """

    batches: Iterator[IndexBatch]
    progress: Progress
    bookmark: Bookmark
    is_stream: bool = False
    turns: Turns | None = None

    def begins_quickly(self) -> bool:
        """Tell whether the first request is drawn in a fraction of a millisecond."""
        return True

    def requests(self) -> Iterator[IndexBatch]:
        """Yield the requests, but for those that need not be made again."""
        beyond = frozenset() if self.is_stream else self.bookmark.beyond
        for batch in self.batches:
            if batch.number in beyond:
                self.progress.pass_over(batch.number, batch.state)
            else:
                yield batch

    def dropped(self) -> frozenset[int]:
        """Return the batches that are made, and not delivered again."""
        return self.bookmark.beyond if self.is_stream else frozenset()
