"""Which requests a server answers with a fault, drawn by seed and request number."""

import random
from dataclasses import dataclass
from typing import NamedTuple

_KINDS = ("errors", "resets", "truncated", "lying", "hangs", "slow")


class Fault(NamedTuple):
    """The fault of one request: a field of ``Faults``, and where, from 0 to 1."""

    kind: str
    where: float


@dataclass(frozen=True)
class Faults:
    """The share of requests, from 0 to 1, for each fault.

    Request number n, counted over the server's life, has the same fault for the same
    seed, so a retry, which has another number, succeeds.

    Attributes:
        errors: Answered with status 500 or 503.
        resets: Connection reset, before the answer or within the body.
        truncated: Body cut short, and the connection closed.
        lying: Body cut short, with a Content-Length to match: only a client that knows
            the size can detect it.
        hangs: Not answered until the client gives up, or the server stops.
        slow: Body sent at ``slow_bytes_per_second``.
        seed: Seed of the draws.
        retry_after: Seconds for the Retry-After of a 503, if any.
        slow_bytes_per_second: Speed of a slow body.
    """

    errors: float = 0.0
    resets: float = 0.0
    truncated: float = 0.0
    lying: float = 0.0
    hangs: float = 0.0
    slow: float = 0.0
    seed: int = 0
    retry_after: int | None = None
    slow_bytes_per_second: float = 100_000.0

    def __post_init__(self) -> None:
        shares = self._shares()
        if min(shares) < 0 or sum(shares) > 1 + 1e-9:
            raise ValueError(
                f"shares must be at least 0, and their sum at most 1, got {self}"
            )

    def draw(self, number: int) -> Fault | None:
        """Return the fault of request ``number``, or None."""
        shares = self._shares()
        if not any(shares):
            return None
        chance = random.Random((self.seed << 64) + number)
        left = chance.random()
        for kind, share in zip(_KINDS, shares, strict=True):
            left -= share
            if left < 0:
                return Fault(kind, chance.random())
        return None

    def _shares(self) -> list[float]:
        return [getattr(self, kind) for kind in _KINDS]
