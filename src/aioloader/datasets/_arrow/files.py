"""What Parquet and Arrow files have in common: where they lie, and their columns.

Ends of files are read many at a time; the columns that the first file has are those
that all files must have, in name and type.
"""

import asyncio
import importlib
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from typing_extensions import Buffer

from aioloader.datasets._stores.bytes import file_failure
from aioloader.errors import DatasetError, TruncatedReadError

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")

# Files whose ends are read at once.
_AT_ONCE = 32
# Most footers are shorter, so that one request gets them.
_TAIL = 1 << 16


class Opener(Protocol):
    """Where files lie."""

    async def expand(self, patterns: str | Iterable[str]) -> list[str]:
        """Return the addresses that ``patterns`` name, in order."""

    def label(self, address: str) -> str:
        """Return what may be shown of an address."""

    def path(self, address: str) -> str | None:
        """Return the path of a local file, or None."""

    async def size(self, address: str) -> int:
        """Return the length of a file that is not local, in bytes."""

    async def read(self, address: str, start: int, stop: int) -> Buffer:
        """Return bytes of such a file, as it was when its size was asked for."""

    async def aclose(self) -> None:
        """Wait for requests in flight, and drop connections."""


class Tail(NamedTuple):
    """The end of a file.

    Attributes:
        size: Length of the whole file, in bytes.
        data: Its last bytes.
    """

    size: int
    data: bytes


def import_pyarrow(*modules: str) -> None:
    """Import pyarrow and some of its modules, which takes a while, or say what to do.

    Raises:
        ImportError: If it is not installed.
    """
    try:
        for name in ("pyarrow", *modules):
            importlib.import_module(name)
    except ImportError as exc:
        raise ImportError(
            "Parquet and Arrow files need pyarrow: pip install 'aioloader[arrow]'"
        ) from exc


async def read_tail(opener: Opener, address: str, least: int = _TAIL) -> Tail:
    """Return the last ``least`` bytes of a file, or all that it has.

    Raises:
        DatasetError: If it cannot be read.
    """
    path = opener.path(address)
    if path is not None:
        return await asyncio.to_thread(_read_local, path, -least, 0)
    size = await opener.size(address)
    start = max(0, size - least)
    data = bytes(memoryview(await opener.read(address, start, size)))
    return Tail(size, _checked(data, size - start, opener.label(address)))


async def read_head(opener: Opener, address: str, stop: int) -> bytes:
    """Return the first ``stop`` bytes of a file, which has as many.

    Raises:
        DatasetError: If it cannot be read.
    """
    path = opener.path(address)
    if path is not None:
        return (await asyncio.to_thread(_read_local, path, 0, stop)).data
    data = bytes(memoryview(await opener.read(address, 0, stop)))
    return _checked(data, stop, opener.label(address))


def _read_local(path: str, start: int, stop: int) -> Tail:
    """Return bytes of a local file; a negative start counts from the end, as 0 does."""
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123  (thousands of them)
            size = os.fstat(file.fileno()).st_size
            start = max(0, start + size) if start < 0 else start
            file.seek(start)
            data = file.read((stop or size) - start)
    except OSError as error:
        raise file_failure(path, error) from error
    return Tail(size, _checked(data, (stop or size) - start, path))


def _checked(data: bytes, expected: int, location: str) -> bytes:
    if len(data) != expected:
        raise TruncatedReadError(
            f"{location!r} gave {len(data):,} of {expected:,} bytes; it was written "
            "anew meanwhile",
            location=location,
            expected=expected,
            received=len(data),
        )
    return data


async def each(
    function: Callable[[str], Awaitable[T]], addresses: Sequence[str]
) -> list[T]:
    """Return ``function`` of each address, several at a time, in order.

    The first failure ends the others.
    """
    found: dict[int, T] = {}
    waiting = iter(enumerate(addresses))

    async def work() -> None:
        for number, address in waiting:
            found[number] = await function(address)

    workers = [
        asyncio.ensure_future(work()) for _ in range(min(_AT_ONCE, len(addresses)))
    ]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [found[number] for number in range(len(addresses))]


