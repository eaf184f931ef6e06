"""Map-style datasets as streams, and ``mix``: shares at every prefix, and positions."""

import asyncio
import contextlib
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from aioloader import DataLoader
from aioloader._base.blocks import FailedSample
from aioloader._order.mixture import Schedule
from aioloader._order.ranks import ReaderShare
from aioloader._order.stream_states import opened, sealed
from aioloader.datasets import from_arrow, from_dataset, from_iterable, mix
from aioloader.errors import StateMismatchError
from aioloader.protocols import HasLifespan
from datasets.ranks import of_ranks
from datasets.shards import check_resumes, items, pulled, read
from datasets.test_rank_ends import masked

N = 23


class Plain:
    """Squares; one of them fails."""

    def __init__(self, length: int = N, bad: int = -1) -> None:
        self.length, self.bad = length, bad
        self.threads = set[threading.Thread]()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        self.threads.add(threading.current_thread())
        if index == self.bad or not 0 <= index < self.length:
            raise IndexError(f"no {index}")
        return index**2


class Together(Plain):
    """Reads several at once; all fail if one does."""

    calls = 0

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.calls += 1
        return [super(Together, self).__getitem__(index) for index in indices]


class Coroutines(Plain):
    """Reads many at a time."""

    under_way = most = 0

    async def __getitem__(self, index: int) -> Any:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        for _ in range(1 + index % 3):
            await asyncio.sleep(0)
        self.under_way -= 1
        return super().__getitem__(index)


class CoroutinesTogether(Coroutines):
    """Reads several in one call."""

    calls = 0

    async def __getitems__(self, indices: list[int]) -> list[Any]:
        self.calls += 1
        await asyncio.sleep(0)
        return [super(Coroutines, self).__getitem__(index) for index in indices]


class Wrapped(Plain):
    """A plain dataset that returns what a coroutine function returns."""

    def __getitem__(self, index: int) -> Any:
        return Coroutines(self.length, self.bad)[index]


KINDS: list[type[Plain]] = [Plain, Together, Coroutines, CoroutinesTogether, Wrapped]
KIND = pytest.mark.parametrize("kind", KINDS)


@KIND
@pytest.mark.parametrize("shuffle", [False, True])
async def test_all_samples_in_each_epoch(kind: type[Plain], shuffle: bool) -> None:
    stream = from_dataset(kind(), shuffle=shuffle, seed=4)
    squares = [index**2 for index in range(N)]
    epochs = [await items(stream) for _ in range(3)]
    assert [sorted(one) for one in epochs] == [squares] * 3
    assert len({*map(tuple, epochs)}) == (3 if shuffle else 1)
    assert (epochs[0] == squares) == (not shuffle)
    again = from_dataset(kind(), shuffle=shuffle, seed=4)
    again.set_epoch(2)
    assert await items(again) == epochs[2]


@KIND
async def test_a_failed_sample_fails_alone(kind: type[Plain]) -> None:
    async with aiter(from_dataset(kind(bad=5))) as iterator:
        block: Any = await iterator.pull(N)
        while len(block) < N:
            block += await iterator.pull(N)
    assert [one for one in block if type(one) is not FailedSample] == [
        index**2 for index in range(N) if index != 5
    ]
    assert str(block[5].error) == "no 5"
    named = [] if kind is Wrapped else [f"aioloader: sample 5 of {kind.__name__}"]
    place = "aioloader: in 'from_dataset' of the stream"
    assert block[5].error.__notes__ == [*named, place]


@pytest.mark.slow
@KIND
async def test_resumes_anywhere(kind: type[Plain]) -> None:
    stream = from_dataset(kind(), shuffle=True)
    stream.set_epoch(0)
    whole = await items(stream)
    await check_resumes(stream, whole, range(N + 1))
    _, state = await read(stream, 9)
    assert state["streams"]["0"]["state"] == {"up": {"at": 9}}


# -- where it is read -----------------------------------------------------------------


async def test_a_plain_one_is_read_in_one_thread() -> None:
    """Of all readers, and not on the loop."""
    dataset = Plain(200)
    stream = from_dataset(dataset).readers(4).shard(0, 1)
    assert sorted(await items(stream)) == [index**2 for index in range(200)]
    assert len(dataset.threads) == 1
    assert threading.current_thread() not in dataset.threads
    assert not any(one.is_alive() for one in dataset.threads)


@pytest.mark.parametrize(("readers", "least"), [(1, 6), (3, 2)])
async def test_coroutines_run_many_at_a_time(readers: int, least: int) -> None:
    dataset = Coroutines(60)
    await items(from_dataset(dataset, concurrency=6).readers(readers))
    assert least <= dataset.most <= 6


