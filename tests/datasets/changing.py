"""A server of one object that changes, and tells more or less of it."""

import re
from email.utils import formatdate

from datasets.serving import Handler, Server


class _Handler(Handler):
    def head(self) -> None:
        length = len(self.served.body)
        date = formatdate(1e9, usegmt=True)
        self.send_head(200, {"Content-Length": length, "Last-Modified": date})

    def get(self) -> None:
        served = self.served
        if served.seems_empty:
            self._cut(416 if served.has_ranges else 200, b"")
            return
        if served.fails():
            self._cut(503, b"")
            return
        body, tags = served.body, served.tags
        fields: dict[str, str] = {}
        if "strong" in tags:
            fields["ETag"] = f'"{served.version}"'
        if "weak" in tags:  # with a date it stays the same
            fields["ETag"] = f'W/"{1 if "date" in tags else served.version}"'
        if "date" in tags:
            fields["Last-Modified"] = formatdate(1e9 + served.version, usegmt=True)
        asked = self.headers.get("If-Match")
        # A weak tag matches nothing there (RFC 9110, 13.1.1).
        is_met = asked == fields.get("ETag") and not str(asked).startswith("W/")
        if asked and not is_met and "unconditional" not in tags:
            self._cut(412, b"")
            return
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not found or not served.has_ranges:
            self._cut(200, body, fields)
            return
        start, stop = int(found[1]), min(int(found[2]) + 1, len(body))
        if start >= len(body):
            self._cut(416, b"", {"Content-Range": f"bytes */{len(body)}"})
            return
        fields["Content-Range"] = f"bytes {start}-{stop - 1}/{len(body)}"
        self._cut(206, body[start:stop], fields)

    def _cut(
        self, status: int, body: bytes, fields: dict[str, str] | None = None
    ) -> None:
        length = {"Content-Length": len(body)}
        self.answer(status, self.served.cut(body), {**(fields or {}), **length})


class ChangingServer(Server):
    """Serve one object, by whatever name.

    Args:
        body: The object.
        tags: What it tells: ``"strong"`` or ``"weak"`` for an ETag, ``"date"`` for
            Last-Modified; with ``"unconditional"`` it ignores conditions.
        has_ranges: Whether it gives parts.
    """

    handler = _Handler

    def __init__(
        self, body: bytes, *, tags: str = "strong", has_ranges: bool = True
    ) -> None:
        self.body = body
        self.version = 1
        self.tags = tags.split()
        self.has_ranges = has_ranges
        self.requests = 0
        # Whether it answers each GET as if the object were empty.
        self.seems_empty = False
        self._failing = 0
        self._breaking = (0, 0)
        self._later: tuple[int, bytes] | None = None

    def replace(self, body: bytes) -> None:
        self.body, self.version = body, self.version + 1

    def replace_after(self, body: bytes, requests: int) -> None:
        self._later = requests, body

    def fail_next(self, count: int) -> None:
        self._failing = count

    def break_off(self, at: int, times: int) -> None:
        """Let the next answers that are longer end at a byte."""
        self._breaking = at, times

    def fails(self) -> bool:
        """Count a request, and tell whether it fails."""
        self.requests += 1
        if self._later is not None and self.requests > self._later[0]:
            self.replace(self._later[1])
            self._later = None
        self._failing -= 1
        return self._failing >= 0

    def cut(self, body: bytes) -> bytes:
        at, times = self._breaking
        if not times or len(body) <= at:
            return body
        self._breaking = at, times - 1
        return body[:at]
