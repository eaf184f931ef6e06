"""Encode objects as a small header and raw buffers, and decode them (pickle 5).

Arrays, and other objects that the sender's reducers turn into buffers, go out of band;
the sender decides where to put the buffers (``lay_out``). Values with parts that plain
pickle refuses (lambdas, local classes) are pickled by value.
"""

import contextlib
import contextvars
import copyreg
import functools
import io
import operator
import pickle
import sys
import threading
import weakref
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeAlias

Reducers: TypeAlias = Mapping[type, Callable[[Any], Any]]
Buffers: TypeAlias = list[pickle.PickleBuffer]
Extent: TypeAlias = tuple[int, int]  # first byte, and size
PendingCopies: TypeAlias = list[tuple[int, memoryview]]  # destination, and source

# Reducers of values that may go to the loader's own workers, but into no other pickle.
ONLY_TO_WORKERS: dict[type, Callable[[Any], Any]] = {}

# Smaller buffers stay in the header, which is cheaper.
MIN_BUFFER_BYTES = 1 << 9
ALIGN = 64  # of buffers, in bytes: enough for every type


def encode(
    value: Any, reducers: Reducers, min_bytes: int = MIN_BUFFER_BYTES
) -> tuple[bytes, Buffers]:
    """Return ``value`` as a header and the buffers it refers to.

    Every object that a ``multiprocessing`` queue accepts can be encoded. ``reducers``
    apply to exact types. Buffers smaller than ``min_bytes`` stay in the header.
    """
    known = ForkingPickler._extra_reducers  # type: ignore[attr-defined]  # noqa: SLF001  (torch's are there)
    try:
        return _dump(
            pickle.Pickler,
            value,
            min_bytes,
            {**copyreg.dispatch_table, **known, **reducers},
        )
    except (pickle.PicklingError, AttributeError, TypeError):
        return encode_by_value(value, reducers, min_bytes)


def encode_portable(
    value: Any, reducers: Reducers, min_bytes: int = MIN_BUFFER_BYTES
) -> tuple[bytes, Buffers]:
    """Encode ``value`` for any process, by value if the process may lack a module."""
    header, buffers = encode(value, reducers, min_bytes)
    if any(name.encode() in header for name in _modules_by_value()):
        return encode_by_value(value, reducers, min_bytes)
    return header, buffers


def encode_by_value(
    value: Any, reducers: Reducers, min_bytes: int = MIN_BUFFER_BYTES
) -> tuple[bytes, Buffers]:
    """Encode ``value`` with cloudpickle, for a process that may lack its modules."""
    import cloudpickle

    table = ChainMap(dict(reducers), _BY_VALUE, cloudpickle.Pickler.dispatch_table)
    # A new class: the pickler reads the table of its class when it is made.
    pickler = type("ByValue", (cloudpickle.Pickler,), {"dispatch_table": table})
    return _dump(pickler, value, min_bytes)


def _modules_by_value() -> set[str]:
    """Return the names of the modules whose objects are pickled by value."""
    import cloudpickle

    return {"__main__", *cloudpickle.list_registry_pickle_by_value()}


def _reduce_cached(function: Any) -> Any:
    """Reduce an ``lru_cache`` function to its parts, unless it can be imported."""
    module: str = function.__module__
    try:
        imported = operator.attrgetter(function.__qualname__)(sys.modules.get(module))
    except AttributeError:  # it is local, or has another name
        imported = None
    is_sent = any(f"{module}.".startswith(f"{name}.") for name in _modules_by_value())
    if imported is function and not is_sent:
        return function.__reduce__()
    return _with_cache, (function.__wrapped__, function.cache_parameters())


