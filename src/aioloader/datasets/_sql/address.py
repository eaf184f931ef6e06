"""The database and the table or query that a user names; errors, and retries.

A password is in no message, repr or pickle: only the loader's workers get it. Drivers
parse URLs themselves, and show what they cannot parse: so its form is checked before.
Of a driver's text the first line is shown, without the statement. Names in statements
are quoted, never trusted; a query is the user's own text and is put in brackets.
"""

import asyncio
import logging
import os
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from hashlib import blake2b
from typing import Any, Literal, TypeAlias, TypeVar
from urllib.parse import quote, unquote

from aioloader._base.retry import backoff
from aioloader.datasets._checks import check_is, check_word
from aioloader.datasets._stores.redact import Sealed, revealed
from aioloader.errors import (
    DatasetError,
    ObjectNotFoundError,
    ObjectPermissionError,
    TruncatedReadError,
)

_LOG = logging.getLogger("aioloader")
T = TypeVar("T")

# What comes before a question mark: perhaps an account, hosts, perhaps a name.
_HOST = r"(?:\[[^][/@#]*\]|[^][:,/@#]*)(?::\d*)?"
_SERVER = re.compile(rf"(?:[^:/@#]*(?::[^/@#]*)?@)?{_HOST}(?:,{_HOST})*(?:/[^@#]*)?")
_QUERY = re.compile(r"(?:\w+=[^&#]*(?:&|\Z))*")
# A password, and parameters of libpq and encrypted SQLite files that are secrets.
_SECRET = re.compile(
    r"(?<=://)[^:/?]*:(?P<account>[^@/?]+)@|(?<=[?&])(?P<name>password|sslpassword|"
    r"scram_(?:client|server)_key|oauth_client_secret|(?:hex|text)?key)=(?P<value>[^&]+)"
)
# An idle connection that is dead is noticed within a minute.
_DEFAULTS = (
    "fallback_application_name=aioloader&connect_timeout=10&keepalives_idle=30&"
    "keepalives_interval=10&keepalives_count=3"
)
_ENCODING = "client_encoding=UTF8"  # as drivers decode it, which do not ask
_SHOWN = ("host=", "port=", "dbname=")
# asyncpg would pass these on to the server, which does not know them.
_ONLY_LIBPQ = (
    "client_encoding=", "fallback_application_name=", "connect_timeout=", "keepalives",
    "tcp_user_timeout=", "gssencmode=",
)  # fmt: skip

_SERVER_SAYS = re.compile(r"\b(?:ERROR|FATAL|PANIC):\s+([^\n]+)")
_STATUS = re.compile(r"^[A-Z_]+: (?=\S)|\[(?:libpq|SQLite)\] |Failed to [a-z ]+: ")
# Kinds of errors by PostgreSQL's code, or by the text of an error without one.
_REFUSED = re.compile(
    r"^(?:28\w{3}|42501)$|authentication failed|no password supplied|permission denied|"
    r"no pg_hba\.conf entry|role .* does not exist|not authorized"
)
_MISSING = re.compile(
    r"^(?:42P01|3D000|3F000)$|no such table|(?:database|relation) .* does not exist"
)
_DOTTED = re.compile(r'(?:no such table: |relation ")[^"\s]*\.')
_UNWRITABLE = re.compile("readonly database|unable to open database file")
# The server cannot serve now; too many clients; a conflict on a standby.
_PASSING = re.compile(
    r"^(?:08\w{3}|57P0\w|53300|40001|40P01)$|database (?:table )?is locked|"
    r"too many clients|starting up|connection (?:is|was) closed"
)
Numeric: TypeAlias = Literal["decimal", "float"]
Infinity: TypeAlias = Literal["error", "null"]

_SELECT = re.compile(
    r"(?:\s|\(|--[^\n]*\n|/\*.*?\*/)*(?:select|with|values)[\s(*'\"/-]",
    re.IGNORECASE | re.DOTALL,
)
# A part of a dotted name, and the dot that another part follows.
_NAME = re.compile(r'(?:"((?:[^"]|"")+)"|([^."]+))(?:\.(?!\Z)|\Z)')


