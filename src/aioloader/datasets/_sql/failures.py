"""Errors for the exceptions of database drivers, and whether a retry may help.

The original is not chained: tracebacks print it, and its frames know the password. The
first line of its text is shown, without the statement.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
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
_REFUSED = re.compile(
    r"authentication failed|no password supplied|no pg_hba\.conf entry|"
    r"permission denied|role .* does not exist|not authorized"
)
_MISSING = re.compile(
    r"no such table|database .* does not exist|relation .* does not exist"
)
# The server cannot serve now; too many clients; a conflict on a standby.
_PASSING = re.compile(r"08|57P0|53300|40001|40P01")
_BUSY = re.compile(
    r"database (?:table )?is locked|too many clients|starting up|"
    r"connection (?:is|was) closed"
)


@dataclass(frozen=True)
class Reason:
    """The parts of a driver's exception that may be shown.

    Attributes:
        text: The reason in words.
        sqlstate: PostgreSQL's code; empty if not known.
        is_refusal: Whether credentials or rights are missing.
        is_missing: Whether there is no such database or table.
        may_pass: Whether a retry may work later.
    """

    text: str
    sqlstate: str
    is_refusal: bool
    is_missing: bool
    may_pass: bool


def reason_of(address: "Address", exc: Exception) -> Reason:
    """Extract from ``exc`` the parts that may be shown."""
    whole = address.scrub(str(exc))
    said = _SERVER_SAYS.search(whole)
    text = said[1] if said else _STATUS.sub("", whole.partition("\n")[0])
    sqlstate = getattr(exc, "sqlstate", None) or ""
    is_refusal = sqlstate[:2] == "28" or sqlstate == "42501"
    is_missing = sqlstate in {"42P01", "3D000", "3F000"}
    if not sqlstate:
        is_refusal = bool(_REFUSED.search(text))
        is_missing = not is_refusal and bool(_MISSING.search(text))
        is_missing |= address.is_sqlite and isinstance(exc, FileNotFoundError)
    may_pass = not (is_refusal or is_missing) and (
        bool(_BUSY.search(text)) or (not address.is_sqlite and _is_lost(exc, sqlstate))
    )
    text = text.strip() or type(exc).__name__
    return Reason(text, sqlstate, is_refusal, is_missing, may_pass)


def _is_lost(exc: Exception, sqlstate: str) -> bool:
    """Return whether the connection is to blame, not the statement."""
    if sqlstate:
        return bool(_PASSING.match(sqlstate))
    status = getattr(exc, "status_code", None)
    return getattr(status, "name", "") == "IO"


def pauses() -> Iterator[float]:
    """Yield the seconds to wait before each retry: up to 5, with full jitter."""
    rng = random.Random()  # noqa: S311  (jitter, not a secret)
    bound = 0.1
    while True:
        yield rng.uniform(0.0, bound)
        bound = min(5.0, 2 * bound)


def failure_of(
    verb: str, what: str, address: "Address", exc: Exception
) -> DatasetError:
    """Return the DatasetError for a driver's exception.

    Args:
        verb: What was attempted, as in ``"read"``.
        what: The object, as in ``"table 'rows'"``.
        address: The database.
        exc: The exception; the error returned does not refer to it.
    """
    if isinstance(exc, DatasetError):
        return exc
    reason = reason_of(address, exc)
    text = f"cannot {verb} {what} of {address.label!r}: {reason.text}"
    kind = DatasetError
    if reason.is_refusal:
        kind = ObjectPermissionError
        if not address.is_sqlite:
            text += "; check the user, PGPASSWORD or PGPASSFILE, and grants"
    elif reason.is_missing:
        kind = ObjectNotFoundError
    return kind(text, location=address.label)


def given_up(error: DatasetError, attempts: int) -> DatasetError:
    """Return the last attempt's error, with the number of attempts added."""
    if attempts > 1:
        error.args = (f"{error}; given up after {attempts} tries",)
        error.attempts = attempts
    return error
