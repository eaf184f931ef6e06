"""The members of a tar archive, grouped to samples as WebDataset groups them.

Samples leave in the order of the archive; one is gathered at a time, within a limit of
bytes that is checked before a body is read.
"""

from collections import deque
from typing import Any

from aioloader._order.blocks import Bad
from aioloader.errors import DatasetError


class Groups:
    """Gather the members of one archive.

    Args:
        url: Name of the shard, for samples and errors.
        max_bytes: What the members of one sample may have together.

    Attributes:
        ready: Samples, or what stands for them, each with the offset it begins at.
        fields: The sample that is gathered; the body of a member goes here.
        start: Where it begins.
        key: Its name; None if there is none.
    """

    __slots__ = (
        "_bad",
        "_max_bytes",
        "_room",
        "_url",
        "fields",
        "key",
        "ready",
        "start",
    )

    def __init__(self, url: str, max_bytes: int) -> None:
        self._url, self._max_bytes = url, max_bytes
        self.ready: deque[tuple[int, Any]] = deque()
        self.fields: dict[str, Any] = {}
        self.start = self._room = 0
        self.key: str | None = None
        self._bad: Bad | None = None

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
            self.flush()
            self.key, self.start, self._room = key, start, self._max_bytes
            self.fields = {"__key__": key, "__url__": self._url}
        field = field.lower()
        self._room -= size
        if self._room < 0 or field in self.fields or self._bad is not None:
            self._refuse(name, size, field)
            return None
        return field

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
            sample = self.fields if self._bad is None else self._bad
            self.ready.append((self.start, sample))
            self.key = self._bad = None

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
        self.ready.append((start, Bad(error)))
        self.fields = {}


# The last character of a key whose base name is empty: that of a hidden file. Of those
# in folders WebDataset makes samples named "folder/", which nobody asked for.
_NO_STEM = frozenset({"", "/"})


def _is_metadata(name: str) -> bool:
    """Tell whether the first part of a path is like ``__meta__``."""
    top = name.partition("/")[0]
    return len(top) >= 4 and top.startswith("__") and top.endswith("__")