async def test_several_are_read_together() -> None:
    dataset = Together(500)
    async with aiter(from_dataset(dataset)) as iterator:
        blocks = [await iterator.pull(100) for _ in range(5)]
    assert [len(block) for block in blocks] == [100] * 5
    assert dataset.calls == 5


ASYNC: Any = Coroutines
WRAPPERS: dict[str, Callable[[], Any]] = {
    "subset": lambda: Subset(ASYNC(), range(N)),
    "concat": lambda: ConcatDataset([ASYNC(7), ASYNC(N)]),
    "stack": lambda: StackDataset(ASYNC(), ASYNC()),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
async def test_wrappers_of_torch(wrapper: str) -> None:
    found = await items(from_dataset(WRAPPERS[wrapper]()))
    squares = [index**2 for index in range(N)]
    wanted: Any = {"concat": [*squares[:7], *squares]}
    wanted["stack"] = [(one, one) for one in squares]
    assert found == wanted.get(wrapper, squares)


async def test_its_resources_are_entered_on_the_loop() -> None:
    entered: list[str] = []

    class Owned(Coroutines, HasLifespan):
        @contextlib.asynccontextmanager
        async def lifespan(self) -> AsyncIterator[None]:
            entered.append("entered")
            yield
            entered.append("left")

    stream = from_dataset(Owned()).readers(2)
    assert len(await items(stream.repeat(2))) == 2 * N
    assert entered == ["entered", "left"]


# -- among ranks ----------------------------------------------------------------------


@pytest.mark.slow
@given(
    st.integers(0, 40),
    st.booleans(),
    st.sampled_from(["wrap", "drop", "pad", "uneven", None]),
    st.integers(1, 5),
)
def test_ranks_share_equally(length: int, shuffle: bool, tail: Any, ranks: int) -> None:
    def make() -> Any:
        return from_dataset(Plain(length), shuffle=shuffle)

    options: Any = {"collate_fn": list} if tail is None else {
        "collate_fn": list, "tail": tail
    }  # fmt: skip
    loaders = of_ranks(make(), ranks, 3, **options)
    parts: list[Any] = [[*loader] for loader in loaders]
    if tail == "pad":
        parts = [[masked([batch]) for batch in one] for one in parts]
    elif tail != "uneven":
        assert len({*map(len, parts)}) == 1
    assert [*map(len, loaders)] == [*map(len, parts)]
    found = Counter(one for part in parts for batch in part for one in batch)
    whole = Counter(index**2 for index in range(length))
    if tail in {"uneven", "pad"}:
        assert found == whole
    elif tail == "drop":
        assert found <= whole
        assert found.total() == length - length % ranks
    else:
        assert found >= whole
        assert found.total() == length + -length % ranks


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_of_it_is_one_of_the_dataset(num_workers: int) -> None:
    dataset: Any = TensorDataset(torch.arange(50))
    options: Any = {"num_workers": 1, "fetch": "workers"} if num_workers else {}
    found = [*DataLoader(from_dataset(dataset), 8, **options)]
    for (one,), (other,) in zip(found, DataLoader(dataset, 8), strict=True):
        assert torch.equal(one, other)


async def test_steps_and_passes() -> None:
    stream = from_dataset(Plain(), shuffle=True).repeat().epoch_length(60)
    found = await items(stream)
    assert sorted(found[:N]) == sorted(found[N : 2 * N])
    assert found[:N] != found[N : 2 * N]
    assert from_dataset(Plain()).map(float).total() == N
    assert repr(from_dataset(Plain()).take(2)) == "stream of Plain.take(...)"


# -- mix: shares at every prefix, stages, ends and figures -----------------------------

WEIGHTS = st.lists(
    st.one_of(st.integers(1, 9), st.floats(0.001, 10)), min_size=1, max_size=7
)


def of(name: str, count: int) -> Any:
    return from_iterable([f"{name}{number}" for number in range(count)])


def endless() -> Any:
    return mix({name: of(name, 48).repeat() for name in "abc"}, [5, 3, 2])


def shares(weights: Any) -> Any:
    """Return a column of the sources' parts of the whole, exact."""
    found = [Fraction(str(one)) for one in weights]
    return [float(one / sum(found)) for one in found]


# -- shares -----------------------------------------------------------------------


@given(WEIGHTS, st.integers(1, 30), st.integers(0, 10**9))
@example([0.9, 0.09, 0.01], 100, 0)
@example([1, 1], 2, 10**9)
@example([1e-9, 1, 1, 1, 2, 3, 5], 13, 0)
def test_each_source_has_its_share(weights: Any, readers: int, begin: int) -> None:
    """At every prefix of the order of all readers, as far from the start as may be."""
    schedule = Schedule([*map(str, range(len(weights)))], weights, "all")
    first = begin // readers
    parts = [
        schedule.sources(first, ReaderShare(one, readers), []) for one in range(readers)
    ]
    order = np.stack(parts, axis=1).ravel()
    before = [n for n, _ in schedule.stage(0, []).proportions.counts(first * readers)]
    for source, share in enumerate(shares(weights)):
        counts = before[source] + np.cumsum(order == source)
        positions = first * readers + 1 + np.arange(len(order))
        assert np.abs(counts - share * positions).max() <= 1.5 + 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("weights", [[1, 1], [1, 3], [2, 1, 1], [0.5, 0.3, 0.2]])
@pytest.mark.parametrize("readers", [2, 4, 10, 24])
def test_each_reader_has_all_sources(readers: int, weights: Any) -> None:
    """Whatever the numbers have in common, no reader reads only some of them."""
    schedule = Schedule([*map(str, range(len(weights)))], weights, "all")
    for reader in range(readers):
        found: list[int] = []
        while len(found) < 2000:
            found += [*schedule.sources(len(found), ReaderShare(reader, readers), [])]
        counts = np.bincount(found, minlength=len(weights)) / len(found)
        assert counts == pytest.approx(shares(weights), rel=0.05)


async def test_weights_by_name_and_in_stages() -> None:
    stages: Any = [(0, {"b": 1, "a": 3}), (80, [1, 1]), (120, {"a": 0.25, "b": 0.75})]
    sources = {"a": of("a", 999), "b": of("b", 999)}
    for readers in (1, 3):
        found, _ = await read(mix(sources, stages).readers(readers), 320)
        for part, share in ((found[:80], 60), (found[80:120], 20), (found[120:], 50)):
            assert abs(Counter(name[0] for name in part)["a"] - share) <= 1.5
    one, other = mix(sources, [0.75, 0.25]), mix(sources, {"b": 1, "a": 3})
    assert one.describe() == other.describe()
    assert await items(one) == await items(other)


# -- ends and positions -------------------------------------------------------------


async def test_ends() -> None:
    one, other = of("a", 900), of("b", 100)
    found = await items(one.mix(other, weights=[3, 1]))
    assert sorted(found) == sorted(await items(one) + await items(other))
    for name in "ab":
        part = [int(word[1:]) for word in found if word[0] == name]
        assert part == sorted(part)
    short = await items(one.mix(other, weights=[3, 1], until="first"))
    assert short == found[: len(short)]
    assert abs(len(short) - 400) <= 6
    assert Counter(word[0] for word in short)["b"] == 100
    three = mix([of("a", 90), of("b", 9), of("c", 90)], [2, 1, 1])
    rest = Counter(word[0] for word in (await items(three))[48:108])
    assert rest == {"a": pytest.approx(40, abs=2), "c": pytest.approx(20, abs=2)}


TABLE = pa.table({"n": range(13), "text": [f"t {n}" for n in range(13)]})
CHAINS: dict[str, Callable[[], Any]] = {
    "ends": lambda: mix([of("a", 30), of("b", 5), of("c", 17)], [2, 2, 1]),
    "first": lambda: mix([of("a", 30), of("b", 9)], until="first"),
    "stages": lambda: mix([of("a", 30), of("b", 30)], [(0, [1, 3]), (13, [5, 1])]),
    "readers": lambda: endless().readers(4).take(15),
    "in a mixture": lambda: endless().mix(of("d", 40), until="first").shuffle(5),
    "columns": lambda: from_arrow(TABLE).mix(from_arrow(TABLE[3:]).shuffle(4)),
    "epochs": lambda: endless().readers(2).epoch_length(50),
    "of an epoch": lambda: of("a", 40).epoch_length(12).mix(of("b", 3), of("c", 5)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAINS)
async def test_mixtures_resume_anywhere(name: str) -> None:
    whole = await items(CHAINS[name]())
    for count in range(len(whole) + 1):
        stream = CHAINS[name]()
        head, state = await pulled(stream, (1, 3, 64), count)
        middle, state = await read(stream, 3, state)
        rest, _ = await pulled(CHAINS[name](), (5, 64), state=state)
        assert head + middle + rest == whole, count


async def test_a_state_of_an_older_version_is_refused() -> None:
    """It has the words of mixtures before these."""
    stream = of("a", 9).mix(of("a", 9), weights=[2, 1])
    state = opened((await read(stream, 5))[1])
    state["stream"] = {**state["stream"], "seed": 0, "weights": [2.0, 1.0]}
    with pytest.raises(StateMismatchError, match="seed of mix was 0, and is None"):
        stream.load_state_dict(sealed(state))


@pytest.mark.slow
async def test_a_state_is_small() -> None:
    _, state = await read(endless().readers(24), 1000)
    assert len(json.dumps(state)) < 24 * 3 * 150


# -- map-style datasets ---------------------------------------------------------------


@pytest.mark.slow
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=4),
    st.lists(st.integers(1, 6), min_size=8, max_size=8),
    st.integers(1, 20),
    st.sampled_from(["all", "first"]),
)
def test_map_style_datasets_have_the_same_order(
    lengths: list[int], numbers: list[int], start: int, until: Any
) -> None:
    """As streams of one reader have."""
    lists = [
        [f"{source}.{number}" for number in range(length)]
        for source, length in enumerate(lengths)
    ]
    count = len(lists)
    weights: Any = [(0, numbers[:count]), (start, numbers[-count:])]
    mixture = mix(lists, weights, until)
    stream = mix([from_iterable(one) for one in lists], weights, until)
    found = [mixture[place] for place in range(len(mixture))]
    assert found == asyncio.run(items(stream))
    if found:
        assert mixture[-1] == found[-1]
    with pytest.raises(IndexError):
        mixture[len(found)]


