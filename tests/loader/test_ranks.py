"""Global batches have the same samples on any number of ranks."""

import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    DistributedSampler,
    RandomSampler,
    TensorDataset,
)

from aioloader import DataLoader, ShuffledIndices, merge_states
from aioloader.datasets import TextDataset, from_iterable
from aioloader.errors import StateMismatchError
from datasets.ranks import of_ranks
from loader.states import begun, left_at, loaded, saved, seeded
from samples import AsyncMap
from stateful import Cursors, Plain
from working import AsyncNumbers, Numbers

GLOBAL = 24
WORLDS = [1, 2, 3, 4, 8]
Loader: Any = DataLoader  # options are tables here


class AsyncLines(AsyncMap):
    """An async iterable without a state."""

    async def __aiter__(self) -> Any:
        for index in range(self.n):
            yield index


class Sized(Plain):
    """An iterable with a length."""

    def __len__(self) -> int:
        return self.n


KINDS: dict[str, Callable[[int], Any]] = {
    "map": Numbers,
    "async map": AsyncNumbers,
    "tensors": lambda n: TensorDataset(torch.arange(n)),
    "iterable": Sized,
    "async iterable": AsyncLines,
    "stateful": Cursors,
}
ORDERS: dict[str, Callable[[int], dict[str, Any]]] = {
    "plain": lambda _: {},
    "shuffle": lambda _: {"shuffle": True, "generator": seeded(5)},
    "sampler": lambda n: {"sampler": ShuffledIndices(n, 3)},
    "list": lambda n: {"sampler": list(range(n))[::-1]},
}


def loaders(
    kind: str, n: int, world_size: int, order: str = "plain", **options: Any
) -> list[DataLoader[Any]]:
    """Return the loaders of all ranks."""
    size, given = GLOBAL // world_size, {"world_size": world_size, **options}
    return [
        Loader(KINDS[kind](n), size, rank=rank, **ORDERS[order](n), **given)
        for rank in range(world_size)
    ]


def listed(batch: Any) -> list[int]:
    """Return the samples of a batch, without padding."""
    if isinstance(batch, (list, tuple)) and len(batch) == 2:
        batch, mask = batch
        batch = batch[0] if isinstance(batch, list) else batch
        return list(batch[mask].tolist())
    batch = batch[0] if isinstance(batch, list) else batch
    return list(batch.tolist())


def batches(ranks: list[Any]) -> list[list[int]]:
    """Return the global batches: the samples of all ranks, sorted."""
    shares = [[listed(batch) for batch in loader] for loader in ranks]
    return [
        sorted(s for rank in shares if number < len(rank) for s in rank[number])
        for number in range(max(map(len, shares)))
    ]


# -- the same samples -------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@given(n=st.integers(1, 100), world_size=st.sampled_from(WORLDS))
def test_ranks_lose_and_repeat_nothing(order: str, n: int, world_size: int) -> None:
    """With uneven shares, or with padding and a mask."""
    whole = batches(loaders("map", n, 1, order, tail="uneven"))
    assert sorted(sum(whole, [])) == list(range(n))  # noqa: RUF017
    assert batches(loaders("map", n, world_size, order, tail="uneven")) == whole
    assert batches(loaders("map", n, world_size, order, tail="pad")) == whole


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", WORLDS)
def test_any_dataset_gives_the_same_global_batches(kind: str, world_size: int) -> None:
    """On any number of ranks, for several lengths."""
    for n in (0, 5, 48, 53):
        whole = batches(loaders(kind, n, 1, tail="uneven"))
        assert [len(batch) for batch in whole] == [24] * (n // 24) + [n % 24] * (
            n % 24 > 0
        )
        assert batches(loaders(kind, n, world_size, tail="uneven")) == whole
        if kind != "stateful":
            assert batches(loaders(kind, n, world_size, tail="pad")) == whole


