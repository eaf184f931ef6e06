"""The law of resuming: the rest of an epoch does not depend on who delivers it.

It is written once, as a generator that yields the loader to iterate next, and driven by
``for`` or by ``async for``.
"""

import contextlib
import json
import pickle
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeAlias

import torch

from aioloader._loader.loader import DataLoader
from aioloader.testing._frozen import frozen, shown

Make: TypeAlias = Callable[[], "DataLoader[Any]"]
# Seeds of torch's default generator, by epoch; then those for resuming in mid-epoch.
_FIRST, _SECOND, _ANEW = 0, 1, 2


def assert_resumes_exactly(
    make_loader: Make,
    *,
    stops: Iterable[int] | None = None,
    resume_in: Make | None = None,
    limit: int | None = None,
) -> None:
    """Check that loaders resume exactly, wherever an epoch is left.

    For every k: the state after k batches, loaded into a new loader, gives the batches
    that the first one delivered next, equal in every bit; so does the state of the
    new one, left half-way in its turn; and so does the next epoch. After the last batch
    nothing is left of the epoch; once its end was seen, the next one starts. With
    ``in_order=False`` the batches are compared as a multiset.

    States go through JSON if that restores an equal one, else through ``pickle``.
    Torch's default generator is seeded for each epoch (the same for the same epoch, but
    with another seed when one is resumed in its middle), and restored afterwards.

    Args:
        make_loader: Returns a new loader, over a new dataset if that has a state.
        stops: The values of k; all if None.
        resume_in: Returns the loaders that resume, if they are to differ, for example
            in their workers.
        limit: Batches of an epoch to check; for long and endless ones.

    Raises:
        AssertionError: If one does not; names k and the first two batches that differ.
    """
    with torch.random.fork_rng(devices=[]):
        for life in _law(make_loader, resume_in or make_loader, stops, limit):
            with contextlib.closing(life.loader):
                for _ in life.epochs():
                    for batch in life.loader:
                        if life.note(batch):
                            break


async def assert_resumes_exactly_async(
    make_loader: Make,
    *,
    stops: Iterable[int] | None = None,
    resume_in: Make | None = None,
    limit: int | None = None,
) -> None:
    """Check the same by ``async for``: see ``assert_resumes_exactly``."""
    with torch.random.fork_rng(devices=[]):
        for life in _law(make_loader, resume_in or make_loader, stops, limit):
            async with contextlib.aclosing(life.loader):
                for _ in life.epochs():
                    async for batch in life.loader:
                        if life.note(batch):
                            break


class _Life:
    """The iterations of one loader, and their results.

    Args:
        loader: Gives the batches.
        seeds: Seeds of torch's default generator, one for each epoch to iterate.
        limit: Batches to take of an epoch, if not all.
        stops: After how many batches of the first epoch the state is saved; default:
            after each.

    Attributes:
        batches: Batches of each epoch.
        states: States of the first epoch, by the number of batches before.
        end: The state after the first epoch.
        is_whole: Whether epochs came to their ends.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        seeds: tuple[int, ...],
        limit: int | None,
        stops: Collection[int] | None = (),
    ) -> None:
        self.loader = loader
        self.batches: list[list[Any]] = []
        self.states: dict[int, Any] = {}
        self.end: Any = None
        self.is_whole = True
        self._seeds = seeds
        self._limit = limit
        self._stops = stops

    def epochs(self) -> Iterator[None]:
        """Start one epoch after the other."""
        for seed in self._seeds:
            torch.manual_seed(seed)
            self.batches.append([])
            self._save()
            yield
            if len(self.batches) == 1:
                self.end = self._state()

    def note(self, batch: Any) -> bool:
        """Record a batch; return whether it is the last one to take."""
        self.batches[-1].append(batch)
        self._save()
        self.is_whole = len(self.batches[-1]) != self._limit
        return not self.is_whole

    def _save(self) -> None:
        k = len(self.batches[-1])
        is_stop = self._stops is None or k in self._stops
        if is_stop and len(self.batches) == 1:
            self.states[k] = self._state()

    def _state(self) -> Any:
        """Return the state as restored from a file."""
        state = self.loader.state_dict()
        with contextlib.suppress(TypeError, ValueError):
            copy = json.loads(json.dumps(state))
            if frozen(copy) == frozen(state):
                return copy
        return pickle.loads(pickle.dumps(state))  # noqa: S301  (our own)


def _law(
    make: Make, make_other: Make, stops: Iterable[int] | None, limit: int | None
) -> Iterator[_Life]:
    """Yield the loaders to iterate, and check their results."""
    seeds = (_FIRST, _SECOND) if limit is None else (_FIRST,)
    first = _Life(make(), seeds, limit, None if stops is None else frozenset(stops))
    yield first
    epoch, *following = first.batches

    def resumed(state: Any, place: int, rest: list[Any], stop: int = -1) -> _Life:
        loader = make_other()
        loader.load_state_dict(state)
        seed = _ANEW + place if rest else _SECOND
        if limit is not None:
            return _Life(loader, (seed,), len(rest), {stop})
        return _Life(loader, (seed if place else _FIRST, _SECOND), None, {stop})

    for k, state in first.states.items():
        rest, where = epoch[k:], f"resumed after {_counted(k)}"
        if limit is not None and not rest:
            continue
        half = (len(rest) + 1) // 2
        once = resumed(state, k, rest, half)
        yield once
        in_order = first.loader.in_order and once.loader.in_order
        _check(where, k, (rest, *following), once.batches, in_order=in_order)
        rest = once.batches[0][half:]
        if half and (rest or limit is None):
            where += f", and again after {half} more"
            twice = resumed(once.states[half], k + half, rest)
            yield twice
            _check(
                where, k + half, (rest, *following), twice.batches, in_order=in_order
            )
    if limit is None:
        last = resumed(first.end, len(epoch), [])
        yield last
        in_order = first.loader.in_order and last.loader.in_order
        where = "resumed after the end of the epoch"
        _check(where, 0, following, last.batches[:1], in_order=in_order)


def _check(
    where: str,
    place: int,
    expected: Iterable[list[Any]],
    found: list[list[Any]],
    *,
    in_order: bool,
) -> None:
    """Compare the rest of an epoch, and the next one.

    After the last batch, nothing is left.
    """
    rest, *following = expected
    _compare(where, place, rest, found[0], in_order=in_order)
    for epoch, other in zip(following, found[1:], strict=False):
        _compare(f"{where}, the next epoch", 0, epoch, other, in_order=in_order)


def _compare(
    where: str, place: int, expected: list[Any], found: list[Any], *, in_order: bool
) -> None:
    """Compare the batches of (the rest of) one epoch."""
    wanted, given = list(map(frozen, expected)), list(map(frozen, found))
    if not in_order:
        missing, foreign = Counter(wanted), Counter(given)
        missing, foreign = missing - foreign, foreign - missing
        expected = [expected[wanted.index(one)] for one in missing]
        found = [found[given.index(one)] for one in foreign]
        wanted, given = list(missing), list(foreign)
    if wanted == given:
        return
    pairs = zip(wanted, given, strict=False)
    at = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    at = min(len(wanted), len(given)) if at is None else at
    which = f"batch {place + at} differs" if in_order else "a batch differs"
    raise AssertionError(
        f"{where}: {which}: expected {_at(expected, at)}, found {_at(found, at)}"
    )


def _at(batches: list[Any], at: int) -> str:
    return shown(batches[at]) if at < len(batches) else "none"


def _counted(k: int) -> str:
    return f"{k} batch" if k == 1 else f"{k} batches"
