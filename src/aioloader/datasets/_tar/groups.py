"""Groups the members of a tar archive into samples, as WebDataset does.

Samples come in the order of the archive; one is collected at a time, within a limit of
bytes that is checked before a body is read.
"""

from typing import Any

from aioloader._order.blocks import Bad
from aioloader.datasets._tar.headers import read_text
from aioloader.errors import DatasetError


class Groups:
    """Collects the members of one archive.

    Args:
        url: Name of the shard, for samples and errors.
        max_bytes: Largest total size of one sample's members.

    Attributes:
        ready: Samples, or failures in their place.
        starts: Where each of those starts.
        fields: The sample being collected; bodies are stored here.
        start: Where it starts.
        key: Its key; None if there is none.
    """

    __slots__ = (
        "_bad",
        "_endings",
        "_max_bytes",
        "_room",
        "_stem",
        "_url",
        "fields",
        "key",
        "ready",
        "start",
        "starts",
    )

    def __init__(self, url: str, max_bytes: int) -> None:
        self._url, self._max_bytes = url, max_bytes
        self.ready: list[Any] = []
        self.starts: list[int] = []
        self.fields: dict[str, Any] = {}
        self.start = self._room = 0
        self.key: str | None = None
        self._bad: Bad | None = None
        # The key as bytes, if known; fields by the part of the name after the first
        # dot.
        self._stem: bytes | None = None
        self._endings: dict[bytes, str] = {}

    def take(self, limit: int) -> list[Any]:
        """Remove and return up to ``limit`` of ``ready``."""
        taken = self.ready[:limit]
        del self.ready[:limit], self.starts[:limit]
        return taken

    def place_plain(self, name: bytes, size: int, start: int) -> str | None:
        """Like ``place``, but faster where a name is like the previous ones.

        Args:
            name: As in a header, padded with zeros.
            size: As for ``place``.
            start: As for ``place``.
        """
        stem, _, ending = name.partition(b".")
        field = self._endings.get(ending)
        if field is None:
            return self._place_new(name, size, start)
        if stem != self._stem:
            if not stem or 0 in stem or stem[-1] == _SLASH or stem[0] == _LOW_LINE:
                return self.place(read_text(name), size, start)
            key = stem.decode("utf-8", "surrogateescape")
            if key != self.key:
                self._begin(key, start)
            self._stem = stem
        self._room -= size
        if self._room < 0 or field in self.fields or self._bad is not None:
            self._refuse(read_text(name), size, field)
            return None
        return field

    def _place_new(self, name: bytes, size: int, start: int) -> str | None:
        """Place a member whose name has an unknown ending."""
        stem, dot, ending = name.partition(b".")
        if dot and b"\0" not in stem and b"/" not in ending:
            if len(self._endings) >= _ENDINGS:
                self._endings.clear()
            self._endings[ending] = read_text(ending).lower()
        return self.place(read_text(name), size, start)

    def place(self, name: str, size: int, start: int) -> str | None:
        """Find the sample of a member, and end the previous one if it differs.

        Args:
            name: Path of the member.
            size: Size of its body, in bytes.
            start: Where its first header starts.

        Returns:
            The field in ``fields`` for the body; None to skip the body.
        """
        key, dot, field = name.partition(".")
        if "/" in field:  # the dot is in a folder name
            folder, _, base = name.rpartition("/")
            stem, dot, field = base.partition(".")
            key = f"{folder}/{stem}"
        if not dot or key[-1:] in _NO_STEM or (key[0] == "_" and _is_metadata(name)):
            return None
        if key != self.key:
            self._begin(key, start)
        field = field.lower()
        self._room -= size
        if self._room < 0 or field in self.fields or self._bad is not None:
            self._refuse(name, size, field)
            return None
        return field

    def _begin(self, key: str, start: int) -> None:
        """Start the next sample."""
        if self.key is not None:
            self.ready.append(self._bad or self.fields)
            self.starts.append(self.start)
            self._bad = self._stem = None
        self.key, self.start, self._room = key, start, self._max_bytes
        self.fields = {"__key__": key, "__url__": self._url}

    def _refuse(self, name: str, size: int, field: str) -> None:
        """Fail the sample because of a member, unless it has failed already."""
        if field in self.fields:
            self.spoil(name, f"is the second one for the field {field!r}")
        else:
            self.spoil(
                name,
                f"has {size:,} bytes, which makes the sample larger than "
                f"max_sample_bytes ({self._max_bytes:,})",
            )

    def spoil(self, name: str, what: str) -> None:
        """Replace the sample with an error, and skip the rest of it."""
        if self._bad is None:
            text = f"{self._url!r}: sample {self.key!r} at byte {self.start:,} "
            text += f"cannot be read: its member {name!r} {what}"
            self._bad = Bad(DatasetError(text, location=self._url))
            self.fields = {}

    def flush(self) -> None:
        """End the current sample."""
        if self.key is not None:
            self._begin("", 0)
            self.key = None

    def loss(self) -> str:
        """Return the part of a message that names the sample lost with the rest."""
        if self.key is None or self._bad is not None:
            return ""
        return f"; sample {self.key!r} at byte {self.start:,} is lost"

    def give_up(self, error: DatasetError, at: int) -> None:
        """Replace the rest of the archive, and the current sample, with ``error``.

        A sample that has already failed keeps its own error.
        """
        if self._bad is not None:
            self.flush()
        start = at if self.key is None else self.start
        self.ready.append(Bad(error))
        self.starts.append(start)
        self.fields = {}


# Most endings of names that are cached.
_ENDINGS = 64
# The last character of a key whose base name is empty: that of a hidden file. Of
# those in folders WebDataset makes samples named "folder/", which nobody wants.
_NO_STEM = frozenset({"", "/"})
_SLASH, _LOW_LINE = ord("/"), ord("_")


def _is_metadata(name: str) -> bool:
    """Return whether the first part of a path is like ``__meta__``."""
    top = name.partition("/")[0]
    return len(top) >= 4 and top.startswith("__") and top.endswith("__")
