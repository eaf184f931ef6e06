"""The members of a tar archive, grouped to samples as WebDataset groups them.

Samples leave in the order of the archive; one is gathered at a time, within a limit of
bytes that is checked before a body is read.
"""

from typing import Any

from aioloader._order.blocks import Bad
from aioloader.datasets._tar.headers import read_text
from aioloader.errors import DatasetError


class Groups:
    """Gather the members of one archive.

    Args:
        url: Name of the shard, for samples and errors.
        max_bytes: What the members of one sample may have together.

    Attributes:
        ready: Samples, or what stands for them.
        starts: Where each of those begins.
        fields: The sample that is gathered; the body of a member goes here.
        start: Where it begins.
        key: Its name; None if there is none.
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
        # The key as bytes, if they are known; fields by what follows the first dot.
        self._stem: bytes | None = None
        self._endings: dict[bytes, str] = {}

    def take(self, limit: int) -> list[Any]:
        """Remove and return the first ``limit`` of what is ready."""
        taken = self.ready[:limit]
        del self.ready[:limit], self.starts[:limit]
        return taken

    def place_plain(self, name: bytes, size: int, start: int) -> str | None:
        """Do as ``place``, faster where a name is like those before it.

        Args:
            name: As it stands in a header, with the zeros after it.
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
        """Place a member whose name has an ending that is not known."""
        stem, dot, ending = name.partition(b".")
        if dot and b"\0" not in stem and b"/" not in ending:
            if len(self._endings) >= _ENDINGS:
                self._endings.clear()
            self._endings[ending] = read_text(ending).lower()
        return self.place(read_text(name), size, start)

    def place(self, name: str, size: int, start: int) -> str | None:
        """Find the sample of a member, and end the one before if it is another.

        Args:
            name: Path of the member.
            size: Of its body, in bytes.
            start: Where its first header begins.

        Returns:
            The field in ``fields`` for the body; None if that is not wanted.
        """
        key, dot, field = name.partition(".")
        if "/" in field:  # it was the dot of a folder
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
        """Begin another sample."""
        if self.key is not None:
            self.ready.append(self._bad or self.fields)
            self.starts.append(self.start)
            self._bad = self._stem = None
        self.key, self.start, self._room = key, start, self._max_bytes
        self.fields = {"__key__": key, "__url__": self._url}

    def _refuse(self, name: str, size: int, field: str) -> None:
        """Spoil the sample by a member, unless it is spoiled already."""
        if field in self.fields:
            self.spoil(name, f"is the second one for the field {field!r}")
        else:
            self.spoil(
                name,
                f"has {size:,} bytes, which makes the sample larger than "
                f"max_sample_bytes ({self._max_bytes:,})",
            )

    def spoil(self, name: str, what: str) -> None:
        """Let an error stand for the sample; the rest of it is not wanted."""
        if self._bad is None:
            text = f"{self._url!r}: sample {self.key!r} from byte {self.start:,} on "
            text += f"cannot be read: its member {name!r} {what}"
            self._bad = Bad(DatasetError(text, location=self._url))
            self.fields = {}

    def flush(self) -> None:
        """End the sample that is gathered."""
        if self.key is not None:
            self._begin("", 0)
            self.key = None

    def loss(self) -> str:
        """Tell for a message which sample is lost if nothing follows."""
        if self.key is None or self._bad is not None:
            return ""
        return f"; sample {self.key!r} from byte {self.start:,} on is lost"

    def give_up(self, error: DatasetError, at: int) -> None:
        """Let ``error`` stand for the rest, and for the sample that is gathered.

        A sample that is spoiled already keeps its own error.
        """
        if self._bad is not None:
            self.flush()
        start = at if self.key is None else self.start
        self.ready.append(Bad(error))
        self.starts.append(start)
        self.fields = {}


# How many endings of names are known at once, at most.
_ENDINGS = 64
# The last character of a key whose base name is empty: that of a hidden file. Of those
# in folders WebDataset makes samples named "folder/", which nobody asked for.
_NO_STEM = frozenset({"", "/"})
_SLASH, _LOW_LINE = ord("/"), ord("_")


def _is_metadata(name: str) -> bool:
    """Tell whether the first part of a path is like ``__meta__``."""
    top = name.partition("/")[0]
    return len(top) >= 4 and top.startswith("__") and top.endswith("__")
