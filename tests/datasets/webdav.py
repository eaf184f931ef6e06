"""A web server that lists its files as WebDAV does."""

from collections.abc import Mapping
from urllib.parse import quote, unquote
from xml.sax.saxutils import escape

from datasets.serving import Handler, Server

_ENTRY = (
    "<D:response><D:href>{}</D:href><D:propstat><D:prop>"
    "<D:getlastmodified>Mon, 01 Jan 2024 00:00:00 GMT</D:getlastmodified>"
    "<D:getcontentlength>{}</D:getcontentlength><D:resourcetype/></D:prop>"
    "<D:status>HTTP/1.1 200 OK</D:status></D:propstat></D:response>"
)


class _Handler(Handler):
    def get(self) -> None:
        body = self.served.find(self.path)
        self.answer(404 if body is None else 200, body or b"")

    def list(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer(207, self.served.listing(self.path))


class WebDAV(Server):
    """Serve objects by GET, without ranges, and their names by PROPFIND.

    Args:
        objects: Contents by path.
        is_literal: Whether the paths are as requests spell them.
    """

    handler = _Handler

    def __init__(
        self, objects: Mapping[str, bytes], *, is_literal: bool = False
    ) -> None:
        spelled = (lambda name: name) if is_literal else quote
        self._objects = {f"/{spelled(name)}": data for name, data in objects.items()}
        self._is_literal = is_literal
        self.paths: list[str] = []

    def find(self, path: str) -> bytes | None:
        self.paths.append(path)
        plain = path.partition("?")[0]
        return self._objects.get(plain if self._is_literal else quote(unquote(plain)))

    def listing(self, path: str) -> bytes:
        folder = quote(unquote(path))
        found = "".join(
            _ENTRY.format(escape(name), len(data))
            for name, data in self._objects.items()
            if name.startswith(folder)
        )
        return (
            '<?xml version="1.0" encoding="utf-8"?>'
            f'<D:multistatus xmlns:D="DAV:">{found}</D:multistatus>'
        ).encode()
