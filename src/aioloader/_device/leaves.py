"""The leaves of a batch: a walk through its containers that keeps their types.

Mappings, named tuples, tuples, sequences and dataclasses are containers, as for
``default_collate``; an unchanged container is returned as it is. An object that moves
itself (with a method ``to``) is a leaf, whatever it contains.
"""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from aioloader._collate.collate import like_mapping, like_sequence
from aioloader._device.naming import Choose

Convert: TypeAlias = Callable[[Any], Any]


def map_leaves(value: Any, convert: Convert, chosen: Choose | None = None) -> Any:
    """Return ``value`` with each leaf replaced by ``convert(leaf)``.

    A leaf is a tensor, an object that moves itself, or anything that is not a
    container.

    Args:
        value: A leaf, or containers of leaves.
        convert: Converts a leaf.
        chosen: Tells by the key, field or position of a top-level entry whether to
            convert it; None: all are converted.
    """
    if is_leaf(value):
        return convert(value)
    if isinstance(value, Mapping):
        return _map_mapping(value, convert, chosen)
    if isinstance(value, tuple):
        return _map_tuple(value, convert, chosen)
    if isinstance(value, Sequence):
        parts = _parts(value, convert, range(len(value)), chosen)
        return value if parts is None else like_sequence(value, parts)
    return _map_record(value, convert, chosen)


def is_leaf(value: Any) -> bool:
    """Tell whether ``value`` is not a container."""
    if isinstance(value, (torch.Tensor, str, bytes)) or moves_itself(value):
        return True
    if isinstance(value, (Mapping, Sequence)):  # tuples are sequences
        return False
    return not dataclasses.is_dataclass(value) or isinstance(value, type)


def keys_of(value: Any) -> list[Any]:
    """Return the keys of a container's entries: names, or positions."""
    if isinstance(value, Mapping):
        return list(value)
    if isinstance(value, Sequence):
        return list(getattr(value, "_fields", range(len(value))))
    return _fields(value)


def moves_itself(value: Any) -> bool:
    """Tell whether ``value`` is an object with a method ``to``.

    Not a tokenizer's result, which has one too, but is only a dict of tensors.
    """
    is_dict = isinstance(value, (torch.Tensor, UserDict))
    return not is_dict and callable(getattr(type(value), "to", None))


def _map_mapping(
    value: Mapping[Any, Any], convert: Convert, chosen: Choose | None
) -> Any:
    parts = _parts(list(value.values()), convert, list(value), chosen)
    if parts is None:
        return value
    return like_mapping(value, dict(zip(value, parts, strict=True)))


def _map_tuple(value: tuple[Any, ...], convert: Convert, chosen: Choose | None) -> Any:
    parts = _parts(value, convert, keys_of(value), chosen)
    if parts is None:
        return value
    if hasattr(value, "_fields"):
        return type(value)(*parts)
    return tuple(parts) if type(value) is tuple else like_sequence(value, parts)


def _map_record(value: Any, convert: Convert, chosen: Choose | None) -> Any:
    names = _fields(value)
    parts = _parts([getattr(value, name) for name in names], convert, names, chosen)
    if parts is None:
        return value
    clone = copy.copy(value)
    for name, part in zip(names, parts, strict=True):
        object.__setattr__(clone, name, part)  # a frozen one too
    return clone


def _fields(value: Any) -> list[Any]:
    names = [each.name for each in dataclasses.fields(value)]
    return [name for name in names if hasattr(value, name)]


def _parts(
    values: Sequence[Any],
    convert: Convert,
    keys: Sequence[Any],
    chosen: Choose | None,
) -> list[Any] | None:
    """Return the converted values, or None if none has changed."""
    parts = [
        map_leaves(value, convert) if chosen is None or chosen(key) else value
        for value, key in zip(values, keys, strict=True)
    ]
    changed = any(new is not old for new, old in zip(parts, values, strict=True))
    return parts if changed else None