class Wanted:
    """The columns that are read, and what stands for NULL in them.

    Args:
        columns: Names, in the order of the rows' keys; None: those of the first file.
        nulls: Column to the value that is read instead of NULL.

    Raises:
        ValueError: If there are no names, or one twice.
    """

    def __init__(
        self, columns: Iterable[str] | None, nulls: Mapping[str, Any] | None
    ) -> None:
        if isinstance(columns, str):
            raise TypeError(f"columns must be a list of names, got {columns!r}")
        names = None if columns is None else list(columns)
        if names is not None and (not names or len(set(names)) < len(names)):
            raise ValueError(f"columns must be names, each of them once, got {names}")
        unknown = set(nulls or {}) - set(names or nulls or {})
        if unknown:
            raise ValueError(f"nulls= names {sorted(unknown)}, not in columns {names}")
        self._names = names
        self._nulls = dict(nulls or {})
        self._schema: pa.Schema | None = None

    def names(self) -> list[str]:
        """Return the names; known once a file was checked."""
        assert self._schema is not None
        names: list[str] = self._schema.names
        return names

    def check(self, schema: "pa.Schema", location: str) -> None:
        """Compare the columns of a file with those of the first one that was checked.

        Raises:
            DatasetError: If one is missing, or of another type.
            ValueError: If a value of ``nulls`` does not suit its column.
        """
        first = self._schema
        names = self._names or (schema.names if first is None else first.names)
        fields = [_field(schema, name, location) for name in names]
        if first is not None:
            for field in fields:
                expected = first.field(field.name).type
                if field.type != expected:
                    raise DatasetError(
                        f"column {field.name!r} of {location!r} is of type "
                        f"{field.type}, and of type {expected} in the files before; "
                        "write them alike, or leave it out (columns=)",
                        location=location,
                    )
            return
        import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

        chosen = pa.schema(fields)
        for name, value in self._nulls.items():
            _fill(pa.nulls(1, _field(chosen, name, location).type), name, value)
        self._schema = chosen

    def of(self, batch: "pa.RecordBatch") -> "pa.RecordBatch":
        """Return the columns of a batch of a file that was checked."""
        return batch.select(self.names())

    def fill(self, batch: "pa.RecordBatch") -> "pa.RecordBatch":
        """Replace NULLs in a batch of these columns."""
        for name, value in self._nulls.items():
            place = batch.schema.get_field_index(name)
            column = _fill(batch.column(place), name, value)
            batch = batch.set_column(place, name, column)
        return batch


def checked(schema: "pa.Schema") -> "pa.Schema":
    """Return a schema whose names are text all through.

    Raises:
        UnicodeDecodeError: If a name is none.
    """
    for field in schema:
        str(field.name)
        _check_names(field.type)
    return schema


def _check_names(kind: "pa.DataType") -> None:
    for number in range(kind.num_fields):
        field = kind.field(number)
        str(field.name)
        _check_names(field.type)


def _field(schema: "pa.Schema", name: str, location: str) -> "pa.Field":
    places = schema.get_all_field_indices(name)
    if len(places) == 1:
        return schema.field(places[0])
    what = f"{len(places)} columns" if places else "no column"
    known = ", ".join(map(repr, schema.names[:20])) or "none"
    more = f" and {len(schema.names) - 20:,} more" if len(schema.names) > 20 else ""
    raise DatasetError(
        f"{location!r} has {what} {name!r}; its columns are {known}{more}",
        location=location,
    )


def _fill(column: "pa.Array", name: str, value: Any) -> "pa.Array":
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    try:
        return column.fill_null(pa.scalar(value, column.type))
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ValueError(
            f"nulls={{{name!r}: {value!r}}} does not suit a column of type "
            f"{column.type}: {error}"
        ) from error
