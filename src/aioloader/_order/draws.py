"""What the random draws of an order began with, to draw again.

Torch's samplers draw from a generator of the user's, or else from a seed that they draw
from the default one.
"""

from typing import Any, TypeAlias

import torch
from torch.utils.data import RandomSampler

from aioloader._order.generators import packed, unpacked

State: TypeAlias = dict[str, Any]


class Draws:
    """The draws of one order.

    Args:
        sampler: One of torch's that has a ``generator``, perhaps None.
        saved: What ``state`` of another process returned; or empty.
    """

    def __init__(self, sampler: Any, saved: State) -> None:
        self._own: torch.Generator | None = sampler.generator
        self._draws_seed = self._own is None and isinstance(sampler, RandomSampler)
        self._seed: int | None = saved.get("seed")
        self._before: torch.Tensor | None = None
        self._packed: State | None = saved.get("generator")

    def begin(self) -> torch.Generator:
        """Return what to draw from, as it was when the order was first drawn.

        Draws from a user's generator move that one, as they would have.
        """
        if self._draws_seed:
            if self._seed is None:
                drawn = torch.empty((), dtype=torch.int64).random_()
                self._seed = int(drawn.item())
            return torch.Generator().manual_seed(self._seed)
        generator = self._own
        if self._packed is not None:
            generator = torch.Generator() if generator is None else generator
            generator.set_state(unpacked(self._packed))
        elif generator is None:
            generator = torch.default_generator
        self._before = generator.get_state()
        return generator

    def state(self) -> State:
        """Return what ``begin`` began with, ready for JSON; empty before."""
        if self._seed is not None:
            return {"seed": self._seed}
        if self._packed is None and self._before is not None:
            self._packed = packed(self._before)
        return {} if self._packed is None else {"generator": self._packed}
