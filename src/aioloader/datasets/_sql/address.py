"""Database URLs, tables and queries to read, and retries after drivers' errors.

No message, repr or pickle shows a password, except pickles for the loader's workers.
Drivers print URLs that they cannot parse, so this module checks a URL's form first. Our
errors show the first line of the driver's message, without the statement. Statements
quote all names; a query is the user's text in parentheses.
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

# The part of a server's URL before the question mark: [account@]hosts[/name].
_HOST = r"(?:\[[^][/@#]*\]|[^][:,/@#]*)(?::\d*)?"
_SERVER = re.compile(rf"(?:[^:/@#]*(?::[^/@#]*)?@)?{_HOST}(?:,{_HOST})*(?:/[^@#]*)?")
_QUERY = re.compile(r"(?:\w+=[^&#]*(?:&|\Z))*")
# A password, and secret parameters of libpq and of encrypted SQLite files.
_SECRET = re.compile(
    r"(?<=://)[^:/?]*:(?P<account>[^@/?]+)@|(?<=[?&])(?P<name>password|sslpassword|"
    r"scram_(?:client|server)_key|oauth_client_secret|(?:hex|text)?key)=(?P<value>[^&]+)"
)
# These keepalives detect a dead idle connection within a minute.
_DEFAULTS = (
    "fallback_application_name=aioloader&connect_timeout=10&keepalives_idle=30&"
    "keepalives_interval=10&keepalives_count=3"
)
_ENCODING = "client_encoding=UTF8"  # drivers assume UTF-8
_SHOWN = ("host=", "port=", "dbname=")
# Parameters that asyncpg would send to the server, which rejects them.
_ONLY_LIBPQ = (
    "client_encoding=", "fallback_application_name=", "connect_timeout=", "keepalives",
    "tcp_user_timeout=", "gssencmode=",
)  # fmt: skip

_SERVER_ERROR = re.compile(r"\b(?:ERROR|FATAL|PANIC):\s+([^\n]+)")
_STATUS = re.compile(r"^[A-Z_]+: (?=\S)|\[(?:libpq|SQLite)\] |Failed to [a-z ]+: ")
# Patterns that classify an error by its SQLSTATE or, without one, by its text.
_REFUSED = re.compile(
    r"^(?:28\w{3}|42501)$|authentication failed|no password supplied|permission denied|"
    r"no pg_hba\.conf entry|role .* does not exist|not authorized"
)
_MISSING = re.compile(
    r"^(?:42P01|3D000|3F000)$|no such table|(?:database|relation) .* does not exist"
)
_DOTTED = re.compile(r'(?:no such table: |relation ")[^"\s]*\.')
_UNWRITABLE = re.compile("readonly database|unable to open database file")
# Errors worth a retry: a lost or busy server, a conflict on a standby, a locked file.
_TRANSIENT = re.compile(
    r"^(?:08\w{3}|57P0\w|53300|40001|40P01)$|database (?:table )?is locked|"
    r"too many clients|starting up|connection (?:is|was) closed"
)
Numeric: TypeAlias = Literal["decimal", "float"]
Infinity: TypeAlias = Literal["error", "null"]

_SELECT = re.compile(
    r"(?:\s|\(|--[^\n]*\n|/\*.*?\*/)*(?:select|with|values)[\s(*'\"/-]",
    re.IGNORECASE | re.DOTALL,
)
# One part of a dotted name, with the dot that precedes the next part.
_NAME = re.compile(r'(?:"((?:[^"]|"")+)"|([^."]+))(?:\.(?!\Z)|\Z)')


class DatabaseURL:
    """The checked URL of a database; the parameters are those of SQLite or libpq.

    The forms are ``sqlite:///relative``, ``sqlite:////absolute`` (``?`` is ``%3F``),
    ``postgresql://user@host:port/name?parameters``, and for a Unix socket
    ``postgresql:///name?host=/directory``.

    Attributes:
        label: The URL without secrets.
        is_sqlite: Whether the URL names an SQLite file.
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
        secrets = [match["name"] or "password" for match in _SECRET.finditer(url)]
        words = f"the {', '.join(secrets)} of {self.label!r}"
        self._sealed = Sealed(url, words) if secrets else url

    def _parts(self) -> tuple[str, list[str]]:
        before, _, query = revealed(self._sealed).partition("?")
        return before, query.split("&") if query else []

    @property
    def path(self) -> str:
        return os.path.abspath(self._path)  # noqa: PTH100  (no links followed)

    def for_driver(self) -> str:
        """Return the driver's URI (SQLite: read-only; PostgreSQL: with password)."""
        before, query = self._parts()
        if not self.is_sqlite:  # libpq uses the last of repeated parameters
            return f"{before}?{'&'.join((_DEFAULTS, *query, _ENCODING))}"
        if not os.path.exists(self.path):  # noqa: PTH110  (a string)
            raise FileNotFoundError("no such file")
        if not os.access(self.path, os.R_OK):
            raise PermissionError("permission denied")
        return f"file:{quote(self.path)}?{'&'.join((*query, 'mode=ro'))}"

    def for_asyncpg(self) -> str:
        """Return a URL for asyncpg, including the password."""
        before, query = self._parts()
        kept = "&".join(pair for pair in query if not pair.startswith(_ONLY_LIBPQ))
        # asyncpg, unlike libpq, decodes a plus as a space.
        return f"{before}?{kept}".replace("+", "%2B")

    def check_pages(self, page: int) -> None:
        """Raise if an SQLite file ends within a page: SQLite would read zeros."""
        # Do not open the file: closing it would drop this process's locks on it.
        size = os.stat(self.path).st_size  # noqa: PTH116  (a string)
        if size % page:
            raise TruncatedReadError(
                f"{self.label!r} ends within a page of {page:,} bytes: it was cut "
                f"short at {size:,} bytes; copy it again",
                location=self.label,
                received=size,
            )

    def scrub(self, text: str) -> str:
        """Replace the URL's secrets in ``text`` with asterisks."""
        for match in _SECRET.finditer(revealed(self._sealed)):
            value = match["account"] or match["value"]
            text = text.replace(unquote(value), "***").replace(value, "***")
        return text

    def __repr__(self) -> str:
        return f"DatabaseURL({self.label!r})"


