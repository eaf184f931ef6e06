"""PostgreSQL values without an Arrow type: exact numbers and infinite dates.

A ``numeric`` is a ``Decimal``, with all its digits, or a float if the user chooses
that. A driver would read an infinite date as an ordinary day; here it is an error that
names the row's key, or NULL if the user chooses that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from aioloader.datasets._checks import check_word
from aioloader.datasets._sql.relation import Relation, column, quoted
from aioloader.errors import DatasetError

if TYPE_CHECKING:
    import pyarrow as pa

Numeric: TypeAlias = Literal["decimal", "float"]
Infinity: TypeAlias = Literal["error", "null"]

# Selected in addition: the number of the first infinite column, or NULL.
FLAG = "aioloader: infinite"
# Expressions for the nearest float of an exact number, by type.
FLOATS = {
    "numeric": "{}::float8",
    "money": "{}::numeric::float8",
    "_numeric": "{}::float8[]",
    "_money": "{}::numeric[]::float8[]",
}
# Conditions by type. None is true for NULL.
_POINT = "NOT isfinite({0})"
_LIST = "('infinity' = ANY({0}) OR '-infinity' = ANY({0}))"
_RANGE = "(NOT isfinite(lower({0})) OR NOT isfinite(upper({0})))"
_INFINITE = {
    **dict.fromkeys(("date", "timestamp", "timestamptz", "interval"), _POINT),
    **dict.fromkeys(("_date", "_timestamp", "_timestamptz"), _LIST),
    **dict.fromkeys(("daterange", "tsrange", "tstzrange"), _RANGE),
}
_FINITE_LIST = "array_replace(array_replace({0}, 'infinity', NULL), '-infinity', NULL)"
POINTS = frozenset(kind for kind, rule in _INFINITE.items() if rule is _POINT)


@dataclass(frozen=True)
class Values:
    """How to read values without an Arrow or Python type."""

    numeric: Numeric = "decimal"
    infinity: Infinity = "error"

    def __post_init__(self) -> None:
        check_word(self.numeric, Numeric, "numeric")
        check_word(self.infinity, Infinity, "infinity")

    def selection(self, columns: Mapping[str, tuple[str, str]]) -> str:
        """Return the list after SELECT; if infinite dates are errors, with a ``FLAG``.

        Args:
            columns: For each, the type and the expression that reads it, with ``{}``
                for the column; empty: as it is, with NULL for infinite dates.
        """
        parts: list[str] = []
        cases: list[str] = []
        for at, (name, (kind, cast)) in enumerate(columns.items()):
            read, rule = cast or "{}", "" if cast else _INFINITE.get(kind, "")
            if rule:
                cases.append(f"WHEN {rule.format(column(name))} THEN {at}")
                read = f"CASE WHEN {rule} THEN NULL ELSE {{0}} END"
                read = _FINITE_LIST if rule is _LIST else read
            parts.append(f"{read.format(column(name))} AS {quoted(name)}")
        if cases and self.infinity == "error":
            parts.append(f"CASE {' '.join(cases)} END AS {quoted(FLAG)}")
        return ", ".join(parts)


def infinite_error(
    relation: Relation, key: Any, name: str, location: str
) -> DatasetError:
    """Return the error for a row with an infinite date in a column."""
    return DatasetError(
        f"the row of {relation.label} with {relation.key} = {key!r} has an infinite "
        f"date in column {name!r}, which neither Arrow nor Python can represent; read "
        "it as NULL (infinity='null'), or replace it in a query or a view",
        location=location,
    )


def as_decimals(batch: "pa.RecordBatch", names: Sequence[str]) -> "pa.RecordBatch":
    """Mark columns of text as exact numbers, so that their values become decimals."""
    import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

    for name in names:
        place = batch.schema.get_field_index(name)
        array = batch.column(place)
        kind = pa.opaque(pa.string(), "numeric", "PostgreSQL")
        if pa.types.is_list(array.type):
            kind = pa.list_(kind)
        batch = batch.set_column(place, name, array.cast(kind))
    return batch
