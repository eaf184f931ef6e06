"""Damaged states are refused, in words: never a part of one, never another's error."""

import copy
import json
import random
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import WeightedRandomSampler

from aioloader import DataLoader, merge_states
from aioloader.datasets import CSVDataset, from_iterable
from aioloader.errors import StateMismatchError
from datasets.shards import arrow, parquet, sqlite, tar, text
from samples import SyncMap, SyncStream
from stateful import Batches, Counted, Cursors, Kept

Loader: Any = DataLoader  # options are tables here
Make = Callable[[], Any]


@cache
def folder() -> Path:
    """Return a folder for shards."""
    return Path(tempfile.mkdtemp())


def csv() -> Any:
    """Return rows of CSV."""
    for shard in range(3):
        (folder() / f"{shard}.csv").write_text("a,b\n" + f"{shard},2\n" * 9)
    return CSVDataset("*.csv", store=folder(), interleave=2)


def streams() -> dict[str, Make]:
    """Return makers of streams: every format and every step."""
    return {
        "tar": lambda: tar(folder(), interleave=3),
        "lines": lambda: text(folder(), shuffle=True, interleave=2).readers(4),
        "csv": csv,
        "parquet": lambda: parquet(folder()).shuffle(5),
        "arrow": lambda: arrow(folder()).repeat(2),
        "sql": lambda: sqlite(folder()).skip(3).take(20),
        "mix": lambda: from_iterable(range(9)).mix(from_iterable(range(30))).batch(2),
        "epoch": lambda: from_iterable(range(9)).map(str).readers(2).epoch_length(30),
    }


def streamed(name: str) -> Any:
    """Return a loader of a stream."""
    return Loader(streams()[name](), 2, collate_fn=list)


def seeded() -> torch.Generator:
    """Return a generator of the user's."""
    return torch.Generator().manual_seed(3)


MAKERS: dict[str, Make] = {
    "map": lambda: Loader(SyncMap(12), 2),
    "seed": lambda: Loader(SyncMap(12), 2, shuffle=True),
    "generator": lambda: Loader(SyncMap(12), 2, shuffle=True, generator=seeded()),
    "sampler": lambda: Loader(
        SyncMap(12), 2, sampler=WeightedRandomSampler([1.0] * 12, 12), in_order=False
    ),
    "batches": lambda: Loader(SyncMap(12), batch_sampler=Batches()),
    "ranks": lambda: Loader(SyncMap(24), 2, shuffle=True, rank=0, world_size=2),
    "copies": lambda: Loader(Counted(), 1, num_workers=2),
    "iterable": lambda: Loader(SyncStream(12), 2),
    "dataset": lambda: Loader(Kept(12), 2),
    "iterator": lambda: Loader(Cursors(12), 2),
    "workers": lambda: Loader(
        from_iterable(range(30)), 2, num_workers=2, fetch="workers"
    ),
    **{name: partial(streamed, name) for name in streams()},
}


@cache
def saved(name: str) -> str:
    """Return the state after three batches, as JSON."""
    loader = MAKERS[name]()
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = json.dumps(loader.state_dict())
    iterator.close()
    return state


def places(state: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what holds each part, and its key there."""
    for key in state if isinstance(state, dict) else range(len(state)):
        yield state, key
        if isinstance(state[key], (dict, list)):
            yield from places(state[key])


def other(value: Any, draw: random.Random) -> Any:
    """Return a value of another type, sign, length or content."""
    others: list[Any] = ["x", -1, 2.5, None, [], {}, float("nan"), 10**18, [[1]]]
    if isinstance(value, list) and value:
        others += [value[:-1], value[1:], value[::-1], [*value, *value]]
    elif isinstance(value, (int, float)):
        others += [-value, value + 1, str(value)] * 3
    elif isinstance(value, dict) and len(value) > 1:
        keys = list(value)
        others += [dict(zip(keys, [*value.values()][::-1], strict=True))] * 5
    return draw.choice([one for one in others if repr(one) != repr(value)])


def damaged(state: Any, draw: random.Random) -> Any:
    """Return a state with one damage somewhere."""
    state = copy.deepcopy(state)
    holder, key = draw.choice(list(places(state)))
    _, _, twin, place = holder, key, *draw.choice(list(places(state)))
    damage = draw.randrange(4)
    if damage == 0:
        del holder[key]
    elif damage == 1 and not (holder is twin and key == place):
        holder[key] = copy.deepcopy(twin[place])
    else:
        holder[key] = other(holder[key], draw)
    return state


@pytest.mark.slow
@pytest.mark.law
@pytest.mark.parametrize("name", MAKERS)
@given(seed=st.integers(0, 10**9))
def test_damage(name: str, seed: int) -> None:
    """Of any value, anywhere: loading and merging refuse it, or nothing has changed."""
    whole = json.loads(saved(name))
    state = damaged(whole, random.Random(seed))
    if repr(state) == repr(whole):
        return
    for load in (MAKERS[name]().load_state_dict, lambda one: merge_states([one])):
        with pytest.raises(
            StateMismatchError, match=r"as it was saved|version|no state"
        ):
            load(state)


async def state_of(stream: Any) -> Any:
    """Return the state of a stream's own iterator after four samples."""
    async with aiter(stream) as iterator:
        for _ in range(4):
            await anext(iterator)
        return json.loads(json.dumps(iterator.state_dict()))


@pytest.mark.slow
@pytest.mark.parametrize("name", streams())
async def test_damage_of_a_streams_own_state(name: str) -> None:
    """Without a loader."""
    stream = streams()[name]()
    whole = await state_of(stream)
    stream.load_state_dict(whole)
    draw = random.Random(1)
    for state in (damaged(whole, draw) for _ in range(100)):
        if repr(state) != repr(whole):
            with pytest.raises(StateMismatchError, match=r"as it was saved|version"):
                stream.load_state_dict(state)


@pytest.mark.parametrize("name", MAKERS)
def test_whole_states(name: str) -> None:
    """Keys in any order, tuples for lists and other keys beside are no damage."""
    state = json.loads(json.dumps(json.loads(saved(name)), sort_keys=True))
    loader = MAKERS[name]()
    loader.load_state_dict({**state, "another": 1, "beyond": tuple(state["beyond"])})
    assert json.loads(json.dumps(loader.state_dict())) == json.loads(saved(name))


@pytest.mark.parametrize(
    "state", ["x", 5, [1], {"a": 1}, None, {"version": 7}], ids=repr
)
def test_what_is_no_state(state: Any) -> None:
    """Of ours, or at all."""
    with pytest.raises(StateMismatchError, match=r"no state of|version 7"):
        MAKERS["seed"]().load_state_dict(state)
    with pytest.raises(StateMismatchError):
        merge_states([state])


@pytest.mark.parametrize("epoch", ["3", 2.5, None, -1], ids=repr)
def test_epochs_are_counts(epoch: Any) -> None:
    """What is chosen by ``set_epoch`` goes into states."""
    with pytest.raises((TypeError, ValueError)):
        MAKERS["seed"]().set_epoch(epoch)


@pytest.mark.parametrize("name", ["seed", "generator", "lines", "epoch"])
def test_a_far_epoch(name: str) -> None:
    """Nothing is done as often as an epoch's number says."""
    loader, resumed = MAKERS[name](), MAKERS[name]()
    loader.set_epoch(10**18)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    torch.manual_seed(1)  # another process has drawn otherwise
    resumed.load_state_dict(state)
    assert str(list(resumed)) == str(list(iterator))
