"""Keywords that many datasets share, and the error for those that none of them knows.

The typed dictionaries are for type checkers and editors; the constructors that take
the keywords one by one hold the defaults. A test sees that both name the same.
"""

import difflib
import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import (
    TYPE_CHECKING,
    Any,
    ParamSpec,
    SupportsIndex,
    TypedDict,
    TypeVar,
    get_args,
)

from aioloader.datasets._stores.addresses import sealed_alike
from aioloader.datasets._stores.redact import Sealed
from aioloader.datasets._stores.requests import Requests

if TYPE_CHECKING:
    import os

    from obstore.store import ObjectStore

P = ParamSpec("P")
T = TypeVar("T")

# Arguments that are addresses.
_ADDRESSES = {"addresses", "destination", "store"}
# How names of store options begin, of those that people pass where they do not belong.
_OF_STORES = (
    "access_key", "account_", "allow_http", "aws_", "azure_", "bucket", "client_",
    "config", "container_", "credential", "default_region", "endpoint", "gcs_",
    "google_", "region", "retry_config", "s3_", "sas_", "secret_", "session_token",
    "skip_signature", "storage_options", "token", "virtual_hosted",
)  # fmt: skip


class OrderOptions(TypedDict, total=False):
    """Keywords of every ``ShardedStream``."""

    shuffle: bool
    seed: int
    interleave: int
    deterministic: bool
    max_bytes: int


class StoreOptions(TypedDict, total=False):
    """Keywords of what reads from a store through a cache."""

    store: "str | os.PathLike[str] | ObjectStore | None"
    store_options: Mapping[str, Any] | None
    requests: Requests | None
    cache: "str | os.PathLike[str] | None"
    cache_bytes: int


class StreamOptions(StoreOptions, OrderOptions, total=False):
    """Keywords of every stream whose shards lie in a store or on disk."""


def check_at_least(value: int, least: int, name: str) -> None:
    """See that an argument is an integer, and large enough.

    Raises:
        TypeError: If it is no integer.
        ValueError: If it is less than ``least``.
    """
    check_is(value, SupportsIndex, name, "an integer")
    if operator.index(value) < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def check_is(value: object, kind: Any, name: str, words: str) -> None:
    """See that an argument is of a kind.

    Raises:
        TypeError: If it is not; the message has ``words`` for the kind.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {words}, got {type(value).__name__}")


def names_options(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function refuse options it does not know, and name the nearest one.

    A constructor that others pass keywords on to also names theirs, and a function that
    passes on those of a typed dictionary names these. Addresses with secrets, URLs of
    databases and all ``store_options`` are sealed before it is called, so that of what
    it raises only the caller's own frames hold them.
    """

    @functools.wraps(function)
    def checked(*args: P.args, **options: P.kwargs) -> T:
        given: Any = [*map(_sealed, places, args), *args[len(places) :]]
        named: Any = {name: _sealed(name, one) for name, one in options.items()}
        args, options = given, named  # none of these variables holds a secret now
        for name in options:
            if name not in known:
                raise _unknown(function, args[0], name)
        return function(*args, **options)

    places = [*inspect.signature(function).parameters]
    known = {*places, *_passed_on(function)}
    return checked


def _sealed(name: str, value: Any) -> Any:
    """Return an argument with its secrets hidden; it raises nothing."""
    if name == "store_options":
        is_open = value is not None and not isinstance(value, Sealed)
        return Sealed(value, "the store options") if is_open else value
    if name == "url" and isinstance(value, str):
        return Sealed(value, "the URL of a database")
    return sealed_alike(value) if name in _ADDRESSES else value


def _unknown(function: Callable[..., Any], first: object, name: str) -> TypeError:
    """Return the error for an option that ``function(first, ...)`` does not know."""
    label, constructors = function.__qualname__, [function]
    if function.__name__ == "__init__":
        label = type(first).__name__
        constructors = [
            vars(kind).get("__init__", kind) for kind in type(first).__mro__
        ]
    known = {option for one in constructors for option in _keywords(one)}
    known |= _passed_on(function)
    nearest = difflib.get_close_matches(name, sorted(known), 1)
    if "store_options" in known and name.lower().startswith(_OF_STORES):
        hint = f"options of the store go into store_options={{{name!r}: ...}}"
    elif nearest:
        hint = f"did you mean {nearest[0]!r}?"
    else:
        hint = f"it has {', '.join(sorted(known))}"
    return TypeError(f"{label}() got an unknown option {name!r}: {hint}")


def _passed_on(function: Callable[..., Any]) -> set[str]:
    """Return the names in the typed dictionary of ``**options``, if there is one."""
    for one in inspect.signature(function).parameters.values():
        if one.kind is one.VAR_KEYWORD and (passed := get_args(one.annotation)):
            return set(passed[0].__annotations__)
    return set()


def _keywords(function: Callable[..., Any]) -> Iterator[str]:
    """Yield the names that may only be passed as keywords."""
    if inspect.isfunction(function):
        for name, one in inspect.signature(function).parameters.items():
            if one.kind is one.KEYWORD_ONLY:
                yield name