def _sqlite_path(text: str) -> str:
    if not text.startswith("/") or text in {"/", "/:memory:"}:
        shown = "..." if "@" in text else text
        raise ValueError(
            f"url must be sqlite:///path, got 'sqlite://{shown}'; a database in memory "
            "belongs to one connection only"
        )
    return text[1:].replace("%3F", "?")


class LostError(Exception):
    """Wraps a driver's exception after the connection was lost."""


async def retried(
    attempt: Callable[[], Awaitable[T]],
    doing: str,
    address: DatabaseURL,
    deadline: float = 0.0,
    *,
    warns: bool = False,
) -> T:
    """Return the result of ``attempt``, retried after transient failures.

    Other failures, and any ``deadline`` seconds after the first, raise a DatasetError.
    The error is not chained to the driver's exception, which tracebacks would print,
    perhaps with the password. ``doing`` is a phrase such as ``"read table 'rows'"``.
    """
    clock = asyncio.get_running_loop().time
    count, end, pauses = 0, 0.0, backoff(base_delay=0.1, max_delay=5.0)
    while True:
        try:
            return await attempt()
        except Exception as exc:  # noqa: BLE001  (converted to an error)
            error, is_transient = _failure_of(doing, address, exc)
        end = end if count else clock() + deadline
        count += 1
        pause = next(pauses)
        if not is_transient or clock() + pause >= end:
            break
        if warns and count == 1:
            _LOG.warning("%s; retrying", error)
        await asyncio.sleep(pause)
    if is_transient and count > 1:
        error.args = (f"{error}; given up after {count} tries",)
        error.attempts = count
    try:
        raise error
    finally:
        del error  # breaks the cycle of its traceback and this frame


