"""Database addresses: a label that may be shown, and connection strings for drivers.

A password is in no repr, error or pickle: only the loader's workers get it. URLs are
parsed here, because libpq shows what it cannot parse.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

from aioloader.datasets._sql.password import find_password
from aioloader.datasets._stores.redact import Sealed
from aioloader.errors import TruncatedReadError

# Parameters of libpq, and of encrypted SQLite files, that are secrets themselves.
_SECRETS = frozenset({
    "password", "sslpassword", "scram_client_key", "scram_server_key",
    "oauth_client_secret", "key", "hexkey", "textkey",
})  # fmt: skip
# An idle connection that is dead is noticed within a minute.
_DEFAULTS = {
    "fallback_application_name": "aioloader",
    "connect_timeout": "10",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
}
# asyncpg would pass these on to the server, which does not know them; the password
# is passed separately.
_NOT_ASYNCPG = frozenset({
    *_DEFAULTS, "keepalives", "tcp_user_timeout", "gssencmode", "password",
    "dbname",
})  # fmt: skip


def address_of(url: Any) -> "Address":
    """Return the parsed address of a URL, which may be sealed.

    Raises:
        ValueError: If it is not a database URL. No frame of its traceback has it.
        TypeError: If it is not a string.
    """
    found = _parsed(url.value if isinstance(url, Sealed) else url)
    del url
    if isinstance(found, Exception):
        raise found
    return found


def _parsed(url: Any) -> "Address | Exception":
    try:
        return Address(url)
    except (TypeError, ValueError) as error:
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)


class Address:
    """The address of a database.

    Args:
        url: ``sqlite:///relative``, ``sqlite:////absolute`` or
            ``postgresql://user@host:port/name?parameters``; for a Unix socket
            ``postgresql:///name?host=/directory``. Parameters are libpq's or SQLite's.

    Attributes:
        label: The address as it may be shown.
        is_sqlite: Whether it is a file.

    Raises:
        ValueError: If it is none of these.
    """

    def __init__(self, url: str) -> None:
        if not isinstance(url, str):
            kind = type(url).__name__
            raise TypeError(
                f"url must be sqlite:///path or postgresql://host/name, got {kind}"
            )
        scheme, separator, rest = url.partition("://")
        if not separator or scheme not in {"sqlite", "postgresql", "postgres"}:
            shown = f"{scheme}://..." if separator and scheme.isalnum() else "no scheme"
            raise ValueError(
                f"url must be sqlite:///path or postgresql://host/name, got {shown}"
            )
        self.is_sqlite: bool = scheme == "sqlite"
        before, _, query = rest.partition("?")
        parameters = dict(_pairs(query))
        if self.is_sqlite:
            self._path = _sqlite_path(before)
            self.label: str = f"sqlite:///{self._path}"
        else:
            parameters = _server(before) | parameters
            self.label = _server_label(parameters)
        self._secrets = [name for name in _SECRETS if parameters.get(name)]
        what = f"the {', '.join(self._secrets)} of {self.label!r}"
        self._sealed = Sealed(parameters, what) if self._secrets else parameters

    @property
    def _parameters(self) -> dict[str, str]:
        kept = self._sealed
        return kept.value if isinstance(kept, Sealed) else kept

    # -- for drivers --------------------------------------------------------------

    @property
    def path(self) -> str:
        """The absolute path of the file."""
        return os.path.abspath(self._path)  # noqa: PTH100  (no links followed)

    def for_libpq(self) -> str:
        """Return keywords and values; they hold the password."""
        values = {**_DEFAULTS, **self._parameters}
        return " ".join(f"{name}={_quoted(value)}" for name, value in values.items())

    def for_asyncpg(self) -> str:
        """Return a URL without the password."""
        values = self._parameters.items()
        kept = {k: quote(v, "") for k, v in values if v and k not in _NOT_ASYNCPG}
        query = "&".join(f"{name}={value}" for name, value in kept.items())
        return f"postgresql:///{quote(self._parameters.get('dbname', ''), '')}?{query}"

    async def password(self) -> str | None:
        """Return the password from the URL, the environment or the password file."""
        known = self._parameters.get("password")
        return known or await find_password(self._parameters)

    def for_sqlite(self) -> str:
        """Return a URI that opens the file for reading.

        Raises:
            FileNotFoundError: If it does not exist; drivers are less clear.
        """
        if not os.path.exists(self.path):  # noqa: PTH110  (a string it stays)
            raise FileNotFoundError("no such file")
        parameters = {**self._parameters, "mode": "ro"}
        query = "&".join(f"{k}={quote(v)}" for k, v in parameters.items())
        return f"file:{quote(self.path)}?{query}"

    def check_pages(self, page: int) -> None:
        """Check that an SQLite file ends with a whole page.

        SQLite takes the rest of a page, and of the rows there, to be zeros. The file is
        not opened: closing it would drop all its locks in this process.

        Raises:
            TruncatedReadError: If it has not.
        """
        size = os.stat(self.path).st_size  # noqa: PTH116  (a string it stays)
        if size % page:
            raise TruncatedReadError(
                f"{self.label!r} ends within a page of {page:,} bytes: it was cut "
                f"short at {size:,} bytes",
                location=self.label,
                received=size,
            )

    # -- for people ---------------------------------------------------------------

    def scrub(self, text: str) -> str:
        """Return ``text`` without any secret of this address."""
        for name in self._secrets:
            secret = self._parameters[name]
            for form in (secret, quote(secret, "")):
                text = text.replace(form, "***")
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
    return text[1:]


def _server_label(shown: Mapping[str, str]) -> str:
    host, port = shown.get("host", ""), shown.get("port", "")
    name = shown.get("dbname", "")
    if host.startswith(("/", "@")):
        return f"postgresql:///{name}?host={host}" + (port and f"&port={port}")
    return f"postgresql://{host}{port and ':'}{port}/{name}"


def _server(text: str) -> dict[str, str]:
    """Return libpq's parameters for the part before the question mark."""
    where, _, name = text.partition("/")
    account, _, hosts = where.rpartition("@")
    user, _, password = account.partition(":")
    pairs = [_host_and_port(host) for host in hosts.split(",")]
    ports = [port for _, port in pairs]
    if "@" in name or not all(port.isdigit() for port in ports if port):
        raise ValueError(
            "url must be postgresql://user:password@host:port/name, with / ? @ and : "
            "in a password or name encoded, as urllib.parse.quote(text, '') does it"
        )
    found = {
        "host": ",".join(unquote(host) for host, _ in pairs),
        "port": ",".join(ports) if any(ports) else "",
        "user": unquote(user),
        "password": unquote(password),
        "dbname": unquote(name),
    }
    return {key: value for key, value in found.items() if value}


def _host_and_port(text: str) -> tuple[str, str]:
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        return host, rest.removeprefix(":")
    host, _, port = text.partition(":")
    return host, port


def _pairs(query: str) -> Iterator[tuple[str, str]]:
    for pair in query.split("&") if query else ():
        name, separator, value = pair.partition("=")
        if not (name.isidentifier() and separator):
            raise ValueError("url must have parameters such as ?name=value&name=value")
        yield name, unquote(value)


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
