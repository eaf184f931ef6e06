"""Random generators that the user's objects reach.

Attributes, the first items of containers, partial arguments and closures are searched,
and the user's own functions for the globals they name: some thousand objects in all.
Nothing is called, so what is made later is only guessed from the functions that may
make it.
"""

import dis
import gc
import mmap
import os
import random
import sys
from collections.abc import Iterator
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any

import numpy as np
import torch

_LEAVES = (
    str, bytes, bytearray, int, float, ModuleType, CodeType, GeneratorType, FrameType,
    np.ndarray, torch.Tensor, memoryview, mmap.mmap,
)  # fmt: skip
_CONTAINERS = {list, tuple, dict, set, frozenset}
_OWN = Path(__file__).parents[1]
_MOST_SEARCHED, _MOST_ITEMS = 2000, 64
# What makes a generator, by its name in code that calls it.
_MAKERS = {"default_rng", "Generator", "RandomState", "Random"}
# What keeps it for later calls.
_STORES = {"STORE_ATTR", "STORE_GLOBAL", "STORE_SUBSCR", "STORE_DEREF"}


def holds_generator(*objects: Any) -> bool:
    """Tell whether objects hold random generators, or make and keep some when used.

    Such generators are not seeded per batch. The global ones do not count.
    """
    generators: list[Any] = [random.Random, torch.Generator]  # noqa: S311  (looked for, not used)
    shared: list[Any] = [
        random.random.__self__,  # type: ignore[attr-defined]
        torch.default_generator,
    ]
    if "numpy.random" in sys.modules:  # otherwise it has made no object
        generators += [np.random.Generator, np.random.RandomState]
        shared.append(np.random.mtrand._rand)  # noqa: SLF001
    types = tuple(generators)
    return any(
        (isinstance(one, types) and all(one is not other for other in shared))
        or (isinstance(one, (FunctionType, cached_property)) and _keeps_generator(one))
        for one in reachable(*objects)
    )


def reachable(*objects: Any) -> Iterator[Any]:
    """Yield objects and what they hold, each once, until it gives up."""
    found, seen = list(objects), set[int]()
    for one in found:
        if one is None or id(one) in seen:
            continue
        yield one
        if isinstance(one, _LEAVES):
            continue
        if len(seen) > _MOST_SEARCHED:
            return
        seen.add(id(one))
        found += _held(one)


def _held(one: Any) -> list[Any]:
    if isinstance(one, type):
        file = getattr(sys.modules.get(one.__module__), "__file__", None) or ""
        if _is_basic(file) or (not file and one.__module__ != "__main__"):
            return []
        # What a constructor keeps is an attribute of the instance.
        kept = [value for name, value in vars(one).items() if name != "__init__"]
        return [*one.__bases__, *kept]
    if isinstance(one, FunctionType):
        return _of_function(one)
    if type(one) in _CONTAINERS:  # perhaps of millions
        return [*islice(one.values() if type(one) is dict else one, _MOST_ITEMS)]
    # Attributes, items and arguments, and a class; no code of the user's is called.
    return gc.get_referents(one)[:_MOST_SEARCHED]


def _of_function(function: FunctionType) -> list[Any]:
    """Return its closure, its attributes and, of a user's, the globals it names."""
    found = [*(function.__closure__ or ()), *vars(function).values()]
    file, space = function.__code__.co_filename, function.__globals__
    if not (_is_basic(file) or _is_installed(file)):
        names = {name for code in _codes(function) for name in code.co_names}
        found += [space.get(name) for name in names]
    return found


def _keeps_generator(one: "FunctionType | cached_property[Any]") -> bool:
    """Tell whether code may make a generator, and keep it for its next call."""
    is_kept = isinstance(one, cached_property)
    codes = _codes(one.func if isinstance(one, cached_property) else one)
    if _MAKERS.isdisjoint(name for code in codes for name in code.co_names):
        return False
    return is_kept or (
        not _is_basic(codes[0].co_filename)
        and any(
            step.opname in _STORES
            for code in codes
            for step in dis.get_instructions(code)
        )
    )


def _codes(function: Any) -> list[CodeType]:
    """Return the code of a function, and of the functions in it."""
    found = [function.__code__] if isinstance(function, FunctionType) else []
    for code in found:
        found += [part for part in code.co_consts if isinstance(part, CodeType)]
    return found


@cache
def _is_basic(file: str) -> bool:
    """Tell whether a file is Python's own, torch's, numpy's or of this package."""
    if file.startswith(f"{Path(os.__file__).parent}{os.sep}"):
        return not _is_installed(file)
    parents = (Path(torch.__file__).parent, Path(np.__file__).parent, _OWN)
    return file.startswith(tuple(f"{path}{os.sep}" for path in parents))


@cache
def _is_installed(file: str) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
