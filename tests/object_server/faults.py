"""Which requests a server answers with a fault, drawn by seed and request number."""

import random
from dataclasses import dataclass
from typing import NamedTuple

_KINDS = ("errors", "resets", "truncated", "lying", "hangs")


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
        seed: Seed of the draws.
    """

    errors: float = 0.0
    resets: float = 0.0
    truncated: float = 0.0
    lying: float = 0.0
    hangs: float = 0.0
    seed: int = 0

    def draw(self, number: int) -> Fault | None:
        """Return the fault of request ``number``, or None."""
        chance = random.Random((self.seed << 64) + number)
        left = chance.random()
        for kind in _KINDS:
            left -= getattr(self, kind)
            if left < 0:
                return Fault(kind, chance.random())
        return None
