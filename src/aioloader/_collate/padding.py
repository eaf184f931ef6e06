"""Collate token sequences of different lengths, padded to the longest of a batch."""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from aioloader._collate.collate import borrowed, default_collate, torch_dtype

NumpyArray: TypeAlias = np.ndarray[Any, Any]
_TOKENS, _MASK = "input_ids", "attention_mask"
# The label that torch's ``cross_entropy`` ignores.
_IGNORED = -100
_MAX_INT64 = np.iinfo(np.int64).max


def pad_collate(
    pad: int = 0, multiple: int = 1
) -> Callable[[Sequence[Any]], dict[str, Any]]:
    """Return a picklable ``collate_fn`` for token sequences of different lengths.

    A sample is a sequence of integers, or a dict with ``input_ids`` and other entries.
    The batch is a dict of tensors of shape (samples, length). The length is the longest
    sample's, rounded up to a ``multiple``. ``input_ids`` is padded with ``pad``.
    ``attention_mask``, if not given, is 1 at tokens and 0 at padding. A sample's other
    sequences are padded with 0 or False, but ``labels`` with -100. Integers become
    int64; booleans and floats keep their dtype. Other entries (numbers, texts) are
    collated by ``default_collate``. The caller owns all tensors.

    Example:
        >>> pad_collate(multiple=4)([[5, 6, 7], [8]])["input_ids"].tolist()
        [[5, 6, 7, 0], [8, 0, 0, 0]]

    Args:
        pad: Token that fills ``input_ids``.
        multiple: Number that divides the length, such as 8 for tensor cores.

    Raises:
        ValueError: If ``multiple`` is below 1. ``collate_fn`` raises it if a sample's
            lengths differ or a value exceeds int64, ``TypeError`` if a sequence holds
            no numbers, ``KeyError`` if ``input_ids`` is missing or entries differ.
    """
    if operator.index(multiple) < 1:
        raise ValueError(f"multiple must be at least 1, got {multiple}")
    return functools.partial(
        _collate, pad=operator.index(pad), multiple=operator.index(multiple)
    )


def _collate(samples: Sequence[Any], *, pad: int, multiple: int) -> dict[str, Any]:
    rows = [_entries(number, sample) for number, sample in enumerate(samples)]
    first = rows[0]
    for i, row in enumerate(rows):
        for entries, expected in zip(row, first, strict=True):
            if entries.keys() != expected.keys():
                raise KeyError(
                    f"sample {i} of the batch has {_named(row)}, and the first one "
                    f"{_named(first)}"
                )
    longest = max(len(sequences[_TOKENS]) for sequences, _ in rows)
    shape = len(rows), -(-longest // multiple) * multiple
    fills = {_TOKENS: pad, "labels": _IGNORED}
    batch: dict[str, Any] = {
        name: _padded([row[0][name] for row in rows], shape, fills.get(name, 0))
        for name in first[0]
    }
    for name in first[1]:
        batch[name] = default_collate([row[1][name] for row in rows])
    return batch


def _entries(row: int, sample: Any) -> tuple[dict[str, NumpyArray], dict[str, Any]]:
    """Return a sample's sequences, including the attention mask, and other entries."""
    entries = sample if isinstance(sample, Mapping) else {_TOKENS: sample}
    sequences: dict[str, NumpyArray] = {}
    for name, entry in entries.items():
        is_other = isinstance(entry, (str, bytes, Mapping))
        if is_other or not hasattr(entry, "__len__") or getattr(entry, "ndim", 1) == 0:
            continue
        try:
            array = np.asarray(entry)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"sample {row} of the batch: {name!r} must be a sequence of numbers: "
                f"{error}"
            ) from error
        array = array if array.size else array.astype(np.int64)
        if array.ndim != 1 or array.dtype.kind not in "iufb":
            raise TypeError(
                f"sample {row} of the batch: {name!r} must be a sequence of numbers, "
                f"got an array of shape {array.shape} and type {array.dtype}"
            )
        sequences[name] = array
    if _TOKENS not in entries:
        raise KeyError(
            f"sample {row} of the batch has no {_TOKENS!r}, but {[*entries]}"
        )
    tokens = sequences.get(_TOKENS)
    if tokens is None or tokens.dtype.kind not in "iu":
        got = type(entries[_TOKENS]).__name__ if tokens is None else tokens.dtype
        raise TypeError(
            f"sample {row} of the batch: {_TOKENS!r} must be a sequence of integers, "
            f"got {got}"
        )
    for name, array in sequences.items():
        if len(array) != len(tokens):
            raise ValueError(
                f"sample {row} of the batch: {name!r} has {len(array):,} entries, and "
                f"{_TOKENS!r} has {len(tokens):,}"
            )
    if _MASK not in entries:
        sequences[_MASK] = np.ones(len(tokens), np.int64)
    return sequences, {k: entry for k, entry in entries.items() if k not in sequences}


def _named(row: tuple[dict[str, NumpyArray], dict[str, Any]]) -> str:
    sequences, entries = row
    return f"the sequences {[*sequences]} and the entries {[*entries]}"


def _padded(
    column: Sequence[NumpyArray], shape: tuple[int, int], fill: int
) -> torch.Tensor:
    # Empty sequences do not decide the dtype.
    typed = [array for array in column if len(array)] or column
    dtype = np.result_type(*{array.dtype for array in typed})
    if all(array.dtype.kind in "iu" for array in typed):
        dtype = np.dtype(np.int64)
        large = (int(a.max()) for a in typed if a.dtype == np.uint64 and len(a))
        if (most := max(large, default=0)) > _MAX_INT64:
            raise ValueError(f"a sequence has {most:,}, which is above int64's limit")
    batch = borrowed(shape, torch_dtype(dtype))
    if batch is None:
        batch = torch.empty(shape, dtype=torch_dtype(dtype), device="cpu")
    for row, array in zip(batch.numpy(), column, strict=True):
        row[: len(array)] = array
        row[len(array) :] = fill
    return batch
