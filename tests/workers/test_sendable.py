"""What collate can hold, workers can send: each as torch's workers deliver it."""

import collections
import contextlib
import dataclasses
import datetime
import enum
import pathlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.nn.utils.rnn import pack_sequence

import aioloader
from aioloader._transport.slots import MIN_BYTES

# Rows of a matrix of floats, 8 wide: below and above what travels in a slot.
SMALL, LARGE = 4, 2 * MIN_BYTES // (4 * 8)


class Tagged(torch.Tensor):
    """A sub-class; its instances have attributes."""


class Wrapped(torch.Tensor):
    """A sub-class that intercepts functions."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made: Any = super().__torch_function__  # torch does not type it
        return made(func, types, args, kwargs or {})


class Pair(NamedTuple):
    """A named tuple."""

    left: Any
    right: Any


@dataclasses.dataclass
class Record:
    """A data class."""

    value: Any
    name: str = "name"


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    """One without a dictionary."""

    value: Any


class Colour(enum.Enum):
    """An enumeration."""

    RED = 1


class Words(dict[str, Any]):
    """A sub-class of a container, with attributes, as tokenizers return."""


def rows(n: int) -> torch.Tensor:
    return torch.arange(n * 8, dtype=torch.float32).view(n, 8)


def tagged(n: int) -> torch.Tensor:
    tensor = rows(n).as_subclass(Tagged)
    tensor.source, tensor.boxes = "image", rows(2)  # type: ignore[attr-defined]
    return tensor


def words(n: int) -> Words:
    found = Words(ids=rows(n).long())
    found.lengths = [n]  # type: ignore[attr-defined]
    return found


def structured(n: int) -> Any:
    array = np.zeros(n, dtype=[("x", "f4", (8,)), ("label", "U5")])
    array["x"], array["label"] = rows(n).numpy(), "label"
    return array


def deep(n: int) -> Any:
    value: Any = rows(n)
    for level in range(40):
        value = [value] if level % 2 else {"next": (value, None, str(level))}
    return value


def one_of_another(n: int) -> Any:
    """Return tensors of one memory, as inputs and targets of a language model are."""
    tokens = rows(n)
    return {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "flat": tokens.view(-1),
        "first": tokens[0],
        "bits": tokens.view(torch.int32),
        "again": tokens,
    }


def jagged(n: int) -> torch.Tensor:
    parts = [rows(n), rows(2), rows(n + 1)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def nested(n: int) -> torch.Tensor:
    return torch.nested.nested_tensor([rows(n), rows(2)])


def quantised(n: int) -> torch.Tensor:
    return torch.quantize_per_tensor(rows(n) / (n * 8), 0.1, 10, torch.quint8)


def quantised_by_channel(n: int) -> torch.Tensor:
    scales, zeros = torch.full((8,), 0.25), torch.zeros(8, dtype=torch.int64)
    return torch.quantize_per_channel(rows(n), scales, zeros, 1, torch.qint8)


def imported(n: int) -> Any:
    """Return arrays beside tensors of the same memory: they do not stay together."""
    tensor = rows(n)
    return tensor, tensor.numpy(), tensor.numpy()[1:]


def picture(n: int) -> Any:
    return pytest.importorskip("PIL.Image").fromarray(rows(n).byte().numpy())


def frame(n: int) -> Any:
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame({"x": rows(n)[:, 0].numpy(), "text": ["text"] * n})


DTYPES = [
    torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32,
    torch.int64, torch.uint64, torch.bool, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip
ARRAYS = ["f2", "f4", ">f8", "i1", "<u8", "?", "c16", "U8", "S8", "M8[s]", "m8[ms]"]


def of_dtype(dtype: torch.dtype) -> Callable[[int], Any]:
    return lambda n: rows(n).to(dtype)


def of_array(dtype: str) -> Callable[[int], Any]:
    return lambda n: (rows(n).long() % 100).numpy().astype(dtype)


TENSORS: dict[str, Callable[[int], Any]] = {
    **{str(dtype): of_dtype(dtype) for dtype in DTYPES},
    "scalar": lambda n: torch.tensor(float(n)),
    "no rows": lambda n: torch.empty(0, 8),
    "no columns": lambda n: torch.empty(n, 0, 2),
    "transposed": lambda n: rows(n).mT,
    "every other": lambda n: rows(n)[::2, 1::3],
    "a column": lambda n: rows(n)[:, 2],
    "a row": lambda n: rows(n)[2],
    "channels last": lambda n: (
        rows(n).view(n, 2, 2, 2).to(memory_format=torch.channels_last)
    ),
    "expanded": lambda n: rows(1).expand(n, 8),
    "windows": lambda n: rows(n).view(-1).unfold(0, 8, 1),
    "flipped": lambda n: rows(n).flip(0),
    "conjugated": lambda n: torch.complex(rows(n), rows(n)).conj(),
    "negated": lambda n: torch.complex(rows(n), rows(n)).conj().imag,
    "COO": lambda n: rows(n).to_sparse(),
    "COO, not coalesced": lambda n: torch.sparse_coo_tensor(
        torch.tensor([[0, 0], [1, 1]]), torch.tensor([1.0, 2.0]), (n, 8)
    ),
    "COO, hybrid": lambda n: rows(n).to_sparse(1),
    "COO, empty": lambda n: torch.zeros(n, 8).to_sparse(),
    "CSR": lambda n: rows(n).to_sparse_csr(),
    "CSC": lambda n: rows(n).to_sparse_csc(),
    "BSR": lambda n: rows(n).to_sparse_bsr((2, 2)),
    "BSC": lambda n: rows(n).to_sparse_bsc((2, 2)),
    "nested": nested,
    "jagged": jagged,
    "quantised": quantised,
    "quantised by channel": quantised_by_channel,
    "leaf": lambda n: rows(n).requires_grad_(),
    "leaf view": lambda n: rows(n)[:, 1:].requires_grad_(),
    "sparse leaf": lambda n: rows(n).to_sparse().requires_grad_(),
    "parameter": lambda n: torch.nn.Parameter(rows(n)),
    "frozen parameter": lambda n: torch.nn.Parameter(rows(n), requires_grad=False),
    "buffer": lambda n: torch.nn.Buffer(rows(n)),
    "sub-class": tagged,
    "sub-class, strided": lambda n: tagged(n)[:, ::2],
    "sub-class, functions": lambda n: rows(n).as_subclass(Wrapped),
    "sub-class, leaf": lambda n: tagged(n).requires_grad_(),
    "meta": lambda n: rows(n).to("meta"),
    "typed storage": lambda n: rows(n)._typed_storage(),  # type: ignore[no-untyped-call]
    "untyped storage": lambda n: rows(n).untyped_storage(),
    "one memory": one_of_another,
    "one memory, in order": lambda n: (
        torch.split((t := rows(n)), n // 2),
        t[:9].unbind(),
    ),
    "one memory, sub-class": lambda n: (t := tagged(n), t[1:], t.as_subclass(Wrapped)),
    "one memory, leaf": lambda n: (t := rows(n).requires_grad_(), t.detach()[1:]),
    "one object twice": lambda n: [t := rows(n), t],
}
OTHERS: dict[str, Callable[[int], Any]] = {
    **{f"array {dtype}": of_array(dtype) for dtype in ARRAYS},
    "array of objects": lambda n: np.array([{"a": 1}, None, "x"] * n, dtype=object),
    "structured array": structured,
    "record array": lambda n: structured(n).view(np.recarray),
    "masked array": lambda n: np.ma.masked_less(rows(n).numpy(), 3.0),
    "array of Fortran": lambda n: np.asfortranarray(rows(n).numpy()),
    "array view": lambda n: rows(n).numpy()[::2, ::-1],
    "arrays of one memory": lambda n: (a := rows(n).numpy(), a[1:]),
    "arrays beside tensors": imported,
    "read-only array": lambda n: np.broadcast_to(np.float32(1), (n, 8)),
    "numpy scalar": lambda n: (np.float32(n), np.datetime64("2026-01-01"), np.bool_(1)),
    "text": lambda n: "äé\ud800" + "x" * n,
    "bytes": lambda n: (bytes(n * 32), bytearray(n * 32), [b""]),
    "numbers": lambda n: (n, 2**80, 1.5, float("nan"), 1j, True, None, ...),
    "containers": lambda n: (
        [rows(n)], {1, 2}, frozenset("a"), range(n), slice(1, n),
        collections.deque([n]), collections.OrderedDict(a=rows(n)),
        collections.Counter("aab"), (), {}, [],
    ),
    "defaults": lambda n: collections.defaultdict(list, a=[rows(n)]),
    "named tuple": lambda n: Pair(rows(n), Pair(None, "x")),
    "data class": lambda n: [Record(rows(n)), Slotted(rows(n))],
    "sub-class of dict": words,
    "enumeration": lambda n: (Colour.RED, pathlib.Path("a/b"), datetime.date.min),
    "deep": deep,
    "packed sequence": lambda n: pack_sequence([rows(n), rows(2)]),
    "sizes": lambda n: (torch.Size((n, 8)), torch.float16, torch.device("cpu")),
    "picture": picture,
    "frame": frame,
    "types": lambda n: (Record, rows, torch.nn.functional.relu, np.add, len),
    "module": torch.nn.BatchNorm1d,
    "exception": lambda n: [ValueError(str(n)), KeyError("key")],
}  # fmt: skip


class Samples(torch.utils.data.Dataset[Any]):
    """Makes what a table names, in the worker."""

    def __init__(self, table: dict[str, Callable[[int], Any]], n: int) -> None:
        self.table = table
        self.names = list(table)
        self.n = n

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Any:
        return self.make(self.names[index])

    def make(self, name: str) -> Any:
        """Make one by its name."""
        return self.table[name](self.n)


def as_it_is(value: Any) -> Any:
    return value


OPTIONS: dict[str, Any] = {
    "batch_size": None,
    "collate_fn": as_it_is,
    "num_workers": 2,
}
FORKED: dict[str, Any] = {**OPTIONS, "multiprocessing_context": "fork"}

# What torch's workers lose or break, and ours deliver as it was sent: bits of views,
# scales, the order of bytes, arrays of memory that its tensors leave.
LOST_BY_TORCH = {
    "conjugated", "negated", "quantised", "quantised by channel", "array >f8",
    "arrays beside tensors",
}  # fmt: skip
# torch warns of these, where it makes them and where it receives them.
BETA = "ignore:(ComplexHalf|Sparse|The PyTorch API of nested|torch.quantize|TypedStor)"

pytestmark = pytest.mark.filterwarnings(BETA)


def alike(one: Any, other: Any, where: str) -> None:
    """Check that two values are of equal types, kinds and contents, at all depths."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        alike_tensors(one, other, where)
    elif isinstance(one, np.ndarray | np.generic):
        alike_arrays(one, other, where)
    elif hasattr(one, "equals"):
        assert one.equals(other), where
    elif (parts := parts_of(one)) is not None:
        its_parts = parts_of(other) or []
        assert len(parts) == len(its_parts), where
        for k, (left, right) in enumerate(zip(parts, its_parts, strict=True)):
            alike(left, right, f"{where}[{k}]")
    else:
        is_nan = one != one and other != other  # noqa: PLR0124
        assert is_nan or one == other, where
    if type(one) in {Tagged, Words}:
        alike(vars(one), vars(other), f"{where}: attributes")