@pytest.mark.parametrize(
    "kind", ["map", pytest.param("iterable", marks=pytest.mark.slow)]
)
@given(n=st.integers(0, 100), world_size=st.sampled_from(WORLDS), drop=st.booleans())
def test_tails_set_the_shares(kind: str, n: int, world_size: int, drop: bool) -> None:
    """The number of samples of each rank, and the length of its loader."""
    sizes = {}
    for tail in ("wrap", "pad", "drop", "uneven"):
        ranks = loaders(kind, n, world_size, tail=tail, drop_last=drop)
        shares = [list(loader) for loader in ranks]
        assert [len(rank) for rank in shares] == [len(loader) for loader in ranks]
        sizes[tail] = [
            sum(len(batch[0] if tail == "pad" else batch) for batch in rank)
            for rank in shares
        ]
    n = n - n % GLOBAL if drop else n
    most, least = -(-n // world_size), n // world_size
    assert sizes["wrap"] == sizes["pad"] == [most] * world_size
    assert sizes["drop"] == [least] * world_size
    left_over = n % world_size
    assert sizes["uneven"] == [least + (rank < left_over) for rank in range(world_size)]


@given(n=st.integers(1, 100), world_size=st.sampled_from(WORLDS))
def test_ranks_are_those_of_distributed_sampler(n: int, world_size: int) -> None:
    """Without shuffling."""
    data: Any = range(n)
    for rank, loader in enumerate(loaders("map", n, world_size)):
        theirs: Any = DistributedSampler(data, world_size, rank, shuffle=False)
        samples = [sample for batch in loader for sample in listed(batch)]
        assert samples == list(theirs)


def test_a_distributed_sampler_is_not_split_again() -> None:
    """A DistributedSampler has split the samples already."""
    data: Any = range(10)
    loader: Any = DataLoader(
        Numbers(10), 2, sampler=DistributedSampler(data, 2, 1, shuffle=False)
    )
    assert [batch.tolist() for batch in loader] == [[1, 3], [5, 7], [9]]


# -- resumed on other ranks -------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* has no state_dict:UserWarning")
@pytest.mark.parametrize("tail", ["uneven", "pad"])
@pytest.mark.parametrize(
    ("kind", "order"),
    [
        ("map", "plain"),
        ("map", "shuffle"),
        ("map", "list"),
        ("async map", "sampler"),
        ("tensors", "shuffle"),
        ("iterable", "plain"),
        ("async iterable", "plain"),
        ("stateful", "plain"),
    ],
)
@pytest.mark.parametrize("k", [0, 1, 2, 3, 4])
def test_three_ranks_resume_four(kind: str, order: str, tail: str, k: int) -> None:
    """From the state of any of the four, nothing is lost or repeated."""
    whole = batches(loaders(kind, 101, 1, order, tail="uneven"))
    assert len(whole) == 5
    four = loaders(kind, 101, 4, order, tail=tail)
    for state in [left_at(loader, k) for loader in four]:
        three = loaders(kind, 101, 3, order, tail=tail)
        assert batches([loaded(loader, state) for loader in three]) == whole[k:]


@pytest.mark.parametrize("delivered", [0, 1])
@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        (lambda seed: ShuffledIndices(60, seed), "seed of the order is"),
        (
            lambda seed: RandomSampler(range(60), replacement=seed == 1),
            "replacement of the order is",
        ),
        (lambda seed: range(60 + seed), "length of the order is"),
        (
            lambda seed: RandomSampler(range(60), generator=seeded(seed)),
            "generator of the order is {'seed': 1, .* {'seed': 2, .{,70} in another",
        ),
    ],
)
def test_ranks_with_different_orders_are_not_merged(
    sampler: Callable[[int], Any], words: str, delivered: int
) -> None:
    """One of the orders would be lost."""
    delivered = max(delivered, "generator" in words)  # before it, none is drawn
    states = [state_of_rank(rank, sampler(1), delivered) for rank in range(2)]
    assert merge_states(states) == states[0]
    states[1] = state_of_rank(1, sampler(2), delivered)
    words = f"not of one run .*: {words}.* sampler, seeded alike"
    with pytest.raises(StateMismatchError, match=words):
        merge_states(states)


