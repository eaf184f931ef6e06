"""The generator that an order is drawn from, and the encoding of its state as text.

Torch's samplers draw from the user's generator, or else from a seed that they draw from
the default one; other samplers may draw from the default one. To repeat an order, the
seed is enough, or the state of the generator before it. A state is 2.5 KB of random
bytes: 3.4 KB of text.
"""

import base64
import contextlib
import zlib
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import (
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

State: TypeAlias = dict[str, Any]
WITH_GENERATOR = {RandomSampler, SubsetRandomSampler, WeightedRandomSampler}


def packed(state: torch.Tensor) -> State:
    """Return the state of a CPU generator and its seed, ready for JSON."""
    generator = torch.Generator()
    generator.set_state(state)
    # Each 32 random bits are followed by 32 zeros, and only these can be compressed.
    random, zeros = state.numpy().view(np.uint32).reshape(-1, 2).T
    text = base64.b64encode(random.tobytes() + zlib.compress(zeros.tobytes(), 1))
    return {"seed": generator.initial_seed(), "state": text.decode()}


def unpacked(saved: State) -> torch.Tensor:
    data = base64.b64decode(saved["state"])
    half = torch.default_generator.get_state().numel() // 2
    data = data[:half] + zlib.decompress(data[half:])
    halves = np.frombuffer(data, np.uint32).reshape(2, -1).T
    return torch.from_numpy(np.ascontiguousarray(halves).view(np.uint8).reshape(-1))


class Draws:
    """The random draws of one order.

    Args:
        sampler: What draws, from its ``generator`` or else from the default one; None:
            nothing does.
        saved: The result of ``state`` in another process, or empty.
    """

    def __init__(self, sampler: Any, saved: State) -> None:
        own: torch.Generator | None = getattr(sampler, "generator", None)
        self._source = torch.default_generator if own is None else own
        self._is_drawn = sampler is not None
        self._draws_seed = own is None and type(sampler) is RandomSampler
        self._seed: int | None = saved.get("seed") if self._draws_seed else None
        # Only of a user's sampler is it unknown whether it draws.
        is_torchs = type(sampler) in WITH_GENERATOR
        self._key = "generator" if own is not None or is_torchs else "before"
        self._saved: State | None = saved.get(self._key) if self._is_drawn else None
        self._packed = self._saved
        self._before: torch.Tensor | None = None

    def prepare(self) -> None:
        if self._draws_seed and self._seed is None:
            drawn = torch.empty((), dtype=torch.int64).random_()
            self._seed = int(drawn.item())

    def begin(self) -> torch.Generator:
        """Return the generator to draw from, in its state when the order was drawn.

        That of a saved order is a copy: the sampler's own is past it already.
        """
        self.prepare()
        if self._seed is not None:
            return torch.Generator().manual_seed(self._seed)
        if self._saved is not None:
            copied = torch.Generator()
            copied.set_state(unpacked(self._saved))
            return copied
        if self._is_drawn and self._before is None:
            self._before = self._source.get_state()
        return self._source

    def begin_later(self) -> None:
        """Undo ``begin``, unless something was drawn since.

        A generator function draws at its first step, and not when ``iter`` is called.
        """
        before = self._before
        if before is not None and torch.equal(before, self._source.get_state()):
            self._before = None

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Let the sampler draw as it did when a saved order was first drawn.

        Afterwards its generator is back where it was.
        """
        if self._saved is None:
            yield
            return
        now = self._source.get_state()
        self._source.set_state(unpacked(self._saved))
        try:
            yield
        finally:
            self._source.set_state(now)

    def state(self) -> State:
        """Return the state that ``begin`` started from, ready for JSON, or empty."""
        if self._seed is not None:
            return {"seed": self._seed}
        if self._packed is None and self._before is not None:
            self._packed = packed(self._before)
        return {} if self._packed is None else {self._key: self._packed}
