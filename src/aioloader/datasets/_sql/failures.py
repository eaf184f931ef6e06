"""Errors for the exceptions of database drivers, and whether and when to retry.

The first line of a driver's text is shown, without the statement and without secrets.
"""

import asyncio
import random
import re
from typing import TYPE_CHECKING

from aioloader.errors import (
    DatasetError,
    ObjectNotFoundError,
    ObjectPermissionError,
)

if TYPE_CHECKING:
    from aioloader.datasets._sql.address import Address

_SERVER_SAYS = re.compile(r"\b(?:ERROR|FATAL|PANIC):\s+([^\n]+)")
_STATUS = re.compile(r"^[A-Z_]+: (?=\S)|\[(?:libpq|SQLite)\] |Failed to [a-z ]+: ")
# By PostgreSQL's code, or by the text of an error without one.
_REFUSED = (
    re.compile("28|42501"),
    re.compile(
        r"authentication failed|no password supplied|no pg_hba\.conf entry|"
        r"permission denied|role .* does not exist|not authorized"
    ),
)
_MISSING = (
    re.compile("42P01|3D000|3F000"),
    re.compile(r"no such table|database .* does not exist|relation .* does not exist"),
)
# The server cannot serve now; too many clients; a conflict on a standby.
_PASSING = re.compile(r"08|57P0|53300|40001|40P01")
_BUSY = re.compile(
    r"database (?:table )?is locked|too many clients|starting up|"
    r"connection (?:is|was) closed"
)
# Bounds of the seconds to wait before a retry.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0


def failure_of(
    verb: str, what: str, address: "Address", exc: Exception
) -> DatasetError:
    """Return the DatasetError for a driver's exception.

    Args:
        verb: What was attempted, as in ``"read"``.
        what: The object, as in ``"table 'rows'"``.
        address: The database.
        exc: The exception; the error returned does not refer to it, because tracebacks
            print it and it may know the password.
    """
    if isinstance(exc, DatasetError):
        return exc
    kind, text = _kind_of(address, exc), _text_of(address, exc)
    words = f"cannot {verb} {what} of {address.label!r}: {text}"
    if kind is ObjectPermissionError and not address.is_sqlite:
        words += "; check the user, PGPASSWORD or PGPASSFILE, and grants"
    return kind(words, location=address.label)


def may_pass(address: "Address", exc: Exception) -> bool:
    """Return whether a retry may work later."""
    if _kind_of(address, exc) is not DatasetError:
        return False
    if _BUSY.search(_text_of(address, exc)):
        return True
    if address.is_sqlite:
        return False
    if sqlstate := sqlstate_of(exc):
        return bool(_PASSING.match(sqlstate))
    return getattr(getattr(exc, "status_code", None), "name", "") == "IO"


def sqlstate_of(exc: Exception) -> str:
    """Return PostgreSQL's code; empty if it is not the server's error."""
    return getattr(exc, "sqlstate", None) or ""


def _text_of(address: "Address", exc: Exception) -> str:
    whole = address.scrub(str(exc))
    said = _SERVER_SAYS.search(whole)
    text = said[1] if said else _STATUS.sub("", whole.partition("\n")[0])
    return text.strip() or type(exc).__name__


def _kind_of(address: "Address", exc: Exception) -> type[DatasetError]:
    sqlstate, text = sqlstate_of(exc), _text_of(address, exc)
    for (code, words), kind in (
        (_REFUSED, ObjectPermissionError),
        (_MISSING, ObjectNotFoundError),
    ):
        if code.match(sqlstate) if sqlstate else words.search(text):
            return kind
    if address.is_sqlite and isinstance(exc, FileNotFoundError):
        return ObjectNotFoundError
    return DatasetError


class Retries:
    """The pauses between attempts, with exponential backoff and full jitter.

    Args:
        deadline: Seconds after the first failure in which an attempt must succeed.

    Attributes:
        count: Number of failed attempts.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._rng = random.Random()  # noqa: S311  (jitter, not a secret)
        self.count = 0
        self._end = self._bound = 0.0

    def restart(self) -> None:
        """Note that an attempt made progress before it failed."""
        self.count = 0

    def pause(self, error: DatasetError) -> float | None:
        """Return the seconds to wait after a failure; None: the deadline has passed.

        The error then has the number of attempts.
        """
        now = asyncio.get_running_loop().time()
        if self.count == 0:
            self._end, self._bound = now + self._deadline, _FIRST_PAUSE
        self.count += 1
        pause = self._rng.uniform(0.0, self._bound)
        self._bound = min(_LONGEST_PAUSE, 2 * self._bound)
        if now + pause < self._end:
            return pause
        if self.count > 1:
            error.args = (f"{error}; given up after {self.count} tries",)
            error.attempts = self.count
        return None
