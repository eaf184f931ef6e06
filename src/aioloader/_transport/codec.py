"""Encode objects as a small header and raw buffers, and back (pickle protocol 5).

Arrays, and other objects that the sender's reducers turn into buffers, go out of band:
the header refers to them, and the sender decides where to put them. Plain pickle is
tried first; objects that it refuses (lambdas, local classes, classes of ``__main__``)
are pickled by value.
"""

import copyreg
import io
import pickle
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeAlias

Reducers: TypeAlias = Mapping[type, Callable[[Any], Any]]
Buffers: TypeAlias = list[pickle.PickleBuffer]

# Of values that go to the loader's own workers, in memory, and into no other pickle.
ONLY_TO_WORKERS: dict[type, Callable[[Any], Any]] = {}

# Smaller buffers stay in the header, which is cheaper.
LEAST_BYTES = 1 << 9


def encode(
    value: Any, reducers: Reducers, least_bytes: int = LEAST_BYTES
) -> tuple[bytes, Buffers]:
    """Return ``value`` as a header and the buffers it refers to.

    Args:
        value: What to send; it is not changed.
        reducers: Reducers by exact type, as for ``copyreg``.
        least_bytes: Buffers of fewer bytes stay in the header.

    Raises:
        Exception: Any error of pickling it by value.
    """
    try:
        return _dump(_plain(reducers), value, least_bytes)
    except (pickle.PicklingError, AttributeError, TypeError):
        return encode_by_value(value, reducers, least_bytes)


def encode_by_value(
    value: Any, reducers: Reducers, least_bytes: int = LEAST_BYTES
) -> tuple[bytes, Buffers]:
    """Encode for a process that has another ``__main__`` or lacks our modules."""
    import cloudpickle

    table = ChainMap(dict(reducers), cloudpickle.Pickler.dispatch_table)
    # A new class: the pickler reads the table of its class when it is made.
    pickler = type("ByValue", (cloudpickle.Pickler,), {"dispatch_table": table})
    return _dump(pickler, value, least_bytes)


class _Table(dict[type, Callable[[Any], Any]]):
    """Reducers, and those of ``multiprocessing``, which include torch's.

    With them these picklers accept the same objects as a queue of ``multiprocessing``.
    """

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        known = ForkingPickler._extra_reducers  # type: ignore[attr-defined]  # noqa: SLF001
        reducer: Callable[[Any], Any] = known.get(kind) or copyreg.dispatch_table[kind]
        return reducer


def _plain(reducers: Reducers) -> Callable[..., Any]:
    """Return a function that makes plain picklers with ``reducers``."""
    table = _Table(reducers)

    def make(*args: Any, **options: Any) -> pickle.Pickler:
        pickler = pickle.Pickler(*args, **options)
        pickler.dispatch_table = table
        return pickler

    return make


def decode(header: bytes | memoryview, buffers: Sequence[Any] = ()) -> Any:
    """Return an encoded object; its arrays are views that keep ``buffers`` alive."""
    return pickle.loads(header, buffers=buffers)  # noqa: S301  (our own processes)


def _dump(
    pickler_class: Callable[..., Any], value: Any, least_bytes: int
) -> tuple[bytes, Buffers]:
    file, buffers = io.BytesIO(), Buffers()

    def is_in_band(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < least_bytes:
            return True
        buffers.append(buffer)
        return False

    pickler_class(file, protocol=5, buffer_callback=is_in_band).dump(value)
    return file.getvalue(), buffers