def state_of_rank(rank: int, sampler: Any, delivered: int) -> Any:
    """Return the state of one rank of two after some batches."""
    torch.manual_seed(3)
    loader = Loader(Numbers(60), 6, sampler=sampler, rank=rank, world_size=2)
    iterator, state = begun(loader, delivered)
    iterator.close()
    return state


def test_rank_auto_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``rank="auto"``, the environment does not matter."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert len(list(Loader(Numbers(9), 3))) == 3
    loader = Loader(Numbers(9), 3, rank="auto")
    assert len(loader) == 1
    (batch,) = loader
    assert batch.tolist() == [1, 4, 7]
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(ValueError, match="needs both RANK and WORLD_SIZE"):
        iter(loader)
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ValueError, match="'WORLD_SIZE': 'many'"):
        len(loader)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ValueError, match=r"rank must be in range\(1\), got 1"):
        iter(loader)
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.delenv("RANK")
    assert len(loader) == len(list(loader)) == 3


class Group:
    """A fake of torch's process group, whose collectives all fail."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.rank, self.world_size, self.is_up = 1, 3, True
        patch.setattr(dist, "is_initialized", lambda: self.is_up)
        patch.setattr(dist, "get_rank", lambda: self.rank)
        patch.setattr(dist, "get_world_size", lambda: self.world_size)
        for name in dir(dist):
            collective = ("broadcast", "all_", "gather", "scatter", "barrier", "send")
            if name.startswith((*collective, "reduce", "monitored", "recv", "isend")):
                patch.setattr(dist, name, None)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    """Be rank 1 of 3."""
    return Group(monkeypatch)


def test_rank_auto_uses_a_group(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process group wins over the environment; it may be made after the loader."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    group.is_up = False
    options: dict[str, Any] = {"rank": "auto", "generator": torch.Generator()}
    loader = Loader(Numbers(9), 3, **options)
    assert len(loader) == 2
    group.is_up = True
    assert len(loader) == 1
    iterator = iter(loader)
    group.is_up = False  # an epoch keeps its ranks
    assert [batch.tolist() for batch in iterator] == [[1, 4, 7]]
    assert loader.state_dict()["batch_size"] == 9
    assert [batch.tolist() for batch in loader] == [[0, 2, 4], [6, 8]]
    assert loader.state_dict()["batch_size"] == 6
    assert Loader(Numbers(9), 3, **options).state_dict()["batch_size"] == 6


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_group_alone_splits_nothing(kind: str, group: Group) -> None:
    """As in torch, and without a warning: the loader may be for validation."""
    batches = [listed(batch) for batch in Loader(KINDS[kind](9), 3)]
    assert batches == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


@pytest.mark.slow
def test_persistent_workers_follow_a_change_of_ranks(group: Group) -> None:
    options = {"num_workers": 1, "persistent_workers": True, "rank": "auto"}
    with Loader(Plain(9), 3, fetch="workers", **options) as loader:
        assert [listed(batch) for batch in loader] == [[1, 4, 7]]
        group.rank = 2
        assert [listed(batch) for batch in loader] == [[2, 5, 8]]
    with Loader(Numbers(9), 3, **options) as loader:
        assert [listed(batch) for batch in loader] == [[2, 5, 8]]
        group.world_size, group.rank = 1, 0
        assert [listed(batch) for batch in loader] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


ALL_ALIKE = "runs 3 ranks, and this DataLoader delivers every sample on each"
STREAM = from_iterable(range(9))


@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_a_tail_without_ranks_changes_no_order(tail: Any) -> None:
    """The order is torch's."""
    torch.manual_seed(0)
    expected = list(Loader(Numbers(9), None, shuffle=True))
    torch.manual_seed(0)
    batches = list(Loader(Numbers(9), None, shuffle=True, tail=tail))
    assert expected == [batch[0] if tail == "pad" else batch for batch in batches]


