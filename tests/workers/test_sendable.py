"""Workers send whatever collate can hold, as torch's workers do."""

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

import aioloader
from sendable import LARGE, OTHERS, SMALL, TENSORS, Tagged, Words, one_of_another, rows


class Samples(torch.utils.data.Dataset[Any]):
    """Makes the values of a table, in the worker."""

    def __init__(self, table: dict[str, Callable[[int], Any]], n: int) -> None:
        self.table = table
        self.names = list(table)
        self.n = n

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Any:
        return self.make(self.names[index])

    def make(self, name: str) -> Any:
        """Make the value of a name."""
        return self.table[name](self.n)


def as_it_is(value: Any) -> Any:
    return value


OPTIONS: dict[str, Any] = {"batch_size": None, "collate_fn": as_it_is, "num_workers": 2}
FORKED: dict[str, Any] = {**OPTIONS, "multiprocessing_context": "fork"}

# Values that torch's workers break and ours deliver: bits of views, scales, the order
# of bytes, arrays that share memory with tensors.
LOST_BY_TORCH = {
    "conjugated", "negated", "quantised", "quantised by channel", "array >f8",
    "arrays beside tensors",
}  # fmt: skip
# torch warns where it makes these, and where it receives them.
BETA = "ignore:(ComplexHalf|Sparse|The PyTorch API of nested|torch.quantize|TypedStor)"

pytestmark = pytest.mark.filterwarnings(BETA)


def alike(value: Any, expected: Any, where: str) -> None:
    """Assert that two values have equal types, kinds and contents, at all depths."""
    assert type(value) is type(expected), where
    if isinstance(value, torch.Tensor):
        alike_tensors(value, expected, where)
    elif isinstance(value, np.ndarray | np.generic):
        alike_arrays(value, expected, where)
    elif hasattr(value, "equals"):
        assert value.equals(expected), where
    elif (parts := parts_of(value)) is not None:
        its_parts = parts_of(expected) or []
        assert len(parts) == len(its_parts), where
        for k, (left, right) in enumerate(zip(parts, its_parts, strict=True)):
            alike(left, right, f"{where}[{k}]")
    else:
        is_nan = value != value and expected != expected  # noqa: PLR0124
        assert is_nan or value == expected, where
    if type(value) in {Tagged, Words}:
        alike(vars(value), vars(expected), f"{where}: attributes")


