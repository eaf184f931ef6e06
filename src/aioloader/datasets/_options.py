"""Keywords that many datasets share, and the error for unknown ones.

The typed dictionaries are for type checkers and editors; the constructors that take the
keywords one by one hold the defaults. A test checks that both have the same names.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypedDict, TypeVar, get_args

from aioloader.datasets._stores.requests import Requests

if TYPE_CHECKING:
    import os

    from obstore.store import ObjectStore

    from aioloader.datasets._stores.sources import Source

P = ParamSpec("P")
T = TypeVar("T")

# Prefixes of store options that people pass in the wrong place.
_OF_STORES = (
    "access_key", "account_", "allow_http", "aws_", "azure_", "bucket", "client_",
    "config", "container_", "credential", "default_region", "endpoint", "gcs_",
    "google_", "region", "retry_config", "s3_", "sas_", "secret_", "session_token",
    "skip_signature", "storage_options", "token", "virtual_hosted",
)  # fmt: skip
# Methods and arguments of WebDataset and of Hugging Face's streams, in our words.
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
    "buffer_size": "pass the size first, .shuffle(1000); it is that of a window",
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


class OrderOptions(TypedDict, total=False):
    """Keywords of every ``ShardedStream``."""

    shuffle: bool
    seed: int
    interleave: int
    deterministic: bool
    max_bytes: int


class StreamOptions(OrderOptions, total=False):
    """Keywords of every stream whose shards are in a store or on disk."""

    store: "str | os.PathLike[str] | ObjectStore | Source | None"
    store_options: Mapping[str, Any] | None
    requests: Requests | None
    cache: "str | os.PathLike[str] | None"
    cache_bytes: int
    unpack_bytes: int


def names_options(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function reject unknown options, and suggest the nearest name.

    Known are its own names and those of a typed dictionary that it passes on; a
    constructor suggests those of the classes that it derives from, too.
    """

    @functools.wraps(function)
    def checked(*args: P.args, **options: P.kwargs) -> T:
        for name in options:
            if name not in known:
                raise _unknown(function, args[0], name)
        return function(*args, **options)

    known = {*inspect.signature(function).parameters, *_options_of(function)}
    return checked


def _unknown(function: Callable[..., Any], first: object, name: str) -> TypeError:
    """Return the error for an option unknown to ``function(first, ...)``."""
    label, functions = function.__qualname__, [function]
    if function.__name__ == "__init__":
        label = type(first).__name__
        functions = [vars(kind).get("__init__", kind) for kind in type(first).__mro__]
    known = sorted(set().union(*map(_options_of, functions)))
    nearest = difflib.get_close_matches(name, known, 1)
    if name in ARGUMENTS:
        hint = ARGUMENTS[name]
    elif "store_options" in known and name.lower().startswith(_OF_STORES):
        hint = f"options of the store belong in store_options={{{name!r}: ...}}"
    elif nearest:
        hint = f"did you mean {nearest[0]!r}?"
    else:
        hint = f"it has {', '.join(known)}"
    return TypeError(f"{label}() got an unknown option {name!r}: {hint}")


def _options_of(function: Any) -> set[str]:
    """Return keyword-only names, and those in the typed dictionary of ``**options``."""
    found: set[str] = set()
    if inspect.isfunction(function):
        for name, one in inspect.signature(function).parameters.items():
            if one.kind is one.KEYWORD_ONLY:
                found.add(name)
            elif one.kind is one.VAR_KEYWORD and (passed := get_args(one.annotation)):
                found |= passed[0].__annotations__.keys()
    return found