def _named(value: object) -> str:
    """Name a parameter without an address: processes must agree on the tests."""
    return re.sub("<(.*) object at .*>", r"\1", str(value))


@pytest.mark.parametrize(
    ("dataset", "options", "warns"),
    [
        (Numbers(9), {"shuffle": True}, True),
        (AsyncNumbers(9), {"shuffle": True}, True),
        (Numbers(9), {"shuffle": True, "tail": "drop"}, True),
        (STREAM, {}, True),
        (STREAM, {"tail": "drop"}, True),
        (STREAM.shuffle(3), {}, True),
        (Numbers(9), {}, False),
        (Plain(9), {}, False),
        (Numbers(9), {"sampler": list(range(9))}, False),
        (Numbers(9), {"batch_sampler": [[1, 2]]}, False),
        (Numbers(9), {"shuffle": True, "rank": "auto"}, False),
        (Numbers(9), {"shuffle": True, "rank": 0, "world_size": 1}, False),
        (STREAM, {"rank": "auto", "tail": "uneven"}, False),
        (STREAM, {"rank": 0, "world_size": 1}, False),
        (STREAM.shard(1, 3), {"tail": "uneven"}, False),
    ],
    ids=_named,
)
def test_repeating_all_samples_on_each_rank_warns(
    dataset: Any, options: dict[str, Any], warns: bool, group: Group
) -> None:
    """Each loader warns once, when it is iterated."""
    for is_up, world_size in ((False, 3), (True, 1), (True, 3)):
        group.is_up, group.world_size = is_up, world_size
        group.rank = min(group.rank, world_size - 1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loader = Loader(dataset, **options)
            assert not caught
            for _ in range(2):
                iter(loader).close()
        expected = [ALL_ALIKE] if warns and is_up and world_size == 3 else []
        assert [
            str(warning.message)[18:].partition(" of them")[0] for warning in caught
        ] == expected
        assert all(warning.filename == __file__ for warning in caught)


def test_splitting_the_samples_twice_is_refused(group: Group) -> None:
    """Each rank would get a part of a part: by a sampler, or by ``shard``."""
    data: Any = range(12)
    sampler: Any = DistributedSampler(data, 3, 1)
    numbers = {"rank": 1, "world_size": 3}
    for options in (
        {"sampler": sampler},
        {"batch_sampler": BatchSampler(sampler, 2, drop_last=False)},
    ):
        with pytest.raises(
            ValueError, match="both split the samples: each rank would get 1 of 9"
        ):
            Loader(Numbers(12), **options, **numbers)
        loader = Loader(Numbers(12), **options, rank="auto")
        for use in (iter, len):
            with pytest.raises(ValueError, match="leave out one of them"):
                use(loader)
        group.is_up = False
        assert len(list(loader)) in {2, 4}
        group.is_up = True
        assert list(Loader(Numbers(12), **options, rank=0, world_size=1))
    with pytest.raises(ValueError, match=r"is sharded by shard\(0, 2\)"):
        Loader(STREAM.shard(0, 2), **numbers)
    Loader(STREAM.shard(1, 3), **numbers)
    with pytest.raises(ValueError, match=r"is sharded by shard\(1, 3\)"):
        Loader(ChainDataset([STREAM.shard(1, 3)]), **numbers)
    Loader(ChainDataset([STREAM]), **numbers)


@pytest.mark.parametrize(
    ("tail", "last", "shorter"), [("drop", (0, 2), (0, 3)), ("uneven", (0, 3), (2, 3))]
)
def test_the_epoch_is_over_for_a_short_rank(tail: str, last: Any, shorter: Any) -> None:
    """Another rank's state after its last batch ends the epoch for it."""
    first, second = (
        Loader(Numbers(38), 12 // ranks, rank=rank, world_size=ranks, tail=tail)
        for rank, ranks in (last, shorter)
    )
    iterator = iter(first)
    assert len([next(iterator) for _ in range(len(first))]) == len(second) + 1
    second.load_state_dict(saved(first))
    assert [*second] == []


# -- streams ---------------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    """Return the paths of 24 shards of uneven lengths."""
    paths = []
    for shard in range(24):
        path = tmp_path / f"{shard:02}.txt"
        lines = (f"{shard}-{row}" for row in range(9 + shard % 5))
        path.write_text("\n".join(lines))
        paths.append(str(path))
    return paths


def of_stream(dataset: Any, ranks: int) -> list[Any]:
    options: Any = {"tail": "uneven", "collate_fn": list}
    return of_ranks(dataset, ranks, GLOBAL // ranks, **options)


def samples(loaders: list[Any]) -> list[str]:
    return [sample for loader in loaders for batch in loader for sample in batch]


def test_states_of_different_moments_are_not_merged(shards: list[str]) -> None:
    """States of some of the ranks are not merged, either."""
    ranks = of_stream(TextDataset(shards).readers(24), 2)
    states = [left_at(loader, count) for count, loader in enumerate(ranks, 1)]
    with pytest.raises(StateMismatchError, match="not of one run and one moment"):
        merge_states(states)
    with pytest.raises(StateMismatchError, match="missing"):
        merge_states(states[:1])
    with pytest.raises(ValueError, match="no states"):
        merge_states([])


# -- workers that read, and layouts of readers ------------------------------------


@pytest.mark.filterwarnings("ignore:(.*take turns at|This DataLoader will create)")
@pytest.mark.parametrize("ranks", [1, 2])
def test_only_as_many_workers_resume_mid_round(ranks: int, shards: list[str]) -> None:
    """Two of three workers have delivered one batch less; the ranks may change."""
    stream = TextDataset(shards)

    def made(ranks: int, workers: int = 3) -> Any:
        options: Any = {"num_workers": workers, "fetch": "workers", "tail": "uneven"}
        return of_ranks(stream, ranks, 4 // ranks, collate_fn=list, **options)

    (loader,) = made(1)
    delivered, state = next(iter(loader)), merge_states([saved(loader)])
    loader.close()
    delivered += samples([loaded(loader, state) for loader in made(ranks)])
    assert len(delivered) == len({*delivered}) == 24 * 11 - 2
    with pytest.raises(StateMismatchError, match=r"3 workers .* after 1 batches: some"):
        made(1, 2)[0].load_state_dict(state)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*take turns at:UserWarning")
@pytest.mark.parametrize("readers", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_layouts_that_iterate_merge_after_any_batch(
    readers: int, ranks: int, size: int, tmp_path: Path
) -> None:
    """Other layouts raise before the first batch; the shards are very uneven."""
    for shard in range(6):
        text = "".join(f"{shard}-{row}\n" for row in range(2 + 7 * (shard % 3)))
        (tmp_path / f"{shard}.txt").write_text(text)
    stream = TextDataset("*.txt", store=tmp_path).readers(readers)
    made = of_ranks(stream, ranks, size, tail="uneven")
    if size * math.gcd(readers, ranks) < readers:
        with pytest.raises(ValueError, match=r"cannot be merged; use a batch_size of"):
            iter(made[0])
        return
    iterators = [iter(loader) for loader in made]
    while [b for b in [next(it, None) for it in iterators] if b is not None]:
        merge_states([loader.state_dict() for loader in made])


@pytest.mark.filterwarnings("ignore:.*take turns at:UserWarning")
@pytest.mark.parametrize("size", [1, 2])
def test_layouts_whose_readers_end_together_iterate(size: int) -> None:
    """No batch is empty before the end."""
    stream = from_iterable(range(9)).readers(3).epoch_length(24)
    made = of_ranks(stream, 2, size)
    iterators = [iter(loader) for loader in made]
    while [b for b in [next(it, None) for it in iterators] if b is not None]:
        merge_states([loader.state_dict() for loader in made])