def test_shares_of_billions() -> None:
    lengths = 7 * 10**9, 2 * 10**9, 10**9
    starts = [0, *accumulate(lengths)]
    sources = [range(*ends) for ends in pairwise(starts)]
    mixture = mix(sources, [0.7, 0.2, 0.1])
    assert len(mixture) == 10**10
    for at in range(10**9, 10**9 + 2000):
        index = mixture[at]
        source = next(one for one in range(3) if index < starts[one + 1])
        assert abs(index - starts[source] - at * lengths[source] / 10**10) <= 1.5


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_reads_each_kind(kind: Any, num_workers: int) -> None:
    """Beside a plain one; a batch is read at once by those that can."""
    first = kind(12)
    mixture: Any = mix({"a": first, "b": Plain(6)}, [2, 1])
    loader: Any = DataLoader(mixture, 6, collate_fn=list, num_workers=num_workers)
    with loader:
        batches = list(loader)
    found = [square for batch in batches for square in batch]
    assert sorted(found) == sorted(n**2 for n in [*range(12), *range(6)])
    if num_workers == 0 and hasattr(first, "calls"):
        assert first.calls == 3
    state = loader.state_dict()
    loader.load_state_dict(json.loads(json.dumps(state)))


# -- figures ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("fetch", ["loader", "workers"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_figures_by_source(num_workers: int, fetch: Any) -> None:
    """Of what was delivered, also by workers that read, and after a load."""
    options: dict[str, Any] = {"num_workers": num_workers}
    if num_workers:
        options["fetch"] = fetch
    stream = mix({"a": of("a", 8).repeat(), "b": of("b", 99)}, [3, 1], "first")
    found: list[str] = []
    state: Any = None
    for _ in range(2):
        with DataLoader(stream, 4, collate_fn=list, **options) as loader:
            assert loader.stats().sources == {}
            if state is not None:
                loader.load_state_dict(state)
            iterator = iter(loader)
            for _ in range(8):
                found += next(iterator)
            stats, state = loader.stats(), loader.state_dict()
        sources = stats.sources
        assert {name: one.samples for name, one in sources.items()} == Counter(
            name[0] for name in found
        )
        readers = 2 if num_workers and fetch == "workers" else 1
        whole = sources["a"].samples / 8
        assert sources["a"].passes == pytest.approx(whole + 0.5, abs=1)
        assert sources["b"].passes == 1
        assert f"source 'a': {sources['a'].samples} samples" in str(stats)
        assert readers * sources["a"].passes == int(readers * sources["a"].passes)


@pytest.mark.parametrize("times", [None, 1, 2])
def test_passes_of_a_mixture_count_the_one_under_way(times: int | None) -> None:
    """None has started before the first sample, and the first is 1, not 0."""
    again = of("a", 64) if times is None else of("a", 64).repeat(times)
    with DataLoader(mix({"a": again, "b": of("b", 256)}), 32) as loader:
        seen = [loader.stats().sources["a"].passes for _ in loader]
    assert seen[0] == 1
    assert seen[-1] == (times or 1)