def _failure_of(
    doing: str, address: DatabaseURL, exc: Exception
) -> tuple[DatasetError, bool]:
    """Convert a driver's exception; return the error and whether a retry may help."""
    is_transient = isinstance(exc, LostError)
    exc = exc.args[0] if is_transient else exc
    if isinstance(exc, DatasetError):
        return exc, is_transient
    whole = address.scrub(str(exc))
    server_error = _SERVER_ERROR.search(whole)
    text = (
        server_error[1] if server_error else _STATUS.sub("", whole.partition("\n")[0])
    )
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
    elif _TRANSIENT.search(code):
        is_transient = True
    elif code is text and not address.is_sqlite:
        status = getattr(exc, "status_code", None)
        is_transient |= getattr(status, "name", "") == "IO"
    words = f"cannot {doing} of {address.label!r}: {text}"
    return kind(words, location=address.label), is_transient


def sqlstate_of(exc: Exception) -> str:
    """Return the SQLSTATE of a driver's exception (five characters), or ""."""
    return getattr(exc, "sqlstate", None) or ""


class Relation:
    """A table or query, the key that orders and divides it, and the columns to read.

    A table is ``name`` or ``schema.name``; a part that contains a dot is quoted. A
    query has placeholders for ``parameters``. See ``SQLDataset`` for the arguments.
    """

    text: str
    key: str
    columns: tuple[str, ...] | None
    parameters: tuple[Any, ...]
    is_query: bool
    label: str
    key_column: str  # as an SQL expression

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
        # Parentheses are on separate lines, because a query may end with a comment.
        rows = f"(\n{text.rstrip().rstrip(';')}\n)" if self.is_query else self.table()
        self._from = f"{rows} AS q"

    def describe(self) -> dict[str, Any]:
        """Return the settings that decide the rows, as JSON-serialisable data."""
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
        end = 0
        while match := _NAME.match(self.text, end):
            parts.append(match[1].replace('""', '"') if match[1] else match[2])
            end = match.end()
        if not parts or end < len(self.text):
            raise ValueError(
                f"{self.text!r} is not a table; write name, schema.name or "
                '"any name"."with.dots"'
            )
        return ".".join(map(quoted, parts))

    def key_error(self, problem: str) -> ValueError:
        return ValueError(
            f"key {self.key!r} is {problem} in some rows; leave them out by a query"
        )

    def select(self, columns: str, *more: str) -> str:
        """Return a SELECT from this relation, under the alias ``q``."""
        return select(columns, self._from, *more)

    def names(
        self, available: Sequence[str], hidden: Collection[str] = ()
    ) -> Sequence[str]:
        """Return the checked column names, with ``hidden`` names only if requested."""
        shown = ", ".join(available)
        if len(set(available)) < len(available):
            raise ValueError(f"columns must have distinct names, got {shown}")
        names = tuple(available) if self.columns is None else self.columns
        for name in (*names, self.key):
            if name not in available and name not in hidden:
                raise ValueError(f"there is no column {name!r}; there are {shown}")
        return names


def is_list(given: Any) -> bool:
    """Return whether an argument is an iterable of values; text does not count."""
    return isinstance(given, Iterable) and not isinstance(given, (str, bytes))


def quoted(name: str) -> str:
    if not name or "\0" in name:
        raise ValueError(f"names must be without NUL and not empty, got {name!r}")
    escaped = name.replace('"', '""')
    return f'"{escaped}"'


def column(name: str) -> str:
    """Qualify a column with ``q``: SQLite reads unknown bare names as strings."""
    return f"q.{quoted(name)}"


def select(columns: str, rows: str, *more: str) -> str:
    return " ".join(("SELECT", columns, "FROM", rows, *more))
