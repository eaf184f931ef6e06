"""The state of a generator in a few bytes: its seed, and how many words were drawn.

All that torch draws on the CPU is made of 32-bit words of one sequence (mt19937), which
follows from the seed. How many were drawn since is found by looking for what comes next
among them. A state that is too far behind its seed is kept whole: 3.4 KB of text.
"""

import base64
import threading
import zlib
from typing import Any, TypeAlias

import numpy as np
import torch

from aioloader._order.forks import fork_safe

State: TypeAlias = dict[str, Any]
# Words behind its seed that a generator is told by: drawn again in a third of a second.
_MOST = 1 << 27
# Words of a match, words that are drawn at once, and words that are searched: 50 ms.
_PATTERN, _CHUNK, _SEARCHED = 4, 1 << 17, 1 << 24
# States and the words that lie before them (None: too many), where the next searches
# begin: the latest few of each of the latest seeds, for several may share one.
_KNOWN: dict[int, list[tuple[int | None, torch.Tensor]]] = {}
_STATES, _SEEDS = 4, 16
_LOCK = fork_safe(threading.Lock())


def packed(state: torch.Tensor) -> State:
    """Return the state of a CPU generator, ready for JSON.

    That is its seed and how many words were drawn since, if they are not too many.
    """
    generator = torch.Generator()
    generator.set_state(state)
    seed = generator.initial_seed()
    with _LOCK:
        words = _words_before(seed, state)
    if words is not None and words <= _MOST:
        return {"seed": seed, "words": words}
    # Each 32 bits of it are followed by 32 zeros: apart, these take no room.
    halves = state.numpy().view(np.uint32).reshape(-1, 2).T
    data = zlib.compress(halves.tobytes())
    return {"seed": seed, "state": base64.b64encode(data).decode()}


def is_packed(saved: Any) -> bool:
    """Tell whether ``saved`` is what ``packed`` returns."""
    if not isinstance(saved, dict) or type(seed := saved.get("seed")) is not int:
        return False
    try:
        generator = torch.Generator().manual_seed(seed)
        if "state" in saved:
            generator.set_state(unpacked(saved))
    except Exception:  # noqa: BLE001  (whatever is wrong with it)
        return False
    words = saved.get("words")
    is_told = type(words) is int and 0 <= words <= _MOST
    return generator.initial_seed() == seed and (is_told or "state" in saved)


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
    with _LOCK:
        _remember(seed, saved["words"], state)
    return state


def _drawn(generator: torch.Generator, words: int) -> np.ndarray:
    """Draw words, of which torch makes all it draws; return 31 bits of each."""
    drawn = torch.empty(words, dtype=torch.int32, device="cpu")
    return drawn.random_(generator=generator).numpy()


class _Trail:
    """What is drawn from a state on, searched by the piece for another state.

    Args:
        words: Drawn before the state.
        state: Where it begins.
    """

    def __init__(self, words: int, state: torch.Tensor) -> None:
        self._generator = torch.Generator()
        self._generator.set_state(state)
        self._before = words
        self._words = np.empty(0, np.int32)

    def search(self, state: torch.Tensor, chunk: int) -> int | None:
        """Look at a piece more; return the words before ``state`` if it is there.

        Its next words are looked for, and then the states behind both compared.
        """
        sought = torch.Generator()
        sought.set_state(state)
        pattern = _drawn(sought, _PATTERN)
        words = np.concatenate((self._words, _drawn(self._generator, chunk)))
        ends = len(words) - _PATTERN
        for place in np.flatnonzero(words[: ends + 1] == pattern[0]).tolist():
            if np.array_equal(words[place : place + _PATTERN], pattern):
                _drawn(sought, ends - place)
                if torch.equal(sought.get_state(), self._generator.get_state()):
                    return self._before + place
                sought.set_state(state)
                _drawn(sought, _PATTERN)
        self._words, self._before = words[ends + 1 :], self._before + ends + 1
        return None


def _words_before(seed: int, state: torch.Tensor) -> int | None:
    """Return how many words lie between a seed and a state; None if it is far."""
    known = _KNOWN.get(seed, [])
    for words, one in known:
        if torch.equal(one, state):
            return words
    fresh = torch.Generator().manual_seed(seed).get_state()
    starts = [(words, one) for words, one in known if words is not None]
    trails = [_Trail(words, one) for words, one in [*starts, (0, fresh)]]
    chunk = searched = _PATTERN  # short at first: mostly few were drawn
    while searched < _SEARCHED:
        chunk = min(chunk * 8, _CHUNK)
        searched += chunk
        for at, trail in enumerate(trails):
            found = trail.search(state, chunk)
            if found is not None:
                if at < len(starts):
                    _forget(seed, starts[at][1])
                _remember(seed, found, state)
                return found
    _remember(seed, None, state)
    return None


def _remember(seed: int, words: int | None, state: torch.Tensor) -> None:
    """Keep a state; of each seed the latest few, but one that is far, of few seeds."""
    others = [
        known
        for known in _KNOWN.pop(seed, [])
        if not (words is known[0] is None or torch.equal(known[1], state))
    ]
    _KNOWN[seed] = [*others, (words, state.clone())][-_STATES:]
    if len(_KNOWN) > _SEEDS:
        del _KNOWN[next(iter(_KNOWN))]


def _forget(seed: int, state: torch.Tensor) -> None:
    """Let go of a state that a generator has left behind."""
    _KNOWN[seed] = [known for known in _KNOWN[seed] if known[1] is not state]
