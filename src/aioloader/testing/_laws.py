"""A check that resumed loaders deliver the same batches as an uninterrupted one.

The check is a generator that yields each loader to iterate. It is driven by ``for`` or
``async for``, in this process or in a new one.
"""

import asyncio
import contextlib
import json
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import cloudpickle
import torch

from aioloader._base.cancellation import in_thread
from aioloader._base.warnings import warn
from aioloader._loader.loader import DataLoader
from aioloader._workers.worker_spec import send_by_value_what_cannot_be_imported
from aioloader.testing._frozen import compare, frozen

MakeLoader: TypeAlias = Callable[[], "DataLoader[Any]"]
# Seeds of torch's default generator for the first run, and for resumed runs.
_FIRST, _ANEW = 0, 1
_EPOCHS = 3
_NEXT = ("", "the next epoch", "the epoch after the next")


def assert_resumes_exactly(
    make_loader: MakeLoader,
    *,
    stops: Iterable[int] | None = None,
    resume_in: MakeLoader | None = None,
    limit: int | None = None,
    new_process: bool = True,
) -> None:
    """Check that loaders resume exactly, wherever an epoch is interrupted.

    For every k, a new loader loads the state saved after k batches. It must deliver the
    remaining batches and the next two epochs exactly as the first loader did, equal in
    every bit. The state that the new loader saves half-way through the remaining
    batches must also resume exactly. For k = 0, one state is saved before ``iter()``
    and one after it. A state saved after the epoch's end must start the next epoch.
    With ``in_order=False``, batches are compared as a multiset.

    After each batch, torch's default generator is used once, as by a step with dropout.
    States pass through JSON if that preserves them, else through ``pickle``.

    Args:
        make_loader: Returns a new loader, over a new dataset if the dataset has state.
        stops: The values of k to check; None: all.
        resume_in: Returns a new loader to resume with, for example with another number
            of workers; None: ``make_loader``.
        limit: Check only this many batches of one epoch, for long and endless epochs.
        new_process: Whether to resume the first, middle and last state in a new process
            as well. The function that makes the loader is pickled for this; if pickling
            fails, a warning says so.

    Raises:
        AssertionError: If batches differ; the message names k and the difference.
    """
    make_other, resumes = resume_in or make_loader, list[_Resume]()
    with torch.random.fork_rng(devices=[]):
        _drive(_law(make_loader, make_other, stops, limit, resumes))
        if new_process:
            _resume_in_new_process(make_other, resumes, is_async=False)


async def assert_resumes_exactly_async(
    make_loader: MakeLoader,
    *,
    stops: Iterable[int] | None = None,
    resume_in: MakeLoader | None = None,
    limit: int | None = None,
    new_process: bool = True,
) -> None:
    """Check by ``async for`` that loaders resume; see ``assert_resumes_exactly``."""
    make_other, resumes = resume_in or make_loader, list[_Resume]()
    with torch.random.fork_rng(devices=[]):
        await _drive_async(_law(make_loader, make_other, stops, limit, resumes))
        if new_process:
            resume = partial(_resume_in_new_process, is_async=True)
            await in_thread(resume, make_other, resumes)


def _drive(law: "Iterable[_Life]") -> None:
    for life in law:
        with contextlib.closing(life.loader):
            for _ in life.epochs():
                iterator = iter(life.loader)
                life.begin()
                for batch in iterator:
                    if life.note(batch):
                        break


async def _drive_async(law: "Iterable[_Life]") -> None:
    for life in law:
        async with contextlib.aclosing(life.loader):
            for _ in life.epochs():
                iterator = aiter(life.loader)
                life.begin()
                async for batch in iterator:
                    if life.note(batch):
                        break


@dataclass
class _Life:
    """A loader, and the batches and states from its iterations."""

    loader: DataLoader[Any]
    count: int  # number of epochs to iterate
    limit: int | None  # number of batches to take per epoch; None: all
    # Save a state after these numbers of batches of the first epoch; None: after each.
    stops: Collection[int] | None = ()
    batches: list[list[Any]] = field(default_factory=list)  # by epoch
    # Saved in the first epoch: description, number of batches before, and state.
    states: list[tuple[str, int, Any]] = field(default_factory=list)
    end: Any = None  # the state after the first epoch

    def epochs(self) -> Iterator[None]:
        """Yield once per epoch; save states before and after the first epoch."""
        for _ in range(self.count):
            self.batches.append([])
            self._save("resumed before iter()")
            yield
            if len(self.batches) == 1:
                self.end = self._state()

    def begin(self) -> None:
        """Save a state after ``iter()`` and before the first batch."""
        self._save("resumed after 0 batches")

    def note(self, batch: Any) -> bool:
        """Record a batch; return whether it is the last one to take."""
        torch.rand(())  # like a training step
        epoch = self.batches[-1]
        epoch.append(batch)
        k = len(epoch)
        self._save(f"resumed after {k} batch{'es' * (k != 1)}")
        return k == self.limit

    def _save(self, where: str) -> None:
        k = len(self.batches[-1])
        is_stop = self.stops is None or k in self.stops
        if is_stop and len(self.batches) == 1:
            self.states.append((where, k, self._state()))

    def _state(self) -> Any:
        """Return the loader's state after a round trip through JSON or ``pickle``."""
        state = self.loader.state_dict()
        with contextlib.suppress(TypeError, ValueError):
            copy = json.loads(json.dumps(state))
            if frozen(copy) == frozen(state):
                return copy
        return pickle.loads(pickle.dumps(state))  # noqa: S301  (our own)


