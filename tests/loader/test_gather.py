"""Tensors that are in memory: gathered by the batch wherever batches are made."""

from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from aioloader import DataLoader

KINDS: list[Any] = [
    {"prefetch_factor": 2},
    {"num_workers": 2},
    {"num_workers": 2, "workers": "thread"},
]


def counting(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of other values everywhere."""
    return torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)


def dataset(rows: int = 10) -> TensorDataset:
    """Return large rows, small ones, and some without a size."""
    large = counting((rows, 300, 300), torch.float32)
    return TensorDataset(large, counting((rows,), torch.int16), torch.zeros(rows, 0))


@pytest.mark.slow
@pytest.mark.parametrize("options", KINDS, ids=["ahead", "processes", "threads"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_as_torch(options: dict[str, Any], shuffle: bool) -> None:
    """Batches, types and order."""
    data = dataset()
    torch.manual_seed(5)
    theirs = list(torch.utils.data.DataLoader(data, 4, shuffle=shuffle))
    torch.manual_seed(5)
    ours: Any = list(DataLoader(data, 4, shuffle=shuffle, **options))
    assert len(ours) == len(theirs) == 3
    for batch, expected in zip(ours, theirs, strict=True):
        assert type(batch) is type(expected) is list
        for one, other in zip(batch, expected, strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert torch.equal(one, other)


DTYPES = sorted(
    {one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str
)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(3,), (3, 2)], ids=["vector", "matrix"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:.*(ComplexHalf|quint|qint|QInt|QUInt)")
def test_every_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Torch selects rows of some, and copies of others one by one alone."""
    size = torch.Size(shape).numel() * dtype.itemsize
    octets = torch.arange(size, dtype=torch.uint8)
    try:
        data = TensorDataset(octets.view(dtype).view(shape))
        theirs = list(torch.utils.data.DataLoader(data, 2, sampler=[2, 0, 1]))
    except RuntimeError as error:
        pytest.skip(f"torch: {error}")
    in_turn: Any = DataLoader(data, 2)
    assert [len(batch) for (batch,) in in_turn] == [2, 1]
    for factor in (None, 2):
        ours: Any = list(DataLoader(data, 2, sampler=[2, 0, 1], prefetch_factor=factor))
        for (one,), (other,) in zip(ours, theirs, strict=True):
            assert one.dtype is other.dtype is dtype
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors() -> None:
    """Their parts are stacked, as by torch."""
    nested = torch.nested.nested_tensor([torch.ones(2), torch.zeros(2)])
    ((batch,),) = DataLoader(TensorDataset(nested), 2)
    assert batch.tolist() == [[1, 1], [0, 0]]


@pytest.mark.slow
@pytest.mark.parametrize("options", KINDS, ids=["ahead", "processes", "threads"])
def test_indices_from_the_end(options: dict[str, Any]) -> None:
    """As a list has them; beyond either end is an IndexError that names its place."""
    data = dataset()
    loader: Any = DataLoader(data, 2, sampler=[-1, 0, -10, 9], **options)
    assert [batch[1].tolist() for batch in loader] == [[9, 0], [0, 9]]
    for wrong in (10, -11):
        with pytest.raises(IndexError) as caught:
            list(DataLoader(data, 2, sampler=[0, wrong], **options))
        assert "batch 0" in caught.value.__notes__[0]


@pytest.mark.parametrize("options", KINDS, ids=["ahead", "processes", "threads"])
def test_a_policy_is_asked_about_samples(options: dict[str, Any]) -> None:
    """Who skips samples has them read one by one."""
    loader: Any = DataLoader(
        dataset(), 2, sampler=[0, 10, 2, 3], on_error="skip", **options
    )
    assert [batch[1].tolist() for batch in loader] == [[0], [2, 3]]
    assert loader.stats().failures == 1


def test_a_dataset_whose_method_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorDataset, "__getitem__", lambda data, at: -at)
    batches = [batch.tolist() for batch in DataLoader(dataset(), 5)]
    assert batches == [[0, -1, -2, -3, -4], [-5, -6, -7, -8, -9]]
