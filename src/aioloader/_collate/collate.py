"""Collate samples into a batch: keep the structure, stack the leaves.

The rules, messages and extension points are torch's, but the traversal is faster. For
each value, torch searches its registry and builds a tensor of every array. If a user
has extended that registry (``default_collate_fn_map``), torch's function is called.
Large leaves are written to recycled memory if a pipeline lends it.
"""

import copy
import functools
import math
import threading
from collections.abc import (
    Callable,
    Iterable,
    Mapping,
    MutableMapping,
    MutableSequence,
    Sequence,
)
from itertools import accumulate
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch
from torch._C import _len_torch_function_stack
from torch.utils.data import default_collate as torch_collate
from torch.utils.data import default_convert as torch_convert
from torch.utils.data import get_worker_info
from torch.utils.data._utils import collate as torch_rules

from aioloader._transport.slots import MIN_BYTES, Allocator

Collate: TypeAlias = Callable[[Sequence[Any]], Any]

default_convert: Callable[[Any], Any] = torch_convert
# Maps torch's functions, as they are when this is imported, to ours.
OURS: dict[Any, Any] = {}


# Per thread, ``allocate``: the allocator of the batch that is being collated.
_LENT = threading.local()


def collated(memory: Allocator, collate_fn: Callable[[Any], Any], samples: Any) -> Any:
    """Call ``collate_fn``, whose ``default_collate`` may use ``memory``."""
    before = getattr(_LENT, "allocate", None)
    _LENT.allocate = memory
    try:
        return collate_fn(samples)
    finally:
        _LENT.allocate = before


def default_collate(samples: Sequence[Any]) -> Any:
    """Collate samples as ``torch.utils.data.default_collate`` does.

    Tensors and arrays are stacked along a new first dimension; floats become float64,
    ints int64; strings and bytes stay a list; mappings, namedtuples and sequences
    keep their type and are collated leaf by leaf (a tuple becomes a list, as in
    torch). Types registered in torch's ``default_collate_fn_map`` are honoured. Unlike
    in torch, read-only buffers such as ``obstore.Bytes`` stay a list, as bytes do.

    Args:
        samples: The samples of one batch, at least one.

    Returns:
        The batch, in memory that the caller owns.

    Raises:
        TypeError: If a leaf is of an unknown type.
        RuntimeError: If shapes or lengths differ between samples.
    """
    if not collates_as_torch():
        return torch_collate(list(samples))
    if not isinstance(samples, (list, tuple)) and hasattr(samples, "collate"):
        return samples.collate()  # a block of columns
    return _collate(samples)


OURS[torch_collate] = default_collate