class DatabaseURL:
    """The address of a database.

    ``sqlite:///relative``, ``sqlite:////absolute`` (with ``%3F`` for ``?``), or
    ``postgresql://user@host:port/name?parameters``, for a Unix socket
    ``postgresql:///name?host=/directory``; perhaps sealed. Parameters are SQLite's or
    libpq's.

    Attributes:
        label: The address as it may be shown.
        is_sqlite: Whether it is a file.
    """

    def __init__(self, url: Any) -> None:
        url = revealed(url)
        check_is(url, str, "url", "sqlite:///path or postgresql://host/name")
        scheme, separator, rest = url.partition("://")
        if not separator or scheme not in {"sqlite", "postgresql", "postgres"}:
            shown = f"{scheme}://..." if separator and scheme.isalnum() else "no scheme"
            raise ValueError(
                f"url must be sqlite:///path or postgresql://host/name, got {shown}"
            )
        self.is_sqlite: bool = scheme == "sqlite"
        before, _, query = rest.partition("?")
        if not _QUERY.fullmatch(query):
            raise ValueError(
                "url must have parameters such as ?name=value&name=value, and %3F for "
                "a ? in the name of a file"
            )
        if self.is_sqlite:
            self._path = _sqlite_path(before)
            self.label: str = f"sqlite:///{self._path}"
        elif _SERVER.fullmatch(before):
            hosts = [pair for pair in query.split("&") if pair.startswith(_SHOWN)]
            self.label = f"postgresql://{before.rpartition('@')[2]}"
            self.label += f"?{'&'.join(hosts)}" if hosts else ""
        else:
            raise ValueError(
                "url must be postgresql://user:password@host:port/name, with / ? # @ "
                "and : in a password or name encoded, as urllib.parse.quote(text, '') "
                "does it"
            )
        found = [match["name"] or "password" for match in _SECRET.finditer(url)]
        what = f"the {', '.join(found)} of {self.label!r}"
        self._sealed = Sealed(url, what) if found else url

    def _parts(self) -> tuple[str, list[str]]:
        before, _, query = revealed(self._sealed).partition("?")
        return before, query.split("&") if query else []

    @property
    def path(self) -> str:
        return os.path.abspath(self._path)  # noqa: PTH100  (no links followed)

    def for_driver(self) -> str:
        """Return a URI that opens the file for reading, or the server's for libpq.

        It holds the password. An OSError if the file is missing or cannot be read;
        drivers are less clear.
        """
        before, query = self._parts()
        if not self.is_sqlite:  # the last of a name counts
            return f"{before}?{'&'.join((_DEFAULTS, *query, _ENCODING))}"
        if not os.path.exists(self.path):  # noqa: PTH110  (a string it stays)
            raise FileNotFoundError("no such file")
        if not os.access(self.path, os.R_OK):
            raise PermissionError("permission denied")
        return f"file:{quote(self.path)}?{'&'.join((*query, 'mode=ro'))}"

    def for_asyncpg(self) -> str:
        """Return a URL; it holds the password."""
        before, query = self._parts()
        kept = "&".join(pair for pair in query if not pair.startswith(_ONLY_LIBPQ))
        # It would read a plus as a space, and libpq does not.
        return f"{before}?{kept}".replace("+", "%2B")

    def check_pages(self, page: int) -> None:
        """Check that an SQLite file ends with a whole page.

        SQLite takes the rest of a page, and of the rows there, to be zeros. The file is
        not opened: closing it would drop all its locks in this process.
        """
        size = os.stat(self.path).st_size  # noqa: PTH116  (a string it stays)
        if size % page:
            raise TruncatedReadError(
                f"{self.label!r} ends within a page of {page:,} bytes: it was cut "
                f"short at {size:,} bytes; copy it again",
                location=self.label,
                received=size,
            )

    def scrub(self, text: str) -> str:
        for match in _SECRET.finditer(revealed(self._sealed)):
            value = match["account"] or match["value"]
            text = text.replace(unquote(value), "***").replace(value, "***")
        return text

    def __repr__(self) -> str:
        return f"Address({self.label!r})"


