"""Which rank a loader serves: it deals nothing unless it is asked to."""

import re
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    DistributedSampler,
)

from aioloader import DataLoader
from aioloader.datasets import from_iterable
from loader.test_ranks import KINDS, listed
from stateful import Plain
from working import AsyncNumbers, Numbers

Loader: Any = DataLoader  # options are tables here


def test_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only when it is asked for."""
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
    """Stands for torch's process group; any collective fails."""

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


def test_of_the_process_group(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """It wins over the environment, and may be made after the loader."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    group.is_up = False
    options: dict[str, Any] = {"rank": "auto", "generator": torch.Generator()}
    loader = Loader(Numbers(9), 3, **options)
    assert len(loader) == 2
    group.is_up = True
    assert len(loader) == 1
    iterator = iter(loader)
    group.is_up = False  # what has begun stays what it is
    assert [batch.tolist() for batch in iterator] == [[1, 4, 7]]
    assert loader.state_dict()["batch_size"] == 9
    assert [batch.tolist() for batch in loader] == [[0, 2, 4], [6, 8]]
    assert loader.state_dict()["batch_size"] == 6
    assert Loader(Numbers(9), 3, **options).state_dict()["batch_size"] == 6


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_dealt_unasked(kind: str, group: Group) -> None:
    """As with torch's loader, and without a word: validation, say."""
    found = [listed(batch) for batch in Loader(KINDS[kind](9), 3)]
    assert found == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


@pytest.mark.slow
def test_workers_that_persist_serve_the_ranks_of_their_epoch(group: Group) -> None:
    """What was begun ahead, too."""
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


def _named(value: object) -> str:
    """Name a parameter without an address: processes must agree on the tests."""
    return re.sub("<(.*) object at .*>", r"\1", str(value))


@pytest.mark.parametrize(
    ("dataset", "options", "warns"),
    [
        (Numbers(9), {"shuffle": True}, True),
        (AsyncNumbers(9), {"shuffle": True}, True),
        (STREAM, {}, True),
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
def test_the_warning(
    dataset: Any, options: dict[str, Any], warns: bool, group: Group
) -> None:
    """Once for each loader, when it is iterated; not on one rank."""
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
            str(one.message)[18:].partition(" of them")[0] for one in caught
        ] == expected
        assert all(one.filename == __file__ for one in caught)


def test_two_deals(group: Group) -> None:
    """Half the data of each rank, with a sampler that deals too: refused."""
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
    ("options", "error", "what"),
    [
        ({"rank": 3, "world_size": 3}, ValueError, r"in range\(3\), got 3"),
        ({"rank": -1, "world_size": 3}, ValueError, r"in range\(3\), got -1"),
        ({"rank": 1}, ValueError, "go together, got rank=1 and world_size=None"),
        ({"world_size": 2}, ValueError, "go together, got rank=None"),
        ({"rank": 0.5, "world_size": 2}, TypeError, "must be an integer or 'auto'"),
        ({"rank": "auto", "world_size": 2}, ValueError, "excludes world_size"),
        ({"rank": "env"}, ValueError, "'env' is now rank='auto'"),
        ({"rank": "me", "world_size": 2}, TypeError, "got 'me' and 2"),
        ({"tail": "head"}, ValueError, "tail must be .*, got 'head'"),
    ],
    ids=str,
)
def test_arguments(options: dict[str, Any], error: type[Exception], what: str) -> None:
    """They are checked at once."""
    with pytest.raises(error, match=what):
        Loader(Numbers(9), 3, **options)