def _with_cache(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _reduce_property(value: functools.cached_property[Any]) -> Any:
    return functools.cached_property, (value.func,), {"attrname": value.attrname}


def _name_of_global(value: object) -> str | None:
    """Return the name of ``value`` in a module that is pickled by value, or None.

    ``value`` may be a global, a class attribute, or a part of an event or queue.
    """
    modules, seen = _modules_by_value(), set[int]()
    spaces = [vars(sys.modules[name]) for name in modules if name in sys.modules]
    for space in spaces:  # the loop adds classes, events and queues
        for name, part in list(space.items()):
            if part is value:
                return name
            is_class = isinstance(part, type) and part.__module__ in modules
            is_known = type(part).__module__ in {"threading", "queue"}
            if (is_class or is_known) and id(part) not in seen:
                seen.add(id(part))
                spaces.append(vars(part))
    return None


def _reduce_global(make: Callable[[], object], value: Any) -> Any:
    """Reduce a module's global lock or similar; the other process creates its own.

    Other values, such as a dataset's lock, are left to ``pickle``, which refuses them.
    """
    name = _name_of_global(value)
    if name is None:
        return value.__reduce_ex__(5)
    if repr(value).startswith("<locked"):  # an RLock has no ``locked``
        raise pickle.PicklingError(f"{name} is held: release it before you iterate")
    return make, ()


def _reduce_variable(variable: "contextvars.ContextVar[Any]") -> Any:
    options: dict[str, Any] = {}
    with contextlib.suppress(LookupError):
        options["default"] = contextvars.Context().run(variable.get)
    make: Any = functools.partial(contextvars.ContextVar, variable.name, **options)
    return _reduce_global(make, variable)


# Types that cloudpickle refuses or looks up by name; ``singledispatch`` uses the last.
_BY_VALUE: dict[type, Callable[[Any], Any]] = {
    functools._lru_cache_wrapper: _reduce_cached,  # noqa: SLF001  (it has no other name)
    functools.cached_property: _reduce_property,
    type(threading.Lock()): functools.partial(_reduce_global, threading.Lock),
    type(threading.RLock()): functools.partial(_reduce_global, threading.RLock),
    threading.local: functools.partial(_reduce_global, threading.local),
    contextvars.ContextVar: _reduce_variable,
    weakref.WeakKeyDictionary: lambda value: (type(value), (dict(value),)),
}


def _dump(
    pickler_class: Callable[..., Any],
    value: Any,
    min_bytes: int,
    table: Reducers | None = None,
) -> tuple[bytes, Buffers]:
    file, buffers = io.BytesIO(), Buffers()

    def is_in_band(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < min_bytes:
            return True
        buffers.append(buffer)
        return False

    pickler = pickler_class(file, protocol=5, buffer_callback=is_in_band)
    if table is not None:
        pickler.dispatch_table = table
    pickler.dump(value)
    return file.getvalue(), buffers


def decode(header: bytes | memoryview, buffers: Sequence[Any] = ()) -> Any:
    """Return the decoded object; its arrays are views that keep ``buffers`` alive."""
    return pickle.loads(header, buffers=buffers)  # noqa: S301  (our own processes)


def lay_out(
    raws: Sequence[memoryview], addresses: Sequence[int], end: int
) -> tuple[list[Extent], PendingCopies, int]:
    """Return positions for buffers from byte ``end`` on; shared memory stays shared.

    Tensors may be views of the same memory, such as the inputs and targets of a
    language model. Each byte is copied once, so that these tensors share memory at the
    receiver as well.

    Args:
        raws: The buffers, of shape ``(nbytes,)``.
        addresses: Each buffer's address, or 0 if the buffer shares no memory.
        end: The first free byte of the destination.

    Returns:
        Each buffer's extent, the copies to make, in order, and the next free byte.
    """
    extents: list[Extent] = [(0, 0)] * len(raws)
    copies: PendingCopies = []
    start = first = last = 0  # of shared memory: position, first and last address
    for k in sorted(range(len(raws)), key=addresses.__getitem__):
        raw, address, nbytes = raws[k], addresses[k], raws[k].nbytes
        if address < last:
            place = start + address - first
            if address + nbytes > last:
                copies.append((start + last - first, raw[last - address :]))
                last = address + nbytes
                end = place + nbytes
        else:
            place = aligned(end) + address % ALIGN
            if address:
                start, first, last = place, address, address + nbytes
            copies.append((place, raw))
            end = place + nbytes
        extents[k] = place, nbytes
    return extents, copies, aligned(end)


def overlap(extents: Sequence[Extent]) -> bool:
    """Tell whether any two of the extents overlap."""
    last = 0
    for address, nbytes in sorted(extents):
        if address < last:
            return True
        last = address + nbytes
    return False


def aligned(place: int) -> int:
    return -(-place // ALIGN) * ALIGN
