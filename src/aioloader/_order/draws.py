"""What the random draws of an order began with, saved in a few bytes, to draw again.

Torch's samplers draw from a generator of the user's, or else from a seed that they draw
from the default one. The seed is a number. A generator's state is 3.4 KB of text, but
for one that was only just seeded.
"""

import base64
import zlib
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import RandomSampler

State: TypeAlias = dict[str, Any]
# Draws since it was seeded, of a generator that is told by its seed: a base seed's.
_FEW = 2


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


def packed(state: torch.Tensor) -> State:
    """Return the state of a CPU generator, ready for JSON."""
    generator = torch.Generator()
    generator.set_state(state)
    seed = generator.initial_seed()
    generator.manual_seed(seed)
    for draws in range(_FEW):
        if torch.equal(generator.get_state(), state):
            return {"seed": seed, "draws": draws}
        torch.empty((), dtype=torch.int64).random_(generator=generator)
    # Each 32 bits of it are followed by 32 zeros: apart, these take no room.
    words = state.numpy().view(np.uint32).reshape(-1, 2).T
    data = zlib.compress(words.tobytes())
    return {"seed": seed, "state": base64.b64encode(data).decode()}


def is_packed(saved: Any) -> bool:
    """Tell whether ``saved`` is what ``packed`` returns."""
    if not isinstance(saved, dict) or type(saved.get("seed")) is not int:
        return False
    if "state" not in saved:
        return saved.get("draws") in range(_FEW)
    try:
        torch.Generator().set_state(unpacked(saved))
    except Exception:  # noqa: BLE001  (whatever is wrong with it)
        return False
    return True


def unpacked(saved: State) -> torch.Tensor:
    """Return what ``packed`` was given."""
    if "state" in saved:
        data = zlib.decompress(base64.b64decode(saved["state"]))
        words = np.frombuffer(data, np.uint32).reshape(2, -1).T
        return torch.from_numpy(np.ascontiguousarray(words).view(np.uint8).reshape(-1))
    generator = torch.Generator().manual_seed(saved["seed"])
    for _ in range(saved["draws"]):
        torch.empty((), dtype=torch.int64).random_(generator=generator)
    return generator.get_state()
