"""What a host hosts: iterations, and a lease that keeps it open between them."""

from typing import Protocol

from aioloader._pipeline.waiting import Latch


class Hosted(Protocol):
    """What a host hosts: one iteration."""

    ended: Latch
    exit_error: BaseException | None

    async def main(self) -> None:
        """Run on the host's loop until closed."""

    def end(self) -> None:
        """Let go of what the iteration holds; in the host's own thread."""

    def fail(self, error: BaseException) -> None:
        """Learn that the host cannot host."""

    def join(self) -> bool:
        """Wait, bounded, for what goes on elsewhere; tell whether it has ended."""


class Keeper:
    """A hosted that only holds a lease: a loader inside of its ``with`` block."""

    def __init__(self) -> None:
        self.ended = Latch()
        self.exit_error: BaseException | None = None

    async def main(self) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Hold nothing."""

    def fail(self, error: BaseException) -> None:
        """Leave it to those who iterate."""

    def join(self) -> bool:
        """Wait for nothing."""
        return True
