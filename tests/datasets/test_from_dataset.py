"""Map-style datasets as streams, and mixtures: shares at every prefix, and resuming."""

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
    """Squares of the indices, one of which may fail."""

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
    """A plain dataset whose items are coroutines."""

    def __getitem__(self, index: int) -> Any:
        return Coroutines(self.length, self.bad)[index]


KINDS: list[type[Plain]] = [Plain, Together, Coroutines, CoroutinesTogether, Wrapped]
KIND = pytest.mark.parametrize("kind", KINDS)


@KIND
@pytest.mark.parametrize("shuffle", [False, True])
async def test_each_epoch_has_all_samples(kind: type[Plain], shuffle: bool) -> None:
    stream = from_dataset(kind(), shuffle=shuffle, seed=4)
    squares = [index**2 for index in range(N)]
    epochs = [await items(stream) for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [squares] * 3
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
    assert [sample for sample in block if not hasattr(sample, "error")] == [
        index**2 for index in range(N) if index != 5
    ]
    assert str(block[5].error) == "no 5"
    named = [] if kind is Wrapped else [f"aioloader: sample 5 of {kind.__name__}"]
    place = "aioloader: in 'from_dataset' of the stream"
    assert block[5].error.__notes__ == [*named, place]


@pytest.mark.slow
@KIND
async def test_reading_resumes_after_any_sample(kind: type[Plain]) -> None:
    stream = from_dataset(kind(), shuffle=True)
    stream.set_epoch(0)
    whole = await items(stream)
    await check_resumes(stream, whole, range(N + 1))
    _, state = await read(stream, 9)
    assert state["streams"]["0"]["state"] == {"up": {"at": 9}}


# -- where it is read -----------------------------------------------------------------


async def test_a_plain_dataset_is_read_in_one_thread() -> None:
    """For all readers together, and not on the loop."""
    dataset = Plain(200)
    stream = from_dataset(dataset).readers(4).shard(0, 1)
    assert sorted(await items(stream)) == [index**2 for index in range(200)]
    assert len(dataset.threads) == 1
    assert threading.current_thread() not in dataset.threads
    assert not any(thread.is_alive() for thread in dataset.threads)


@pytest.mark.parametrize(("readers", "least"), [(1, 6), (3, 2)])
async def test_concurrency_bounds_all_readers(readers: int, least: int) -> None:
    dataset = Coroutines(60)
    await items(from_dataset(dataset, concurrency=6).readers(readers))
    assert least <= dataset.most <= 6


async def test_getitems_reads_a_block_in_one_call() -> None:
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
async def test_torch_wrappers_of_coroutines_are_read(wrapper: str) -> None:
    samples = await items(from_dataset(WRAPPERS[wrapper]()))
    squares = [index**2 for index in range(N)]
    wanted: Any = {"concat": [*squares[:7], *squares]}
    wanted["stack"] = [(square, square) for square in squares]
    assert samples == wanted.get(wrapper, squares)


async def test_a_lifespan_is_entered_once_for_all_readers() -> None:
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
        parts = [[masked([batch]) for batch in part] for part in parts]
    elif tail != "uneven":
        assert len({*map(len, parts)}) == 1
    assert [*map(len, loaders)] == [*map(len, parts)]
    delivered = Counter(x for part in parts for batch in part for x in batch)
    whole = Counter(index**2 for index in range(length))
    if tail in {"uneven", "pad"}:
        assert delivered == whole
    elif tail == "drop":
        assert delivered <= whole
        assert delivered.total() == length - length % ranks
    else:
        assert delivered >= whole
        assert delivered.total() == length + -length % ranks


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_gives_the_batches_of_its_dataset(num_workers: int) -> None:
    dataset: Any = TensorDataset(torch.arange(50))
    options: Any = {"num_workers": 1, "fetch": "workers"} if num_workers else {}
    batches = [*DataLoader(from_dataset(dataset), 8, **options)]
    for (batch,), (expected,) in zip(batches, DataLoader(dataset, 8), strict=True):
        assert torch.equal(batch, expected)


async def test_each_repeated_pass_has_another_order() -> None:
    stream = from_dataset(Plain(), shuffle=True).repeat().epoch_length(60)
    samples = await items(stream)
    assert sorted(samples[:N]) == sorted(samples[N : 2 * N])
    assert samples[:N] != samples[N : 2 * N]
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
    """Return each source's exact share of the whole."""
    exact = [Fraction(str(weight)) for weight in weights]
    return [float(weight / sum(exact)) for weight in exact]


# -- shares -----------------------------------------------------------------------


@given(WEIGHTS, st.integers(1, 30), st.integers(0, 10**9))
@example([0.9, 0.09, 0.01], 100, 0)
@example([1, 1], 2, 10**9)
@example([1e-9, 1, 1, 1, 2, 3, 5], 13, 0)
def test_each_source_has_its_share(weights: Any, readers: int, begin: int) -> None:
    """At every prefix of the order of all readers, however far from the start."""
    schedule = Schedule([*map(str, range(len(weights)))], weights, "all")
    first = begin // readers
    parts = [
        schedule.sources(first, ReaderShare(n, readers), []) for n in range(readers)
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
    """Even if the weights and the readers have common divisors."""
    schedule = Schedule([*map(str, range(len(weights)))], weights, "all")
    for reader in range(readers):
        order: list[int] = []
        while len(order) < 2000:
            order += [*schedule.sources(len(order), ReaderShare(reader, readers), [])]
        counts = np.bincount(order, minlength=len(weights)) / len(order)
        assert counts == pytest.approx(shares(weights), rel=0.05)


async def test_weights_may_have_names_and_stages() -> None:
    stages: Any = [(0, {"b": 1, "a": 3}), (80, [1, 1]), (120, {"a": 0.25, "b": 0.75})]
    sources = {"a": of("a", 999), "b": of("b", 999)}
    for readers in (1, 3):
        names, _ = await read(mix(sources, stages).readers(readers), 320)
        for part, share in ((names[:80], 60), (names[80:120], 20), (names[120:], 50)):
            assert abs(Counter(name[0] for name in part)["a"] - share) <= 1.5
    listed, named = mix(sources, [0.75, 0.25]), mix(sources, {"b": 1, "a": 3})
    assert listed.describe() == named.describe()
    assert await items(listed) == await items(named)


# -- ends and positions -------------------------------------------------------------


async def test_mixtures_end_with_all_or_the_first_source() -> None:
    a, b = of("a", 900), of("b", 100)
    samples = await items(a.mix(b, weights=[3, 1]))
    assert sorted(samples) == sorted(await items(a) + await items(b))
    for name in "ab":
        part = [int(word[1:]) for word in samples if word[0] == name]
        assert part == sorted(part)
    short = await items(a.mix(b, weights=[3, 1], until="first"))
    assert short == samples[: len(short)]
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
async def test_mixtures_resume_after_any_sample(name: str) -> None:
    whole = await items(CHAINS[name]())
    for count in range(len(whole) + 1):
        stream = CHAINS[name]()
        head, state = await pulled(stream, (1, 3, 64), count)
        middle, state = await read(stream, 3, state)
        rest, _ = await pulled(CHAINS[name](), (5, 64), state=state)
        assert head + middle + rest == whole, count


async def test_a_state_of_an_older_version_is_refused() -> None:
    """Its description of the mixture has other fields."""
    stream = of("a", 9).mix(of("a", 9), weights=[2, 1])
    state = opened((await read(stream, 5))[1])
    state["stream"] = {**state["stream"], "seed": 0, "weights": [2.0, 1.0]}
    with pytest.raises(StateMismatchError, match="seed of mix was 0, and is None"):
        stream.load_state_dict(sealed(state))


@pytest.mark.slow
async def test_a_state_of_24_readers_is_small() -> None:
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
def test_map_style_mixtures_have_the_order_of_streams(
    lengths: list[int], numbers: list[int], start: int, until: Any
) -> None:
    lists = [
        [f"{source}.{number}" for number in range(length)]
        for source, length in enumerate(lengths)
    ]
    count = len(lists)
    weights: Any = [(0, numbers[:count]), (start, numbers[-count:])]
    mixture = mix(lists, weights, until)
    stream = mix([from_iterable(source) for source in lists], weights, until)
    samples = [mixture[place] for place in range(len(mixture))]
    assert samples == asyncio.run(items(stream))
    if samples:
        assert mixture[-1] == samples[-1]
    with pytest.raises(IndexError):
        mixture[len(samples)]


def test_shares_hold_among_billions_of_samples() -> None:
    lengths = 7 * 10**9, 2 * 10**9, 10**9
    starts = [0, *accumulate(lengths)]
    sources = [range(*ends) for ends in pairwise(starts)]
    mixture = mix(sources, [0.7, 0.2, 0.1])
    assert len(mixture) == 10**10
    for place in range(10**9, 10**9 + 2000):
        index = mixture[place]
        source = next(n for n in range(3) if index < starts[n + 1])
        assert abs(index - starts[source] - place * lengths[source] / 10**10) <= 1.5


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_reads_mixtures_of_each_kind(kind: Any, num_workers: int) -> None:
    """Next to a plain dataset; __getitems__ reads each batch in one call."""
    first = kind(12)
    mixture: Any = mix({"a": first, "b": Plain(6)}, [2, 1])
    loader: Any = DataLoader(mixture, 6, collate_fn=list, num_workers=num_workers)
    with loader:
        batches = list(loader)
    squares = [square for batch in batches for square in batch]
    assert sorted(squares) == sorted(n**2 for n in [*range(12), *range(6)])
    if num_workers == 0 and hasattr(first, "calls"):
        assert first.calls == 3
    state = loader.state_dict()
    loader.load_state_dict(json.loads(json.dumps(state)))


# -- figures ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("fetch", ["loader", "workers"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_stats_count_delivered_samples_by_source(num_workers: int, fetch: Any) -> None:
    """Also if workers read, and after a state was loaded."""
    options: dict[str, Any] = {"num_workers": num_workers}
    if num_workers:
        options["fetch"] = fetch
    stream = mix({"a": of("a", 8).repeat(), "b": of("b", 99)}, [3, 1], "first")
    samples: list[str] = []
    state: Any = None
    for _ in range(2):
        with DataLoader(stream, 4, collate_fn=list, **options) as loader:
            assert loader.stats().sources == {}
            if state is not None:
                loader.load_state_dict(state)
            iterator = iter(loader)
            for _ in range(8):
                samples += next(iterator)
            stats, state = loader.stats(), loader.state_dict()
        sources = stats.sources
        assert {name: source.samples for name, source in sources.items()} == Counter(
            name[0] for name in samples
        )
        readers = 2 if num_workers and fetch == "workers" else 1
        whole = sources["a"].samples / 8
        assert sources["a"].passes == pytest.approx(whole + 0.5, abs=1)
        assert sources["b"].passes == 1
        assert f"source 'a': {sources['a'].samples} samples" in str(stats)
        assert readers * sources["a"].passes == int(readers * sources["a"].passes)


@pytest.mark.parametrize("times", [None, 1, 2])
def test_passes_include_the_one_under_way(times: int | None) -> None:
    """Before the first sample there are none; the first pass counts as 1."""
    again = of("a", 64) if times is None else of("a", 64).repeat(times)
    with DataLoader(mix({"a": again, "b": of("b", 256)}), 32) as loader:
        seen = [loader.stats().sources["a"].passes for _ in loader]
    assert seen[0] == 1
    assert seen[-1] == (times or 1)
