"""``mix``: shares at every prefix, stages, ends, map-style datasets and figures."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aioloader import DataLoader
from aioloader._order.mixture import Schedule
from aioloader._order.ranks import Share
from aioloader._order.stream_states import opened, sealed
from aioloader.datasets import from_arrow, from_iterable, mix
from aioloader.errors import StateMismatchError
from datasets.shards import items, pulled, read
from datasets.test_from_dataset import KINDS, Plain

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
    parts = [schedule.sources(first, Share(one, readers), []) for one in range(readers)]
    order = np.stack(parts, axis=1).ravel()
    before = [
        its for its, _ in schedule.stage(0, []).proportions.counts(first * readers)
    ]
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
            found += [*schedule.sources(len(found), Share(reader, readers), [])]
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
async def test_resumes_anywhere(name: str) -> None:
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
        assert sources["a"].passes == pytest.approx(whole, abs=1)
        assert sources["a"].passes > 0
        assert sources["b"].passes == 0
        assert f"source 'a': {sources['a'].samples} samples" in str(stats)
        assert readers * sources["a"].passes == int(readers * sources["a"].passes)


def test_figures_of_a_mixture_in_a_mixture() -> None:
    inner = mix({"x": of("x", 4).repeat(), "y": of("y", 4).repeat()})
    stream = mix({"inner": inner.shuffle(2), "z": of("z", 50)}).shuffle(3)
    with DataLoader(stream, 8, collate_fn=list) as loader:
        iterator = iter(loader)
        for _ in range(4):
            next(iterator)
        sources = loader.stats().sources
    assert [*sources] == ["inner", "inner/x", "inner/y", "z"]
    assert sources["inner"].samples == pytest.approx(16, abs=3)
    assert sources["inner/x"].samples == pytest.approx(8, abs=4)
