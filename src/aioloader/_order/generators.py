"""The generator that an order draws from, and the encoding of its state as text.

Torch's samplers draw from the user's generator, or else from a seed that they draw from
the default one. To repeat an order, the seed is enough, or the state of the generator
before it. A state is 2.5 KB of random bytes: 3.4 KB of text.
"""

import base64
import zlib
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import RandomSampler

State: TypeAlias = dict[str, Any]


def packed(state: torch.Tensor) -> State:
    """Return the state of a CPU generator and its seed, ready for JSON."""
    generator = torch.Generator()
    generator.set_state(state)
    # Each 32 bits are followed by 32 zeros, which compress to nothing when separated.
    # The rest is random: higher levels take five times as long and gain nothing.
    halves = state.numpy().view(np.uint32).reshape(-1, 2).T
    text = base64.b64encode(zlib.compress(halves.tobytes(), 1)).decode()
    return {"seed": generator.initial_seed(), "state": text}


def unpacked(saved: State) -> torch.Tensor:
    """Undo ``packed``."""
    data = zlib.decompress(base64.b64decode(saved["state"]))
    halves = np.frombuffer(data, np.uint32).reshape(2, -1).T
    return torch.from_numpy(np.ascontiguousarray(halves).view(np.uint8).reshape(-1))


def is_packed(saved: Any) -> bool:
    """Tell whether ``saved`` is a valid result of ``packed``."""
    if not isinstance(saved, dict) or type(saved.get("seed")) is not int:
        return False
    generator = torch.Generator()
    try:
        generator.set_state(unpacked(saved))
    except Exception:  # noqa: BLE001  (anything may be wrong with it)
        return False
    return bool(generator.initial_seed() == saved["seed"])


class Draws:
    """The random draws of one order.

    Args:
        sampler: One of torch's samplers with a ``generator``, which may be None.
        saved: The result of ``state`` in another process, or empty.
    """

    def __init__(self, sampler: Any, saved: State) -> None:
        self._own: torch.Generator | None = sampler.generator
        self._draws_seed = self._own is None and isinstance(sampler, RandomSampler)
        self._seed: int | None = saved.get("seed")
        self._before: torch.Tensor | None = None
        self._packed: State | None = saved.get("generator")

    def begin(self) -> torch.Generator:
        """Return the generator, in its state when the order was first drawn.

        If it is the user's, later draws advance it as usual.
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
        """Return the state that ``begin`` started from, ready for JSON, or empty."""
        if self._seed is not None:
            return {"seed": self._seed}
        if self._packed is None and self._before is not None:
            self._packed = packed(self._before)
        return {} if self._packed is None else {"generator": self._packed}
