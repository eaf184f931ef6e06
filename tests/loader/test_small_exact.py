"""Small things that are as in torch: numbers, warnings, pipes, words of errors."""

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset
from torch.utils.data.datapipes.iter import IterableWrapper

from aioloader import DataLoader
from working import Numbers

Loader: Any = DataLoader  # options are tables here
Torch: Any = torch.utils.data.DataLoader


def outcome(cls: Any, options: dict[str, Any]) -> Any:
    """Return what a loader delivers, or the type of its error."""
    try:
        return [batch.tolist() for batch in cls(Numbers(5), **options)]
    except Exception as error:  # noqa: BLE001  (whatever torch raises)
        return type(error)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": np.int64(1)},
        {"num_workers": np.float64(1)},
        {"num_workers": np.int64(-1)},
        {"num_workers": 1, "timeout": np.int64(20)},
        {"num_workers": 1, "timeout": np.float32(20)},
        {"num_workers": 1, "timeout": torch.tensor(20)},
        {"timeout": "20"},
        {"num_workers": 1, "prefetch_factor": np.int64(2)},
        {"batch_size": np.int64(2)},
        {"batch_size": 2, "drop_last": np.bool_(True)},
    ],
    ids=str,
)
def test_numbers_of_numpy(options: dict[str, Any]) -> None:
    """They are taken, or refused, where torch does so."""
    assert outcome(Loader, options) == outcome(Torch, options)


class Reporting(IterableDataset[int]):
    """Says that it has two samples, and has six."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[int]:
        return iter(range(6))

    def __repr__(self) -> str:
        return "Reporting()"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_warning_of_a_length(num_workers: int) -> None:
    """In torch's words, for each batch too many; not before ``len`` was called."""
    found = []
    for cls in (Loader, Torch):
        loader = cls(Reporting(), num_workers=num_workers)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            list(loader)
            assert not caught
            len(loader)
            list(loader)
        found.append([str(one.message) for one in caught])
    assert found[0] == found[1]
    assert len(found[0]) == 4


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("shuffle", [True, False, None])
def test_data_pipes(shuffle: Any, num_workers: int) -> None:
    """They are shuffled, seeded and sharded as torch does."""
    found = []
    for cls in (Loader, Torch):
        torch.manual_seed(3)
        pipe = IterableWrapper(range(12)).shuffle().sharding_filter()
        loader = cls(pipe, 3, shuffle=shuffle, num_workers=num_workers)
        found.append([[batch.tolist() for batch in loader] for _ in range(2)])
    assert found[0] == found[1]


DAY = np.datetime64("2020-01-01")


@pytest.mark.parametrize(
    "sample", [DAY, np.array([DAY, DAY]), DAY - DAY, {"day": np.array(DAY)}], ids=str
)
def test_dates(sample: Any) -> None:
    """Torch has no dtype for them: its type of error, and what to do."""
    with pytest.raises(TypeError):
        next(iter(Torch([sample] * 2, 2)))
    with pytest.raises(TypeError, match=r"can't convert .*astype\('int64'\)"):
        next(iter(Loader([sample] * 2, 2)))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("name", ["transform", "collate_fn"])
def test_lambdas_that_return_coroutines(name: str, num_workers: int) -> None:
    """They look plain; nothing would await what they return."""

    async def later(value: Any) -> Any:
        return value

    options = {
        name: lambda value: later(value),  # noqa: PLW0108  (its colour cannot be seen)
        "num_workers": num_workers,
    }
    with pytest.raises(TypeError, match=f"the {name} is a plain function but returned"):
        next(iter(Loader([1, 2], 2, **options)))


class Seeds(Numbers):
    """Tells the seed that its worker began with."""

    def __getitem__(self, index: int) -> int:
        return torch.initial_seed()


def test_the_base_seed_of_persistent_workers() -> None:
    """Given a state they begin anew, from its seed, and keep that, as torchdata's."""
    options: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}

    def make() -> Any:
        return Loader(Seeds(4), 1, rng="worker", **options)

    with make() as loader, make() as resumed:
        iterator = iter(loader)
        seed = next(iterator).item()
        state = loader.state_dict()
        list(iterator)
        assert {batch.item() for batch in resumed} != {seed}
        resumed.load_state_dict(state)
        for _ in range(2):
            assert {batch.item() for batch in resumed} == {seed}


class Uncounted:
    """A batch sampler whose number of batches is not known, as graph samplers say."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0], [1, 2])

    def __len__(self) -> int:
        raise ValueError("the number of batches is ambiguous")


def test_a_length_that_raises_is_not_asked_for() -> None:
    """torch's loader iterates without it."""
    for num_workers in (0, 2):
        loader = DataLoader(
            range(3), batch_sampler=Uncounted(), num_workers=num_workers
        )
        assert [batch.tolist() for batch in loader] == [[0], [1, 2]]
    with pytest.raises(ValueError, match="ambiguous"):
        len(loader)
