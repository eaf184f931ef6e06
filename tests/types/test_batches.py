"""User code whose batches have types: checked by mypy and pyright, and run.

``assert_type`` checks the inferred type; the line after it, that the type is true.
An ``ignore`` that is not needed is an error of both checkers.
"""

from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple, assert_type

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from aioloader import DataLoader, Device, Skip, progress


class Sized:
    def __len__(self) -> int:
        return 4


class Vectors(Sized, Dataset[Tensor]):
    def __getitem__(self, index: int) -> Tensor:
        return torch.full((3,), index)


class Labelled(Sized, Dataset[tuple[Tensor, int]]):
    """Pairs, as most datasets have."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((3,), index), index


class Remote(Sized):
    """Read by a coroutine function; without a base class of torch."""

    async def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((3,), index)}


class Stream:
    async def __aiter__(self) -> AsyncIterator[Tensor]:
        for number in range(4):
            yield torch.tensor(number)


class Numbers(IterableDataset[int]):
    """Torch's kind of stream."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class Point(NamedTuple):
    """Stays a named tuple in batches, with other types of fields."""

    x: Tensor
    name: str


POINTS = [Point(torch.tensor(number), str(number)) for number in range(4)]
UNTYPED: Dataset[Any] = Vectors()


def lengths(samples: list[Tensor]) -> list[int]:
    """Collate to a list of numbers."""
    return [len(sample) for sample in samples]


async def fetched(samples: list[Tensor]) -> set[int]:
    """Collate by a coroutine function."""
    return {int(sample[0]) for sample in samples}


def decoded(sample: Tensor) -> tuple[Tensor, int]:
    """Transform to a pair."""
    return sample, 1


async def looked_up(sample: Tensor) -> dict[str, Tensor]:
    """Transform by a coroutine function."""
    return {"x": sample}


def named(sample: Tensor) -> str:
    """Transform to a type whose batches are lists."""
    return str(sample)


async def test_batches_of_tensors_are_tensors() -> None:
    """By ``for``, ``async for`` and ``progress``."""
    loader = DataLoader(Vectors(), batch_size=2, shuffle=True, num_workers=0)
    assert_type(loader, DataLoader[Tensor])
    for batch in loader:
        assert_type(batch, Tensor)
        assert type(batch) is Tensor
    assert_type(next(iter(loader)), Tensor)
    assert type(next(iter(loader))) is Tensor
    async for batch in loader:
        assert_type(batch, Tensor)
        assert type(batch) is Tensor
    for batch in progress(loader):
        assert_type(batch, Tensor)
        assert type(batch) is Tensor


def test_batches_of_numbers_are_tensors() -> None:
    """From a list, a range and a stream."""
    for batch in DataLoader([1, 2, 3]):
        assert_type(batch, Tensor)
        assert type(batch) is Tensor
    assert_type(DataLoader(range(4), 2), DataLoader[Tensor])
    assert_type(DataLoader([0.5]), DataLoader[Tensor])
    for batch in DataLoader(Numbers(), batch_size=2):
        assert_type(batch, Tensor)
        assert type(batch) is Tensor


def test_batches_of_tuples_are_lists() -> None:
    for batch in DataLoader(Labelled(), batch_size=2):
        assert_type(batch, list[Tensor])
        assert type(batch) is list
    for vectors, labels in DataLoader(Labelled(), batch_size=2):
        assert_type(vectors, Tensor)
        assert type(vectors) is type(labels) is Tensor


async def test_awaited_samples_have_their_type() -> None:
    """Of map-style datasets and of streams."""
    async for batch in DataLoader(Remote(), batch_size=2):
        assert_type(batch, dict[str, Tensor])
        assert type(batch["x"]) is Tensor
    async for tensor in DataLoader(Stream(), batch_size=2):
        assert_type(tensor, Tensor)
        assert type(tensor) is Tensor


