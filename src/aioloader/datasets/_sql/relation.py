"""A table or query of a database, in a form to select from.

Names are quoted, never trusted; a query is the user's own text and is put in brackets.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b
from typing import Any, Literal, TypeAlias

from aioloader.datasets._checks import check_is, check_word

Numeric: TypeAlias = Literal["decimal", "float"]
Infinity: TypeAlias = Literal["error", "null"]

_QUERY = re.compile(
    r"(?:\s|\(|--[^\n]*\n|/\*.*?\*/)*(?:select|with|values)[\s(*'\"/-]",
    re.IGNORECASE | re.DOTALL,
)
# A part of a dotted name, and the dot that another part follows.
_PART = re.compile(r'(?:"((?:[^"]|"")+)"|([^."]+))(?:\.(?!\Z)|\Z)')


class Relation:
    """A table or query, the key to order and divide by, and what to read of it.

    A table is ``name`` or ``schema.name``, quoted if it has a dot; a query has
    placeholders for ``parameters``. Without ``columns`` all are wanted. ``numeric`` and
    ``infinity`` are as for ``SQLDataset``.
    """

    text: str
    key: str
    columns: tuple[str, ...] | None
    parameters: tuple[Any, ...]
    is_query: bool
    label: str
    key_column: str  # as an expression

    def __init__(
        self,
        text: str,
        key: str,
        columns: Iterable[str] | None = None,
        parameters: Iterable[Any] = (),
        numeric: Numeric = "decimal",
        infinity: Infinity = "error",
    ) -> None:
        check_word(numeric, Numeric, "numeric")
        check_word(infinity, Infinity, "infinity")
        if isinstance(columns, str):
            raise TypeError(f"columns must be a list of names, got {columns!r}")
        if not is_list(parameters):
            kind = type(parameters).__name__
            raise TypeError(f"parameters must be a list of values, got {kind}")
        check_is(text, str, "query", "a string")
        check_is(key, str, "key", "a string")
        self.text, self.key = text, key
        self.numeric, self.infinity = numeric, infinity
        self.columns = None if columns is None else tuple(columns)
        self.parameters = tuple(parameters)
        self.is_query = bool(_QUERY.match(text))
        shown = " ".join(text.split())
        shown = shown if len(shown) < 80 else f"{shown[:77]}..."
        self.label = f"query {shown!r}" if self.is_query else f"table {shown!r}"
        if self.parameters and not self.is_query:
            raise ValueError("parameters are for a query, and this is a table")
        if self.columns is not None and not self.columns:
            raise ValueError("columns must name at least one column")
        names = self.columns or ()
        if len({*names}) < len(names):
            raise ValueError(f"columns must not repeat, got {', '.join(names)}")
        for name in names:
            quoted(name)
        self.key_column = column(key)
        # The bracket is on a separate line, because a query may end in a comment.
        rows = f"(\n{text.rstrip().rstrip(';')}\n)" if self.is_query else self.table()
        self._from = f"{rows} AS q"

    def describe(self) -> dict[str, Any]:
        """Return what determines the rows, JSON-serialisable; values as a digest."""
        words = repr((self.text, self.parameters)).encode("utf-8", "surrogatepass")
        return {
            "query": self.label,
            "digest": blake2b(words, digest_size=8).hexdigest(),
            "key": self.key,
            "columns": None if self.columns is None else list(self.columns),
            "numeric": self.numeric,
            "infinity": self.infinity,
        }

    def table(self) -> str:
        parts: list[str] = []
        at = 0
        while match := _PART.match(self.text, at):
            parts.append(match[1].replace('""', '"') if match[1] else match[2])
            at = match.end()
        if not parts or at < len(self.text):
            raise ValueError(
                f"{self.text!r} is not a table; write name, schema.name or "
                '"any name"."with.dots"'
            )
        return ".".join(map(quoted, parts))

    def key_error(self, what: str) -> ValueError:
        return ValueError(
            f"key {self.key!r} is {what} in some rows; leave them out by a query"
        )

    def select(self, what: str, *more: str) -> str:
        """Return a query of the rows, whose columns are those of ``q``."""
        return select(what, self._from, *more)

    def names(
        self, found: Sequence[str], hidden: Collection[str] = ()
    ) -> Sequence[str]:
        """Return the columns to deliver; ``hidden`` ones only if they are wanted.

        A ValueError if one does not exist, or two have the same name.
        """
        shown = ", ".join(found)
        if len(set(found)) < len(found):
            raise ValueError(f"columns must have distinct names, got {shown}")
        names = tuple(found) if self.columns is None else self.columns
        for name in (*names, self.key):
            if name not in found and name not in hidden:
                raise ValueError(f"there is no column {name!r}; there are {shown}")
        return names


def is_list(given: Any) -> bool:
    """Return whether an argument can be a list of values, which text cannot."""
    return isinstance(given, Iterable) and not isinstance(given, (str, bytes))


def quoted(name: str) -> str:
    if not name or "\0" in name:
        raise ValueError(f"names must be without NUL and not empty, got {name!r}")
    escaped = name.replace('"', '""')
    return f'"{escaped}"'


def column(name: str) -> str:
    """Return a column of ``q``: SQLite reads an unknown bare name as a string."""
    return f"q.{quoted(name)}"


def select(what: str, rows: str, *more: str) -> str:
    return " ".join(("SELECT", what, "FROM", rows, *more))