def varlen_collate(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Collate packed samples into a flat batch, for attention within documents.

    A document starts wherever ``position_ids`` is 0, and at the start of each sample.
    Padding counts as a document. The names are those in Hugging Face's libraries and
    FlashAttention's ``flash_attn_varlen_func``.

    Args:
        samples: One or more dicts of 1-D arrays or tensors, including ``position_ids``,
            as ``Stream.pack`` yields them.

    Returns:
        One tensor of shape (tokens,) per name; ``cu_seqlens``, the start of each
        document and the end of the last one, shape (documents + 1,), dtype int32; and
        ``max_seqlen``, the length of the longest document, an int.

    Raises:
        KeyError: If a sample lacks ``position_ids``, or samples' names differ.
        ValueError: If a sample's arrays are not 1-D or differ in length.
    """
    rows = [_flat(number, sample, samples[0]) for number, sample in enumerate(samples)]
    batch: dict[str, Any] = {
        name: _joined([row[name] for row in rows]) for name in rows[0]
    }
    starts = np.append(batch["position_ids"].numpy() == 0, True)
    starts[[0, *accumulate(len(row["position_ids"]) for row in rows)]] = True
    bounds = np.flatnonzero(starts)
    batch["cu_seqlens"] = torch.from_numpy(bounds.astype(np.int32))
    batch["max_seqlen"] = int(np.diff(bounds).max(initial=0))
    return batch


def _flat(
    number: int, sample: Mapping[str, Any], first: Mapping[str, Any]
) -> dict[str, np.ndarray[Any, Any]]:
    """Return a sample's arrays; raise unless all are 1-D and of equal length."""
    if sample.keys() != first.keys() or "position_ids" not in sample:
        raise KeyError(
            f"sample {number} of the batch has {[*sample]}; varlen_collate needs "
            f"'position_ids', and the same names in all samples: the first one has "
            f"{[*first]}"
        )
    arrays = {name: np.asarray(entry) for name, entry in sample.items()}
    for name, entry in sample.items():
        if isinstance(entry, Sequence) and not entry:  # numpy would choose floats
            arrays[name] = np.asarray(entry, np.int64)
    shape = arrays["position_ids"].shape
    if len(shape) != 1 or any(array.shape != shape for array in arrays.values()):
        shapes = {name: array.shape for name, array in arrays.items()}
        raise ValueError(
            f"sample {number} of the batch has arrays of the shapes {shapes}; "
            "varlen_collate needs one dimension and one length: one entry per token"
        )
    return arrays


def _joined(arrays: Sequence[np.ndarray[Any, Any]]) -> torch.Tensor:
    out = _array((sum(map(len, arrays)),), np.result_type(*arrays))
    np.concatenate(arrays, out=out)
    return torch.from_numpy(out)


def collates_as_torch() -> bool:
    """Tell whether torch's registry of collate functions is unchanged."""
    return bool(torch_rules.default_collate_fn_map == _STANDARD)


def changed_rules() -> dict[Any, Any]:
    """Return the entries of torch's registry that a user has added or replaced."""
    rules = torch_rules.default_collate_fn_map.items()
    return {kind: rule for kind, rule in rules if _STANDARD.get(kind) is not rule}


def _collate(samples: Sequence[Any]) -> Any:
    first = samples[0]
    return (_RULES.get(type(first)) or _rule_for(first))(samples)


def _collate_mapping(samples: Sequence[Mapping[Any, Any]]) -> Any:
    first = samples[0]
    columns = {key: _collate([sample[key] for sample in samples]) for key in first}
    return like(first, columns)


def _collate_namedtuple(samples: Sequence[Any]) -> Any:
    return type(samples[0])(*map(_collate, zip(*samples, strict=False)))


def _collate_sequence(samples: Sequence[Sequence[Any]]) -> Any:
    first = samples[0]
    if len(set(map(len, samples))) > 1:
        raise RuntimeError("each element in list of batch should be of equal size")
    columns = list(map(_collate, zip(*samples, strict=True)))
    return columns if isinstance(first, tuple) else like(first, columns)


def like(model: Any, columns: dict[Any, Any] | list[Any]) -> Any:
    """Convert ``columns`` to ``model``'s type, or return them if that is impossible."""
    if type(model) is type(columns):
        return columns
    try:
        if not isinstance(model, (MutableMapping, MutableSequence)):
            return type(model)(columns)
        # A copy keeps the container's other attributes, such as a default factory.
        clone: Any = copy.copy(model)
        if isinstance(columns, dict):
            clone.update(columns)
        else:
            for place, column in enumerate(columns):
                clone[place] = column
    except TypeError:
        return columns
    return clone


def _stack_tensors(samples: Sequence[torch.Tensor]) -> torch.Tensor:
    first = samples[0]
    if first.layout is not torch.strided or first.is_nested:
        refused: torch.Tensor = torch_rules.collate_tensor_fn(samples)
        return refused  # raises today; a later torch may stack this layout
    nbytes = len(samples) * first.nbytes
    if nbytes < MIN_BYTES or not _are_alike(samples):
        return torch.stack(samples)  # type: ignore[arg-type]
    out = borrowed((len(samples), *first.shape), first.dtype)
    return torch.stack(samples, out=out)  # type: ignore[arg-type]


def _are_alike(samples: Sequence[torch.Tensor]) -> bool:
    """Tell whether all samples are plain CPU tensors of one shape and dtype."""
    first = samples[0]
    return all(
        type(sample) is torch.Tensor
        and sample.dtype is first.dtype
        and sample.shape == first.shape
        and sample.device.type == "cpu"
        and not sample.requires_grad
        and not sample.is_quantized
        for sample in samples
    )


def _stack_arrays(samples: Sequence[Any]) -> torch.Tensor:
    first = samples[0]
    if first.dtype.kind in "SUO":
        raise TypeError(torch_rules.default_collate_err_msg_format.format(first.dtype))
    if first.dtype.kind in "mM":
        _refuse_time(first.dtype)
    if _has_default_device():
        return _stack_tensors([torch.as_tensor(sample) for sample in samples])
    shape, dtype = first.shape, first.dtype
    for sample in samples:
        if type(sample) is not np.ndarray or (
            sample.shape != shape or sample.dtype != dtype
        ):
            return _stack_tensors([torch.as_tensor(sample) for sample in samples])
    out = _array((len(samples), *shape), dtype)
    if shape:  # `np.stack` would make a view of each sample
        np.concatenate(samples, out=out.reshape(len(samples) * shape[0], *shape[1:]))
    else:
        np.stack(samples, out=out)
    return torch.from_numpy(out)


def _refuse_time(dtype: np.dtype[Any]) -> NoReturn:
    """Raise TypeError for dates and durations, for which torch has no dtype."""
    raise TypeError(
        f"can't convert np.ndarray of type numpy.{dtype.type.__name__}: torch has no "
        f"dtype for {dtype}. Return numbers instead, such as array.astype('int64') "
        f"(counts of the unit of {dtype}), or use your own collate_fn"
    )


def borrowed(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
    """Return an uninitialised tensor in lent memory; None if small or nothing is lent.

    The memory returns to its pool when the tensor and all its views are gone.
    """
    slot = _lent(math.prod(shape) * dtype.itemsize)
    if slot is None:
        return None
    return torch.frombuffer(slot, dtype=dtype).view(shape).data  # no view, for autograd


def _array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return an uninitialised array, in lent memory if ``_lent`` returns any."""
    return np.ndarray(shape, dtype, _lent(math.prod(shape) * dtype.itemsize))


def _lent(nbytes: int) -> Any:
    """Return a lent buffer; None if ``nbytes`` is small, or no pipeline lends any."""
    allocate: Allocator | None = getattr(_LENT, "allocate", None)
    return None if nbytes < MIN_BYTES or allocate is None else allocate(nbytes)


@functools.cache
def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _has_default_device() -> bool:
    """Tell whether this thread may have a default device, which ``from_numpy`` ignores.

    ``torch.set_default_device`` and ``with torch.device(...)`` set it for a thread. In
    workers the result is False, because they collate on the CPU: a forked worker
    inherits the setting, but cannot use CUDA.
    """
    return _len_torch_function_stack() > 0 and get_worker_info() is None


def _numbers(samples: Sequence[float]) -> torch.Tensor:
    """Return a tensor of numbers; going through an array is three times as fast.

    Other types and integers above 64 bits are passed to torch, for its error messages.
    """
    is_float = isinstance(samples[0], float)
    if {*map(type, samples)} <= {int, float} and not _has_default_device():
        try:
            array = np.array(samples)
        except OverflowError:
            pass
        else:
            if array.dtype == (np.float64 if is_float else np.int64):
                return torch.from_numpy(array)
    return torch.tensor(samples, dtype=torch.float64 if is_float else None)


def _scalars(samples: Sequence[Any]) -> torch.Tensor:
    """Return a tensor of numpy scalars; going through an array is 3 times as fast."""
    kind = samples[0].dtype.kind
    is_plain = len({*map(type, samples)}) == 1 and kind in "biufc"
    if is_plain and not _has_default_device():
        return torch.from_numpy(np.array(samples))
    if kind == "m":
        _refuse_time(samples[0].dtype)
    return torch.as_tensor(samples)


def _strings(samples: Sequence[Any]) -> Sequence[Any]:
    return samples


_SCALARS = (np.bool_, np.number, np.object_)
# Each type of leaf with torch's rule and ours, in torch's order. Numpy scalars are
# before floats, because numpy's float64 is a float, too.
_LEAVES: tuple[tuple[Any, Any, Collate], ...] = (
    (torch.Tensor, torch_rules.collate_tensor_fn, _stack_tensors),
    (np.ndarray, torch_rules.collate_numpy_array_fn, _stack_arrays),
    (_SCALARS, torch_rules.collate_numpy_scalar_fn, _scalars),
    (float, torch_rules.collate_float_fn, _numbers),
    (int, torch_rules.collate_int_fn, _numbers),
    (str, torch_rules.collate_str_fn, _strings),
    (bytes, torch_rules.collate_str_fn, _strings),
)
_STANDARD = {kind: theirs for kind, theirs, _ in _LEAVES}
_BY_BASE: dict[Any, Collate] = {kind: ours for kind, _, ours in _LEAVES}
_BY_BASE[Mapping] = _collate_mapping
# The rules by exact type, which are looked up first.
_RULES: dict[Any, Collate] = _BY_BASE | {
    dict: _collate_mapping,
    list: _collate_sequence,
    tuple: _collate_sequence,
}


def _rule_for(value: object) -> Collate:
    """Return the rule for a value whose exact type is not in ``_RULES``."""
    for base, rule in _BY_BASE.items():
        if isinstance(value, base):
            return rule
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _collate_namedtuple
    if isinstance(value, Sequence):
        return _collate_sequence
    if isinstance(value, (np.datetime64, np.timedelta64)):
        _refuse_time(value.dtype)
    if _is_buffer(value):
        return _strings
    raise TypeError(torch_rules.default_collate_err_msg_format.format(type(value)))


def _is_buffer(value: object) -> bool:
    """Tell whether ``value`` is a read-only buffer, but no NumPy scalar or iterable.

    ``collections.abc.Buffer`` would need Python 3.12.
    """
    try:
        with memoryview(value) as memory:  # type: ignore[arg-type]
            is_read_only = memory.readonly  # objects of ctypes are not
    except TypeError:
        return False
    return is_read_only and not isinstance(value, (Iterable, np.generic))


# Limits on a batch's leaves and bytes, and on a container's fields, to collate quickly.
_FEW_LEAVES, _FEW_BYTES, _FEW_FIELDS = 1024, 1 << 20, 32
_NUMBERS = {int, float, bool, np.float32, np.float64, np.int32, np.int64, type(None)}


def collates_quickly(collate_fn: Any, samples: Sequence[Any]) -> bool:
    """Tell whether ``collate_fn`` takes a fraction of a millisecond for ``samples``.

    True for ``default_collate`` or ``default_convert`` and few, small samples. False if
    this thread has a default device: the thread that collates other batches has none.
    """
    is_known = collate_fn is default_collate or collate_fn is default_convert
    if not (is_known and samples and collates_as_torch()) or _has_default_device():
        return False
    leaves, nbytes = _size_of(samples[0])
    count = len(samples)
    return leaves * count <= _FEW_LEAVES and nbytes * count <= _FEW_BYTES


def _size_of(sample: Any) -> tuple[int, int]:
    """Return how many values and bytes a sample has; too many if of unknown type."""
    cls = type(sample)
    if cls in _NUMBERS:
        return 1, 8
    if cls is torch.Tensor or cls is np.ndarray:
        return 1, sample.nbytes
    if cls is str or cls is bytes:
        return 1, len(sample)
    if cls in {tuple, list, dict} and len(sample) <= _FEW_FIELDS:
        values = sample.values() if cls is dict else sample
        sizes = [_size_of(value) for value in values]
        return 1 + sum(leaves for leaves, _ in sizes), sum(size for _, size in sizes)
    return _FEW_LEAVES + 1, 0
