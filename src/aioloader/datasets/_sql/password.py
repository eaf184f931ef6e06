"""The password of a server, found where libpq looks for it.

asyncpg would look there too, but on the event loop, for each connection.
"""

import asyncio
import getpass
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

_SEPARATOR = re.compile(r"(?<!\\):")
_ESCAPED = re.compile(r"\\(.)")


async def find_password(parameters: Mapping[str, str]) -> str | None:
    """Return the password of the environment or the password file; None if neither.

    Args:
        parameters: libpq's parameters, without a password.
    """
    return await asyncio.to_thread(_find, parameters)


def _find(parameters: Mapping[str, str]) -> str | None:
    said = os.environ.get("PGPASSWORD")
    if said is not None:
        return said
    default = os.environ.get("PGPASSFILE") or Path("~/.pgpass").expanduser()
    wanted = list(_wanted(parameters))
    for *pattern, password in _lines(Path(parameters.get("passfile") or default)):
        for place in wanted:
            if all(a in {"*", b} for a, b in zip(pattern, place, strict=True)):
                return password
    return None


def _wanted(parameters: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """Yield host, port, database and user of each possible server."""

    def said(name: str, variable: str, default: str) -> str:
        return parameters.get(name) or os.environ.get(variable) or default

    user = said("user", "PGUSER", "") or getpass.getuser()
    name = said("dbname", "PGDATABASE", user)
    hosts = said("host", "PGHOST", "localhost").split(",")
    ports = said("port", "PGPORT", "5432").split(",")
    for at, host in enumerate(hosts):
        shown = "localhost" if host.startswith(("/", "@")) else host
        yield shown, ports[min(at, len(ports) - 1)] or "5432", name, user


def _lines(path: Path) -> Iterator[list[str]]:
    """Yield the fields of each line; none if others may read the file."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) or mode & (stat.S_IRWXG | stat.S_IRWXO):
            return
        text = path.read_text("utf-8")
    except OSError:
        return
    for line in text.splitlines():
        fields = _SEPARATOR.split(line, maxsplit=4)
        if len(fields) == 5 and not line.startswith("#"):
            yield [_ESCAPED.sub(r"\1", field) for field in fields]
