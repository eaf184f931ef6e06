"""A table or query of a database, in a form to select from.

Names are quoted, never trusted; a query is the user's own text and is put in brackets.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

_QUERY = re.compile(
    r"(?:\s|\(|--[^\n]*\n|/\*.*?\*/)*(?:select|with|values)[\s(*'\"/-]",
    re.IGNORECASE | re.DOTALL,
)
_NAME = re.compile(r'"((?:[^"]|"")+)"|([^."]+)')


@dataclass(frozen=True)
class Source:
    """A table or query, and its wanted columns.

    Attributes:
        text: Name of a table (``name``, ``schema.name``, quoted if it has a dot) or a
            query.
        key: The column to order and divide by.
        columns: The columns wanted, in order; None: all.
        parameters: Values of the query's placeholders.
    """

    text: str
    key: str
    columns: tuple[str, ...] | None = None
    parameters: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        for name, value in {"query": self.text, "key": self.key}.items():
            if not isinstance(value, str):
                kind = type(value).__name__
                raise TypeError(f"{name} must be a string, got {kind}")
        if self.parameters and not self.is_query:
            raise ValueError("parameters are for a query, and this is a table")
        if self.columns is not None and not self.columns:
            raise ValueError("columns must name at least one column")
        if self.columns is not None and len({*self.columns}) < len(self.columns):
            raise ValueError(f"columns must not repeat, got {', '.join(self.columns)}")
        for name in (self.key, *(self.columns or ())):
            quoted(name)
        self.table()

    @property
    def is_query(self) -> bool:
        """Whether the text is a query, not a name."""
        return bool(_QUERY.match(self.text))

    @property
    def label(self) -> str:
        """The name in errors."""
        shown = " ".join(self.text.split())
        shown = shown if len(shown) < 80 else f"{shown[:77]}..."
        return f"query {shown!r}" if self.is_query else f"table {shown!r}"

    def describe(self) -> dict[str, Any]:
        """Return what determines the rows, JSON-serialisable; values as a digest."""
        words = repr((self.text, self.parameters)).encode("utf-8", "surrogatepass")
        return {
            "query": self.label,
            "digest": blake2b(words, digest_size=8).hexdigest(),
            "key": self.key,
            "columns": None if self.columns is None else list(self.columns),
        }

    def table(self) -> str:
        """Return the quoted name; empty for a query.

        Raises:
            ValueError: If it is not a valid name.
        """
        if self.is_query:
            return ""
        return ".".join(quoted(part) for part in _parts(self.text))

    def relation(self) -> str:
        """Return the FROM clause; its columns are those of ``q``."""
        if not self.is_query:
            return f"{self.table()} AS q"
        # On a separate line, because the query may end in a comment.
        return f"(\n{self.text.rstrip().rstrip(';')}\n) AS q"


def quoted(name: str) -> str:
    """Return a quoted SQL name.

    Raises:
        ValueError: If it is empty or has a NUL.
    """
    if not name or "\0" in name:
        raise ValueError(f"names must be without NUL and not empty, got {name!r}")
    escaped = name.replace('"', '""')
    return f'"{escaped}"'


def column(name: str) -> str:
    """Return a column of ``q``: SQLite reads an unknown bare name as a string."""
    return f"q.{quoted(name)}"


def select(what: str, relation: str, *more: str) -> str:
    """Return a statement; all names in it are quoted."""
    return " ".join(("SELECT", what, "FROM", relation, *more))


def selection(names: Sequence[str], casts: Sequence[str]) -> str:
    """Return the list after SELECT.

    Args:
        names: The columns.
        casts: For each, an expression with ``{}`` for the column.
    """
    pairs = zip(names, casts, strict=True)
    parts = [f"{cast.format(column(name))} AS {quoted(name)}" for name, cast in pairs]
    return ", ".join(parts)


def checked_names(
    source: Source, found: Sequence[str], known: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the names of the columns to deliver.

    Args:
        source: The table or query.
        found: Its columns.
        known: Its columns, including hidden ones.

    Raises:
        ValueError: If one does not exist, or two have the same name.
    """
    if len(set(found)) < len(found):
        raise ValueError(f"columns must have distinct names, got {', '.join(found)}")
    names = tuple(found) if source.columns is None else source.columns
    missing = [name for name in (*names, source.key) if name not in (known or found)]
    if missing:
        raise ValueError(
            f"there is no column {missing[0]!r}; there are {', '.join(found)}"
        )
    return names


def any_null(source: Source) -> str:
    """Return the query for a NULL key; a row means there is one."""
    missing = f"{column(source.key)} IS NULL"
    return select("1", source.relation(), "WHERE", missing, "LIMIT 1")


def rising(source: Source, key_type: str, count: int, sign: str) -> str:
    """Return the query for how many of ``count`` bounds do not rise.

    The bounds are parameters after those of the query. An empty part with the key
    itself provides its collation.
    """
    first = len(source.parameters) + 1
    none = select(
        f"{column(source.key)} AS k, 0 AS n", source.relation(), "WHERE 1 = 0"
    )
    given = [f"SELECT CAST({sign}{first + n} AS {key_type}), {n}" for n in range(count)]
    bounds = " UNION ALL ".join((none, *given))
    pairs = select("k, lag(k) OVER (ORDER BY n) AS before", f"({bounds}) AS b")
    return select("count(*)", f"({pairs}) AS c", "WHERE k <= before")


def _parts(text: str) -> list[str]:
    """Return the parts of a dotted name."""
    parts: list[str] = []
    at = 0
    while match := _NAME.match(text, at):
        parts.append(match[1].replace('""', '"') if match[1] else match[2])
        at = match.end()
        if at == len(text):
            return parts
        if text[at] != ".":
            break
        at += 1
    raise ValueError(
        f'{text!r} is not a table; write name, schema.name or "any name"."with.dots"'
    )