async def test_a_batch_has_the_type_that_collate_fn_returns() -> None:
    """A coroutine's result counts; there may be a transform."""
    for batch in DataLoader(Vectors(), batch_size=2, collate_fn=lengths):
        assert_type(batch, list[int])
        assert batch == [3, 3]
    for sample in DataLoader(Vectors(), batch_size=None, collate_fn=len):
        assert_type(sample, int)
        assert sample == 3
    async for numbers in DataLoader(Vectors(), 4, collate_fn=fetched):
        assert_type(numbers, set[int])
        assert numbers == {0, 1, 2, 3}
    loader = DataLoader(Vectors(), 4, collate_fn=fetched, transform=torch.neg)
    assert_type(loader, DataLoader[set[int]])
    assert [batch async for batch in loader] == [{0, -1, -2, -3}]


async def test_a_sample_has_the_type_that_a_transform_returns() -> None:
    """Samples of that type are collated."""
    for pair in DataLoader(Vectors(), batch_size=2, transform=decoded):
        assert_type(pair, list[Tensor])
        assert type(pair) is list
    async for batch in DataLoader(Vectors(), batch_size=2, transform=looked_up):
        assert_type(batch, dict[str, Tensor])
        assert type(batch["x"]) is Tensor


def test_batches_that_typing_cannot_express_are_any() -> None:
    """Not a type that would be false."""
    assert_type(DataLoader(POINTS, batch_size=2), DataLoader[Any])
    assert type(next(iter(DataLoader(POINTS, batch_size=2)))) is Point
    assert_type(DataLoader(Vectors(), transform=named), DataLoader[Any])
    assert_type(DataLoader(Vectors(), batch_size=None), DataLoader[Any])
    padded = DataLoader(Vectors(), tail="pad", rank=0, world_size=1)
    assert_type(padded, DataLoader[Any])
    assert type(next(iter(padded))) is tuple
    # A dataset, a transform or a collate_fn of unknown type.
    unknown: Any = str
    assert_type(DataLoader(UNTYPED), DataLoader[Any])
    assert_type(DataLoader(Vectors(), transform=unknown), DataLoader[Any])
    assert_type(DataLoader(Vectors(), collate_fn=unknown), DataLoader[Any])
    options: dict[str, Any] = {"batch_size": None}
    assert_type(DataLoader(Vectors(), **options), DataLoader[Any])


def test_a_device_keeps_the_type_of_a_batch() -> None:
    """Unless the device has a transform."""
    plain = Device("cpu", ahead=2)
    assert_type(DataLoader(Vectors(), 2, device=plain), DataLoader[Tensor])
    loader = DataLoader(Vectors(), 2, device=Device(keys=[0]), on_error=Skip(at_most=1))
    assert_type(loader, DataLoader[Tensor])
    lengths = Device("cpu", transform=len)
    assert_type(DataLoader(Vectors(), 2, device=lengths), DataLoader[Any])
    assert next(iter(DataLoader(Vectors(), 2, device=lengths))) == 2


def test_a_type_that_the_user_states_is_used() -> None:
    """By brackets, a function's argument, or a subclass."""

    class Mine(DataLoader[Tensor]):
        """A loader of tensors, whatever the dataset says."""

    def first(loader: DataLoader[Tensor]) -> Tensor:
        return next(iter(loader))

    texts = DataLoader[list[str]](Vectors(), transform=named)
    assert_type(next(iter(texts)), list[str])
    assert type(first(DataLoader(Vectors()))) is Tensor
    assert_type(next(iter(Mine(UNTYPED, transform=len))), Tensor)


def wrong_arguments() -> None:
    """Not called: each line is an error of both type checkers."""
    DataLoader(Vectors(), shufle=True)  # type: ignore[call-overload]
    DataLoader(Vectors(), batch_size="4")  # type: ignore[call-overload]
    DataLoader(Vectors(), transform=3)  # type: ignore[call-overload]
    DataLoader(Vectors(), workers="threads")  # type: ignore[call-overload]
    DataLoader(Vectors(), max_failures=3)  # type: ignore[call-overload]
    DataLoader()  # type: ignore[call-overload]