def _sqlite_path(text: str) -> str:
    if not text.startswith("/") or text in {"/", "/:memory:"}:
        shown = "..." if "@" in text else text
        raise ValueError(
            f"url must be sqlite:///path, got 'sqlite://{shown}'; a database in memory "
            "belongs to one connection only"
        )
    return text[1:].replace("%3F", "?")


class LostError(Exception):
    """Wraps a driver's exception after which the connection is lost."""


async def retried(
    attempt: Callable[[], Awaitable[T]],
    doing: str,
    address: DatabaseURL,
    deadline: float = 0.0,
    *,
    warns: bool = False,
) -> T:
    """Return the result of ``attempt``, repeated while its failure may pass.

    It must succeed within ``deadline`` seconds after the first failure, or else there
    is a DatasetError. That does not refer to the driver's exception: tracebacks print
    that, and it may know the password. ``doing`` is as in ``"read table 'rows'"``.
    """
    clock = asyncio.get_running_loop().time
    count, end, pauses = 0, 0.0, backoff(base_delay=0.1, max_delay=5.0)
    while True:
        try:
            return await attempt()
        except Exception as exc:  # noqa: BLE001  (reported without its traceback)
            error, may_pass = _failure_of(doing, address, exc)
        end = end if count else clock() + deadline
        count += 1
        pause = next(pauses)
        if not may_pass or clock() + pause >= end:
            break
        if warns and count == 1:
            _LOG.warning("%s; retrying", error)
        await asyncio.sleep(pause)
    if may_pass and count > 1:
        error.args = (f"{error}; given up after {count} tries",)
        error.attempts = count
    try:
        raise error
    finally:
        del error  # its traceback refers to this frame


def _failure_of(
    doing: str, address: DatabaseURL, exc: Exception
) -> tuple[DatasetError, bool]:
    """Return the error for a driver's exception, and whether a retry may help."""
    may_pass = isinstance(exc, LostError)
    exc = exc.args[0] if may_pass else exc
    if isinstance(exc, DatasetError):
        return exc, may_pass
    whole = address.scrub(str(exc))
    said = _SERVER_SAYS.search(whole)
    text = said[1] if said else _STATUS.sub("", whole.partition("\n")[0])
    text = text.strip() or type(exc).__name__
    code = sqlstate_of(exc) or text
    is_no_file = address.is_sqlite and isinstance(exc, FileNotFoundError)
    kind: type[DatasetError] = DatasetError
    if _REFUSED.search(code):
        kind = ObjectPermissionError
        if not address.is_sqlite:
            text += "; check the user, PGPASSWORD or PGPASSFILE, and grants"
    elif _MISSING.search(code) or is_no_file:
        kind = ObjectNotFoundError
        if _DOTTED.search(text):
            text += """; a name that has a dot is quoted, as in '"my.table"'"""
    elif address.is_sqlite and _UNWRITABLE.search(text):
        text += (
            "; its directory cannot be written, as WAL mode needs: copy the file to "
            "one that can, or, if no -wal or -journal file is next to it and nothing "
            "writes it, add ?immutable=1 to the URL"
        )
    elif _PASSING.search(code):
        may_pass = True
    elif code is text and not address.is_sqlite:
        status = getattr(exc, "status_code", None)
        may_pass |= getattr(status, "name", "") == "IO"
    words = f"cannot {doing} of {address.label!r}: {text}"
    return kind(words, location=address.label), may_pass


def sqlstate_of(exc: Exception) -> str:
    return getattr(exc, "sqlstate", None) or ""


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
        self.is_query = bool(_SELECT.match(text))
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
        while match := _NAME.match(self.text, at):
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
