"""Checks of arguments, options and settings, shared by datasets and writers."""

import difflib
import functools
import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, SupportsIndex, TypeVar, get_args

from aioloader.errors import StateMismatchError

P = ParamSpec("P")
T = TypeVar("T")

# Prefixes of store options, which users often pass as options of the dataset.
_STORE_OPTIONS = (
    "access_key", "account_", "allow_http", "aws_", "azure_", "bucket", "client_",
    "config", "container_", "credential", "default_region", "endpoint", "gcs_",
    "google_", "region", "retry_config", "s3_", "sas_", "secret_", "session_token",
    "skip_signature", "storage_options", "token", "virtual_hosted",
)  # fmt: skip
# Replacements for methods and arguments of WebDataset and of Hugging Face's streams;
# docs/coming-from-webdataset.md explains them.
METHODS = {
    "to_tuple": "use .map(lambda sample: (sample['jpg'], sample['cls']))",
    "map_tuple": "use .map() with a function of the whole sample",
    "map_dict": "use .map() with a function of the whole sample",
    "rename": "use .map() with a function that makes a dict of the new names",
    "select": "use .filter(function)",
    "slice": "use .take(count) and .skip(count)",
    "batched": "pass batch_size= to the DataLoader, or use .batch(size)",
    "unbatched": "use .unbatch()",
    "with_epoch": "use .epoch_length(count)",
    "with_length": "use .epoch_length(count)",
    "compose": "use .map(), .filter() or .flat_map()",
    "with_format": "the DataLoader makes tensors; use .map() for other types",
    "set_format": "the DataLoader makes tensors; use .map() for other types",
    "select_columns": "pass columns= to the dataset of a table, or use .map()",
    "remove_columns": "pass columns= to the dataset of a table, or use .map()",
    "rename_column": "use .map() with a function that makes a dict of the new names",
    "rename_columns": "use .map() with a function that makes a dict of the new names",
}
ARGUMENTS = {
    "buffer_size": "pass the size of a window as the first argument: .shuffle(1000)",
    "initial": "leave it out: a window is always read whole",
    "shardshuffle": "pass shuffle=True, which permutes all shards",
    "resampled": "use .repeat(), or .epoch_length(count) for equal epochs of all ranks",
    "nodesplitter": "pass rank='auto' to the DataLoader",
    "workersplitter": "leave it out: workers share the stream",
    "handler": "pass on_error='skip' or Skip(at_most=0.01) to the DataLoader",
    "cache_dir": "pass cache=, the directory",
    "batched": "use .batch(size).map(function).unbatch()",
    "with_indices": "use .map() with a function of the sample",
    "remove_columns": "return a sample without them from the function",
}


def check_at_least(value: int, least: int, name: str) -> int:
    """Return a value as an int; raise an error unless it is at least ``least``."""
    check_is(value, SupportsIndex, name, "an integer")
    number = operator.index(value)
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return number


def check_token(value: Any, name: str) -> int:
    """Return a token as an int; raise an error if it is not in the range of int64."""
    token = check_at_least(value, -(1 << 63), name)
    if token >= 1 << 63:
        raise ValueError(f"{name} must be below 2**63, as an int64 is, got {token:,}")
    return token


def check_same(
    begun: Mapping[str, Any], now: Mapping[str, Any], text: str, where: str
) -> None:
    """Raise a StateMismatchError if a setting in ``begun`` differs in ``now``."""
    for name, old in begun.items():
        if old == (new := now[name]):
            continue
        entries = ""
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
            entries = f" ({', '.join(names)})"
        message = text.format(where=where, what=name + entries)
        raise StateMismatchError(message, expected=old, found=new)


def check_is(value: object, kind: Any, name: str, words: str) -> None:
    """Raise a TypeError unless ``value`` has the type ``kind``, named in ``words``."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {words}, got {type(value).__name__}")


def check_word(value: object, words: Any, name: str) -> None:
    """Raise a ValueError unless ``value`` is in ``words``, a ``Literal`` type."""
    known = get_args(words)
    if value not in known:
        *first, last = map(repr, known)
        choices = f"{', '.join(first)} or {last}"
        raise ValueError(f"{name} must be {choices}, got {value!r}")


def position_of(index: SupportsIndex, count: int) -> int:
    """Return the non-negative form of an index; raise an IndexError if out of range."""
    position = operator.index(index)
    if not -count <= position < count:
        raise IndexError(f"index {position} is out of range for {count:,} samples")
    return position if position >= 0 else position + count


def names_options(function: Callable[P, T]) -> Callable[P, T]:
    """Make a method reject unknown options, and suggest the nearest name.

    Known options are the method's parameters, and the keys of the typed dictionary of
    its ``**options``. A constructor also suggests options of base classes.
    """

    @functools.wraps(function)
    def checked(*args: P.args, **options: P.kwargs) -> T:
        for name in options:
            if name not in known:
                raise _unknown_option(function, args[0], name)
        return function(*args, **options)

    known = {*inspect.signature(function).parameters, *_options_of(function)}
    return checked


def _unknown_option(function: Callable[..., Any], owner: Any, name: str) -> TypeError:
    label, functions = function.__qualname__, [function]
    if function.__name__ == "__init__":
        label = type(owner).__name__
        functions = [vars(cls).get("__init__", cls) for cls in type(owner).__mro__]
    known = sorted(set().union(*map(_options_of, functions)))
    nearest = difflib.get_close_matches(name, known, 1)
    if name in ARGUMENTS:
        hint = ARGUMENTS[name]
    elif "store_options" in known and name.lower().startswith(_STORE_OPTIONS):
        hint = f"options of the store belong in store_options={{{name!r}: ...}}"
    elif nearest:
        hint = f"did you mean {nearest[0]!r}?"
    else:
        hint = f"it has {', '.join(known)}"
    return TypeError(f"{label}() got an unknown option {name!r}: {hint}")


def _options_of(function: Any) -> set[str]:
    """Return a function's keyword-only parameters and the keys of its ``**options``."""
    names: set[str] = set()
    if inspect.isfunction(function):
        for name, p in inspect.signature(function).parameters.items():
            if p.kind is p.KEYWORD_ONLY:
                names.add(name)
            elif p.kind is p.VAR_KEYWORD and (options := get_args(p.annotation)):
                names |= options[0].__annotations__.keys()
    return names