@dataclass
class _Resume:
    """A saved state, and the batches expected after loading that state."""

    where: str  # when the state was saved, for messages
    place: int  # number of the epoch's batches before the state
    state: Any
    epochs: list[list[Any]]  # rest of the state's epoch, then the next epochs
    in_order: bool
    limit: int | None  # number of batches to take per epoch; None: all

    def check(
        self, make: MakeLoader, half: int = -1
    ) -> "Generator[_Life, None, _Life]":
        """Yield a ``_Life`` to iterate, check its batches, and return it."""
        torch.manual_seed(_ANEW + self.place)
        loader = make()
        loader.load_state_dict(self.state)
        life = _Life(loader, len(self.epochs), self.limit, {half})
        yield life
        in_order = self.in_order and loader.in_order
        pairs = zip(self.epochs, life.batches, strict=True)
        for number, (expected, batches) in enumerate(pairs):
            where, place = self.where, self.place
            if number:
                where, place = f"{where}, {_NEXT[number]}", 0
            rest, actual = expected, batches
            if not in_order:
                where = f"{where}, in any order"
                rest, actual = _without(rest, actual), _without(actual, rest)
            compare(where, "batch", rest, actual, place)
        return life


def _law(
    make: MakeLoader,
    make_other: MakeLoader,
    stops: Iterable[int] | None,
    limit: int | None,
    resumes: list[_Resume],
) -> "Iterator[_Life]":
    """Yield each ``_Life`` to iterate, check its batches, and fill ``resumes``."""
    torch.manual_seed(_FIRST)
    number = _EPOCHS if limit is None else 1
    first = _Life(make(), number, limit, None if stops is None else frozenset(stops))
    yield first
    epoch, *following = first.batches
    in_order = first.loader.in_order

    def resume(where: str, place: int, state: Any, epochs: list[list[Any]]) -> _Resume:
        most = None if limit is None else len(epochs[0])
        return _Resume(where, place, state, epochs, in_order, most)

    for where, k, state in first.states:
        rest = epoch[k:]
        if limit is not None and not rest:
            continue
        resumes.append(resume(where, k, state, [rest, *following]))
        half = (len(rest) + 1) // 2
        once = yield from resumes[-1].check(make_other, half)
        left = once.batches[0][half:]
        if half and (left or limit is None):
            again = f"{where}, and again after {half} more"
            its_state, epochs = once.states[0][2], [left, *following[:1]]
            yield from resume(again, k + half, its_state, epochs).check(make_other)
    if limit is None:
        where = "resumed after the end of the epoch"
        resumes.append(resume(where, 0, first.end, following))
        yield from resumes[-1].check(make_other)


def _resume_in_new_process(
    make: MakeLoader, resumes: list[_Resume], *, is_async: bool
) -> None:
    """Resume the first, middle and last state in a new process.

    Raises:
        AssertionError: If batches differ in that process, or its loader fails.
    """
    if not resumes:
        return
    chosen = sorted({0, len(resumes) // 2, len(resumes) - 1})
    try:
        send_by_value_what_cannot_be_imported()
        data = cloudpickle.dumps((make, [resumes[i] for i in chosen], is_async))
    except Exception as error:  # noqa: BLE001  (of the user's __reduce__)
        warn(
            f"resuming in a new process was not checked: {error}; pass a function "
            "that can be pickled, or new_process=False"
        )
        return
    code = (
        f"import sys; sys.path[:] = {[*map(str, sys.path)]!r}; "
        "from aioloader.testing._laws import resume_here; resume_here()"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, input=data, stderr=subprocess.PIPE, check=False)  # noqa: S603  (our own)
    if done.returncode:
        said = done.stderr.decode(errors="replace") or f"exit code {done.returncode}"
        raise AssertionError(f"in a new process: {said}")


def resume_here() -> None:
    """Check the resumes that the parent process pickles to standard input."""
    make, resumes, is_async = pickle.load(sys.stdin.buffer)  # noqa: S301  (ours)
    for resume in resumes:
        law = resume.check(make)
        asyncio.run(_drive_async(law)) if is_async else _drive(law)


def _without(batches: list[Any], removed: list[Any]) -> list[Any]:
    """Return ``batches`` minus ``removed``, as multisets."""
    counts = Counter(map(frozen, removed))
    rest = []
    for batch in batches:
        key = frozen(batch)
        if not counts[key]:
            rest.append(batch)
        counts[key] -= 1
    return rest
