"""Database addresses: a label that may be shown, and connection strings for drivers.

A password is in no message, repr or pickle: only the loader's workers get it. URLs are
parsed here, because libpq shows what it cannot parse.
"""

import os
from typing import Any
from urllib.parse import quote, unquote, urlencode

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
# asyncpg would pass these on to the server, which does not know them.
_ONLY_LIBPQ = frozenset({*_DEFAULTS, "keepalives", "tcp_user_timeout", "gssencmode"})


class Address:
    """The address of a database.

    Args:
        url: ``sqlite:///relative``, ``sqlite:////absolute`` or
            ``postgresql://user@host:port/name?parameters``; for a Unix socket
            ``postgresql:///name?host=/directory``. Parameters are libpq's or SQLite's.
            May be sealed.

    Attributes:
        label: The address as it may be shown.
        is_sqlite: Whether it is a file.

    Raises:
        ValueError: If it is none of these.
        TypeError: If it is not a string.
    """

    def __init__(self, url: Any) -> None:
        url = url.value if isinstance(url, Sealed) else url
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
        parameters = _named(query)
        if self.is_sqlite:
            self._path = _sqlite_path(before)
            self.label: str = f"sqlite:///{self._path}"
        else:
            parameters = _server(before) | parameters
            self.label = _server_label(**parameters)
        secrets = ", ".join(name for name in _SECRETS if parameters.get(name))
        what = f"the {secrets} of {self.label!r}"
        self._sealed = Sealed(parameters, what) if secrets else parameters

    @property
    def _parameters(self) -> dict[str, str]:
        kept = self._sealed
        return kept.value if isinstance(kept, Sealed) else kept

    def for_libpq(self) -> str:
        """Return keywords and values; they hold the password."""
        values = {**_DEFAULTS, **self._parameters}
        return " ".join(f"{name}={_quoted(value)}" for name, value in values.items())

    def for_asyncpg(self) -> str:
        """Return a URL; it holds the password."""
        kept = {k: v for k, v in self._parameters.items() if v and k not in _ONLY_LIBPQ}
        return f"postgresql://?{urlencode(kept, quote_via=quote)}"

    def for_sqlite(self) -> str:
        """Return a URI that opens the file for reading.

        Raises:
            FileNotFoundError: If it does not exist; drivers are less clear.
        """
        if not os.path.exists(self.path):  # noqa: PTH110  (a string it stays)
            raise FileNotFoundError("no such file")
        query = urlencode({**self._parameters, "mode": "ro"}, quote_via=quote, safe="/")
        return f"file:{quote(self.path)}?{query}"

    @property
    def path(self) -> str:
        """The absolute path of the file."""
        return os.path.abspath(self._path)  # noqa: PTH100  (no links followed)

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

    def scrub(self, text: str) -> str:
        """Return ``text`` without any secret of this address."""
        for name, value in self._parameters.items():
            if name in _SECRETS and value:
                text = text.replace(value, "***").replace(quote(value, ""), "***")
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


def _server_label(host: str = "", port: str = "", dbname: str = "", **_: str) -> str:
    if host.startswith(("/", "@")):
        return f"postgresql:///{dbname}?host={host}" + (port and f"&port={port}")
    return f"postgresql://{host}{port and ':'}{port}/{dbname}"


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


def _named(query: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in query.split("&") if query else ():
        name, separator, value = pair.partition("=")
        if not (name.isidentifier() and separator):
            raise ValueError("url must have parameters such as ?name=value&name=value")
        found[name] = unquote(value)
    return found


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