def parts_of(value: Any) -> list[Any] | None:
    """Return the contents of a container; None if ``value`` is not one."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, list | tuple | collections.deque):
        return list(value)
    if isinstance(value, torch.UntypedStorage | torch.TypedStorage):
        return [torch.empty(0).set_(value)]
    if isinstance(value, torch.nn.Module):
        return [value.state_dict()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return [value.args] if isinstance(value, BaseException) else None


def alike_tensors(value: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    names = ["dtype", "layout", "device", "requires_grad", "is_leaf", "is_nested"]
    names.append("is_quantized")
    for name in names:
        assert getattr(value, name) == getattr(expected, name), f"{where}: {name}"
    if value.is_nested:
        alike(list(value.unbind()), list(expected.unbind()), f"{where}: parts")
        return
    assert value.shape == expected.shape, where
    if value.layout is torch.strided:
        assert value.stride() == expected.stride(), where
    elif value.layout is torch.sparse_coo:
        assert value.is_coalesced() == expected.is_coalesced(), where
    if value.is_quantized:
        assert value.qscheme() == expected.qscheme(), where
        value, expected = value.dequantize(), expected.dequantize()
    if not value.is_meta:
        value, expected = (plain(tensor) for tensor in (value, expected))
        assert torch.equal(value, expected), where


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of ``tensor``, in the order of its indices."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    return tensor.contiguous().view(-1).view(torch.uint8)


def alike_arrays(value: Any, expected: Any, where: str) -> None:
    assert (value.dtype, value.shape) == (expected.dtype, expected.shape), where
    assert np.array_equal(value, expected), where
    if isinstance(value, np.ndarray):
        for flag in ("c_contiguous", "f_contiguous", "writeable", "aligned"):
            assert getattr(value.flags, flag) == getattr(expected.flags, flag), (
                f"{where}: {flag}"
            )


def shared(value: Any) -> list[tuple[int, int]]:
    """Return which pairs of tensors and arrays in ``value`` share memory."""
    spans = list(enumerate(memories(value)))
    return [
        (i, k)
        for i, span in spans
        for k, earlier in spans[:i]
        if span.start < earlier.stop and earlier.start < span.stop
    ]


def memories(value: Any) -> Iterator[range]:
    """Yield the addresses of each tensor and array."""
    if isinstance(value, np.ndarray):
        yield range(value.ctypes.data, value.ctypes.data + value.nbytes)
    elif not isinstance(value, torch.Tensor):
        for part in parts_of(value) or ():
            yield from memories(part)
    elif value.layout is torch.strided and not value.is_nested and not value.is_meta:
        lengths = zip(value.shape, value.stride(), strict=True)
        size = 1 + sum((n - 1) * step for n, step in lengths)
        if value.numel():
            yield range(value.data_ptr(), value.data_ptr() + size * value.itemsize)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(SMALL, id="small"),
        pytest.param(LARGE, id="large", marks=pytest.mark.slow),
    ],
)
def sent(request: pytest.FixtureRequest) -> tuple[Samples, dict[str, Any]]:
    """Return samples, and the expected value of each."""
    data = Samples(TENSORS | OTHERS, request.param)
    values = list(torch.utils.data.DataLoader(data, **FORKED))
    expected = dict(zip(data.names, values, strict=True))
    for name in LOST_BY_TORCH:
        expected[name] = data.make(name)
    return data, expected


@contextlib.contextmanager
def executor(kind: str) -> Iterator[Any]:
    """Yield a value for the loader's ``workers``."""
    if kind == "processes":
        with ProcessPoolExecutor(2, get_context("fork")) as pool:
            yield pool
    elif kind == "threads":
        with ThreadPoolExecutor(2) as pool:
            yield pool
    else:
        yield kind


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["process", "thread", "processes", "threads"])
def test_every_value_arrives_as_from_torch(sent: tuple[Any, Any], kind: str) -> None:
    """Types, layouts, strides, gradients, attributes, contents."""
    data, expected = sent
    with executor(kind) as workers:
        values = list(aioloader.DataLoader(data, workers=workers, **OPTIONS))
    for name, value in zip(data.names, values, strict=True):
        is_sent = kind.startswith("process")
        wanted = expected[name] if is_sent else data.make(name)
        alike(value, wanted, name)
        if kind == "process" and name not in LOST_BY_TORCH:
            assert shared(value) == shared(wanted), name


class Batches(torch.utils.data.IterableDataset[Any]):
    """A single batch, which ``make`` returns."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        yield self.make()


def sent_once(make: Callable[[], Any]) -> Any:
    options = {**OPTIONS, "num_workers": 1}
    return next(iter(aioloader.DataLoader(Batches(make), **options)))


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, SMALL, LARGE])
def test_views_of_the_same_memory_stay_views(n: int) -> None:
    """As in torch, a change of one changes the others."""
    batch = sent_once(lambda: one_of_another(n))
    batch["again"].mul_(2)
    assert torch.equal(batch["again"], rows(n) * 2)
    assert torch.equal(batch["inputs"], rows(n)[:, :-1] * 2)
    assert torch.equal(batch["targets"], rows(n)[:, 1:] * 2)
    assert torch.equal(batch["flat"], rows(n).view(-1) * 2)


def test_non_leaf_tensors_are_refused_with_torchs_message() -> None:
    """In torch a thread prints it, and the loop hangs."""
    words = r"refusing to serialize non-leaf tensor.*\n?.*call detach\(\)"
    with pytest.raises(RuntimeError, match=words) as caught:
        sent_once(lambda: rows(2).requires_grad_() * 2)
    assert any("send" in note for note in caught.value.__notes__)


class Handle:
    """Only the queues of ``multiprocessing`` can pickle it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        raise TypeError("a handle cannot be pickled")


@pytest.mark.usefixtures("fork_is_default")
def test_reducers_of_multiprocessing_are_used() -> None:
    """Those of ``multiprocessing.reduction.register``, as in torch's queues."""
    reducers = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    ForkingPickler.register(Handle, lambda handle: (Handle, (handle.number,)))
    try:
        assert sent_once(lambda: [Handle(7)])[0].number == 7
    finally:
        del reducers[Handle]


@pytest.mark.slow
@pytest.mark.parametrize("length", [2, 200])
def test_a_batch_may_have_more_tensors_than_iov_max(length: int) -> None:
    """Small ones and larger ones."""
    table = {"many": lambda n: [torch.arange(n) + k for k in range(1500)]}
    dataset = Samples(table, length)
    (batch,) = aioloader.DataLoader(dataset, **FORKED)
    assert [int(tensor[0]) for tensor in batch] == list(range(1500))
