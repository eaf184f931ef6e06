"""What the random draws of an order began with, saved in a few bytes, to draw again.

Torch's samplers draw from a generator of the user's, or else from a seed that they draw
from the default one. The seed is a number. A generator's state is its seed and how many
words were drawn since; that of one that has drawn too many is 3.4 KB of text.
"""

import base64
import zlib
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import RandomSampler

State: TypeAlias = dict[str, Any]
# Words behind its seed that a generator is told by: drawn again in half a second.
_MOST = 1 << 27
# Words that are searched for a state, in about a millisecond and a tenth of a second.
_FEW, _MANY = 1 << 17, 1 << 24
# Words of a match, and words that are drawn at once.
_PATTERN, _CHUNK = 4, 1 << 17
# Where the generators of the latest seeds were: the next search begins there.
_KNOWN: dict[int, tuple[int, torch.Tensor]] = {}
_SEEDS = 16


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
    """Return the state of a CPU generator, ready for JSON.

    That is its seed and how many words were drawn since, if they are not too many.
    """
    generator = torch.Generator()
    generator.set_state(state)
    seed = generator.initial_seed()
    fresh = 0, generator.manual_seed(seed).get_state()
    latest = _KNOWN.get(seed, fresh)
    for (drawn, known), most in ((fresh, _FEW), (latest, _MANY), (fresh, _MANY)):
        words = _words_between(known, state, most)
        if words is not None and drawn + words <= _MOST:
            _remember(seed, drawn + words, state)
            return {"seed": seed, "words": drawn + words}
    # Each 32 bits of it are followed by 32 zeros: apart, these take no room.
    halves = state.numpy().view(np.uint32).reshape(-1, 2).T
    data = zlib.compress(halves.tobytes())
    return {"seed": seed, "state": base64.b64encode(data).decode()}


def is_packed(saved: Any) -> bool:
    """Tell whether ``saved`` is what ``packed`` returns."""
    if not isinstance(saved, dict) or type(saved.get("seed")) is not int:
        return False
    if "state" not in saved:
        words = saved.get("words")
        return type(words) is int and 0 <= words <= _MOST
    try:
        torch.Generator().set_state(unpacked(saved))
    except Exception:  # noqa: BLE001  (whatever is wrong with it)
        return False
    return True


def unpacked(saved: State) -> torch.Tensor:
    """Return what ``packed`` was given."""
    if "state" in saved:
        data = zlib.decompress(base64.b64decode(saved["state"]))
        halves = np.frombuffer(data, np.uint32).reshape(2, -1).T
        return torch.from_numpy(np.ascontiguousarray(halves).view(np.uint8).reshape(-1))
    seed, left = saved["seed"], saved["words"]
    generator = torch.Generator().manual_seed(seed)
    while left:
        left -= len(_drawn(generator, min(left, _CHUNK)))
    state = generator.get_state()
    _remember(seed, saved["words"], state)
    return state


def _drawn(generator: torch.Generator, words: int) -> np.ndarray:
    """Draw words, of which torch makes all it draws; return 31 bits of each."""
    return torch.empty(words, dtype=torch.int32).random_(generator=generator).numpy()


def _words_between(known: torch.Tensor, state: torch.Tensor, most: int) -> int | None:
    """Return how many words after ``known`` a state is, or None if it is not near.

    What comes next in ``state`` is looked for in what is drawn from ``known``.
    """
    if torch.equal(known, state):
        return 0
    generator, sought = torch.Generator(), torch.Generator()
    generator.set_state(known)
    sought.set_state(state)
    pattern = _drawn(sought, _PATTERN)
    words, before, chunk = pattern[:0], 0, _PATTERN
    while before < most:
        chunk = min(chunk * 8, _CHUNK)  # short at first: mostly few were drawn
        words = np.concatenate((words, _drawn(generator, chunk)))
        ends = len(words) - _PATTERN
        for place in np.flatnonzero(words[: ends + 1] == pattern[0]).tolist():
            if np.array_equal(words[place : place + _PATTERN], pattern):
                _drawn(sought, ends - place)
                is_same = torch.equal(sought.get_state(), generator.get_state())
                return before + place if is_same else None
        words, before = words[ends + 1 :], before + ends + 1
    return None


def _remember(seed: int, words: int, state: torch.Tensor) -> None:
    """Keep the state behind so many words of a seed."""
    if len(_KNOWN) >= _SEEDS:
        _KNOWN.clear()
    _KNOWN[seed] = words, state
