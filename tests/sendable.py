"""A hundred kinds of batch contents, each made by a function of its size."""

import collections
import dataclasses
import datetime
import enum
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from aioloader._transport.slots import MIN_BYTES

# Rows of an 8-column float matrix: too small for a slot, and large enough.
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
    left: Any
    right: Any


@dataclasses.dataclass
class Record:
    value: Any
    name: str = "name"


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    """A data class without a ``__dict__``."""

    value: Any


class Colour(enum.Enum):
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
    tokens = Words(ids=rows(n).long())
    tokens.lengths = [n]  # type: ignore[attr-defined]
    return tokens


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
    """Return tensors that share memory, as inputs and targets of a language model."""
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
    """Return a tensor and arrays of its memory; sent, they no longer share it."""
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
    "sparse": lambda n: rows(n).to_sparse(),
    "sparse, not coalesced": lambda n: torch.sparse_coo_tensor(
        torch.tensor([[0, 0], [1, 1]]), torch.tensor([1.0, 2.0]), (n, 8)
    ),
    "sparse, hybrid": lambda n: rows(n).to_sparse(1),
    "sparse, empty": lambda n: torch.zeros(n, 8).to_sparse(),
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
    "sub-class, empty": lambda n: torch.empty(0, 8).as_subclass(Tagged),
    "sub-class, functions": lambda n: rows(n).as_subclass(Wrapped),
    "sub-class, leaf": lambda n: tagged(n).requires_grad_(),
    "meta": lambda n: rows(n).to("meta"),
    "typed storage": lambda n: rows(n)._typed_storage(),  # type: ignore[no-untyped-call]
    "untyped storage": lambda n: rows(n).untyped_storage(),
    "untyped storage, empty": lambda n: torch.empty(0).untyped_storage(),
    "one memory": one_of_another,
    "one memory, in order": lambda n: (
        torch.split(t := rows(n), n // 2),
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