def parts_of(value: Any) -> list[Any] | None:
    """Return what a container holds; None if ``value`` is not one."""
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


def alike_tensors(one: torch.Tensor, other: torch.Tensor, where: str) -> None:
    names = ["dtype", "layout", "device", "requires_grad", "is_leaf", "is_nested"]
    names.append("is_quantized")
    for name in names:
        assert getattr(one, name) == getattr(other, name), f"{where}: {name}"
    if one.is_nested:
        alike(list(one.unbind()), list(other.unbind()), f"{where}: parts")
        return
    assert one.shape == other.shape, where
    if one.layout is torch.strided:
        assert one.stride() == other.stride(), where
    elif one.layout is torch.sparse_coo:
        assert one.is_coalesced() == other.is_coalesced(), where
    if one.is_quantized:
        assert one.qscheme() == other.qscheme(), where
        one, other = one.dequantize(), other.dequantize()
    if not one.is_meta:
        one, other = (plain(tensor) for tensor in (one, other))
        assert torch.equal(one, other), where


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of ``tensor``, in the order of its indices."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    return tensor.contiguous().view(-1).view(torch.uint8)


def alike_arrays(one: Any, other: Any, where: str) -> None:
    assert (one.dtype, one.shape) == (other.dtype, other.shape), where
    assert np.array_equal(one, other), where
    if isinstance(one, np.ndarray):
        for flag in ("c_contiguous", "f_contiguous", "writeable", "aligned"):
            assert getattr(one.flags, flag) == getattr(other.flags, flag), (
                f"{where}: {flag}"
            )


