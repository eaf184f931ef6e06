"""What an order draws from, and how the state of a generator is saved: raw, as text.

Torch's samplers draw from a generator of the user's, or else from a seed that they draw
from the default one. To draw an order again, the seed is enough, or the state that the
generator had before. A state is 2.5 KB of random bytes: 3.4 KB of text.
"""

import base64
import zlib
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import RandomSampler

State: TypeAlias = dict[str, Any]


def packed(state: torch.Tensor) -> State:
    """Return the state of a CPU generator, ready for JSON, beside its seed."""
    generator = torch.Generator()
    generator.set_state(state)
    # Each 32 bits of it are followed by 32 zeros: apart, these take no room. The rest
    # is random: higher levels take five times as long, and find no more.
    halves = state.numpy().view(np.uint32).reshape(-1, 2).T
    text = base64.b64encode(zlib.compress(halves.tobytes(), 1)).decode()
    return {"seed": generator.initial_seed(), "state": text}


def unpacked(saved: State) -> torch.Tensor:
    """Return what ``packed`` was given."""
    data = zlib.decompress(base64.b64decode(saved["state"]))
    halves = np.frombuffer(data, np.uint32).reshape(2, -1).T
    return torch.from_numpy(np.ascontiguousarray(halves).view(np.uint8).reshape(-1))


def is_packed(saved: Any) -> bool:
    """Tell whether ``saved`` is what ``packed`` returns."""
    if not isinstance(saved, dict) or type(saved.get("seed")) is not int:
        return False
    generator = torch.Generator()
    try:
        generator.set_state(unpacked(saved))
    except Exception:  # noqa: BLE001  (whatever is wrong with it)
        return False
    return bool(generator.initial_seed() == saved["seed"])


class Draws:
    """The random draws of one order.

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
