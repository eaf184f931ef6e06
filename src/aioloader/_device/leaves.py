"""Yield or convert the leaves of a batch; containers keep their types if possible.

Mappings, tuples, other sequences (but not ``str`` and ``bytes``) and dataclasses are
containers. A container whose leaves do not change is returned as it is. An object with
a method ``to`` is a leaf even if it contains tensors, unless it is a ``UserDict``.
"""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from aioloader._collate.collate import like
from aioloader._device.naming import Choose


def map_leaves(
    value: Any, convert: Callable[[Any], Any], chosen: Choose | None = None
) -> Any:
    """Return ``value`` with each leaf replaced by ``convert(leaf)``.

    ``chosen`` takes the key, field or position of a top-level entry and tells whether
    to convert the entry; by default all are converted.
    """
    if is_leaf(value):
        return convert(value)
    entries = entries_of(value)
    parts = {
        key: map_leaves(part, convert) if chosen is None or chosen(key) else part
        for key, part in entries.items()
    }
    if all(parts[key] is part for key, part in entries.items()):
        return value
    if isinstance(value, Mapping):
        return like(value, parts)
    if not isinstance(value, Sequence):
        clone = copy.copy(value)
        for name, part in parts.items():
            object.__setattr__(clone, name, part)  # frozen dataclasses allow this
        return clone
    if hasattr(value, "_fields"):
        return type(value)(*parts.values())
    return like(value, [*parts.values()])


def leaves_of(value: Any, chosen: Choose | None = None) -> Iterator[Any]:
    """Yield the leaves that ``map_leaves`` converts, including repeated ones."""
    if is_leaf(value):
        yield value
        return
    for key, part in entries_of(value).items():
        if chosen is None or chosen(key):
            yield from leaves_of(part)


def is_leaf(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, str, bytes)) or moves_itself(value):
        return True
    if isinstance(value, (Mapping, Sequence)):  # tuples are sequences
        return False
    return not dataclasses.is_dataclass(value) or isinstance(value, type)


def entries_of(value: Any) -> dict[Any, Any]:
    """Return a container's entries, by key, field or position."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        names = getattr(value, "_fields", range(len(value)))
        return dict(zip(names, value, strict=True))
    names = [field.name for field in dataclasses.fields(value)]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def moves_itself(value: Any) -> bool:
    """Tell whether ``value`` has a method ``to`` and is not a tensor or ``UserDict``.

    A tokenizer's result has this method but is a ``UserDict``, which is a container.
    """
    is_dict = isinstance(value, (torch.Tensor, UserDict))
    return not is_dict and callable(getattr(type(value), "to", None))