def shared(value: Any) -> list[tuple[int, int]]:
    """Return which of the tensors and arrays in ``value`` have common memory."""
    spans = list(enumerate(memories(value)))
    return [
        (i, k)
        for i, one in spans
        for k, other in spans[:i]
        if one.start < other.stop and other.start < one.stop
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
    """Return samples, and what is expected of each."""
    data = Samples(TENSORS | OTHERS, request.param)
    found = list(torch.utils.data.DataLoader(data, **FORKED))
    expected = dict(zip(data.names, found, strict=True))
    for name in LOST_BY_TORCH:
        expected[name] = data.make(name)
    return data, expected


@contextlib.contextmanager
def executor(kind: str) -> Iterator[Any]:
    """Make what a loader takes as its workers."""
    if kind == "processes":
        with ProcessPoolExecutor(2, get_context("fork")) as pool:
            yield pool
    elif kind == "threads":
        with ThreadPoolExecutor(2) as pool:
            yield pool
    else:
        yield kind


@pytest.mark.parametrize("kind", ["process", "thread", "processes", "threads"])
def test_all_arrives_as_from_torch(
    sent: tuple[Samples, dict[str, Any]], kind: str
) -> None:
    """Types, layouts, strides, gradients, attributes, contents."""
    data, expected = sent
    with executor(kind) as workers:
        found = list(aioloader.DataLoader(data, workers=workers, **OPTIONS))
    for name, value in zip(data.names, found, strict=True):
        is_sent = kind.startswith("process")
        wanted = expected[name] if is_sent else data.make(name)
        alike(value, wanted, name)
        if kind == "process" and name not in LOST_BY_TORCH:
            assert shared(value) == shared(wanted), name


class Batches(torch.utils.data.IterableDataset[Any]):
    """One batch, as it is made."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        yield self.make()


def sent_once(make: Callable[[], Any]) -> Any:
    options = {**OPTIONS, "num_workers": 1}
    return next(iter(aioloader.DataLoader(Batches(make), **options)))


@pytest.mark.parametrize("n", [1, SMALL, LARGE])
def test_views_of_one_memory_are_written_together(n: int) -> None:
    """As with torch: what is changed in one is changed in the others."""
    batch = sent_once(lambda: one_of_another(n))
    batch["again"].mul_(2)
    assert torch.equal(batch["again"], rows(n) * 2)
    assert torch.equal(batch["inputs"], rows(n)[:, :-1] * 2)
    assert torch.equal(batch["targets"], rows(n)[:, 1:] * 2)
    assert torch.equal(batch["flat"], rows(n).view(-1) * 2)


def test_what_requires_grad_and_is_no_leaf_is_refused_in_words_of_torch() -> None:
    """In torch it is a message of a thread, and a loop that hangs."""
    words = r"refusing to serialize non-leaf tensor.*\n?.*call detach\(\)"
    with pytest.raises(RuntimeError, match=words) as caught:
        sent_once(lambda: rows(2).requires_grad_() * 2)
    assert any("send" in note for note in caught.value.__notes__)


class Handle:
    """What only a queue of ``multiprocessing`` takes."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        raise TypeError("a handle cannot be pickled")


def test_what_is_registered_with_multiprocessing_is_sent() -> None:
    """``multiprocessing.reduction.register`` counts, as for torch's queues."""
    reducers = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    ForkingPickler.register(Handle, lambda handle: (Handle, (handle.number,)))
    try:
        assert sent_once(lambda: [Handle(7)])[0].number == 7
    finally:
        del reducers[Handle]
