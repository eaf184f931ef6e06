"""Shards of lines: JSON lines and text, plain or compressed."""

import codecs
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from aioloader.datasets._cuts import Cuts, at_line_ends
from aioloader.datasets._engine import Kind
from aioloader.datasets._json import JSONDecoder
from aioloader.datasets._lines import Decoder, samples, without_end
from aioloader.datasets._options import StreamOptions, check_at_least, names_options
from aioloader.datasets.sharded import MAX_SAMPLE_BYTES, ByteStream

if TYPE_CHECKING:
    from aioloader.datasets.sharded import Addresses


class JSONLinesDataset(ByteStream[Any]):
    """Streams samples from files with one JSON value per line.

    Empty lines are skipped, and so is a byte order mark. A line that is not JSON is one
    failed sample; the error names the shard and the byte offset. Values are those of
    Python's ``json``, with ``NaN`` and integers of any size; ``orjson``, if installed,
    is faster and used for lines where it gives the same result.

    Args:
        addresses: Paths or URLs, such as ``"https://host/{0..9}.jsonl.zst"``.
        max_sample_bytes: As for ``TarDataset``.
        options: As for ``TarDataset``.
    """

    cuts: ClassVar[Cuts | None] = staticmethod(at_line_ends)

    @names_options
    def __init__(
        self,
        addresses: "Addresses",
        *,
        max_sample_bytes: int = MAX_SAMPLE_BYTES,
        **options: Unpack[StreamOptions],
    ) -> None:
        super().__init__(addresses, _kind(JSONDecoder(), max_sample_bytes), **options)


class TextDataset(ByteStream[str]):
    """Streams lines of text, without their ends.

    Args:
        addresses: Paths or URLs.
        encoding: Encoding of the text; its line feed must be one byte. A line that it
            cannot decode is one failed sample. A UTF-8 byte order mark at the beginning
            of a file is dropped.
        max_sample_bytes: As for ``TarDataset``.
        options: As for ``TarDataset``.
    """

    cuts: ClassVar[Cuts | None] = staticmethod(at_line_ends)

    @names_options
    def __init__(
        self,
        addresses: "Addresses",
        *,
        encoding: str = "utf-8",
        max_sample_bytes: int = MAX_SAMPLE_BYTES,
        **options: Unpack[StreamOptions],
    ) -> None:
        # A LookupError now, not at the first line.
        self._encoding = codecs.lookup(encoding).name
        end = "\n\n".encode(encoding).removeprefix("\n".encode(encoding))
        if end != b"\n":
            raise ValueError(
                f"lines in {encoding!r} do not end with the byte of a line feed; "
                "convert the files to UTF-8"
            )
        kind = _kind(_TextDecoder(self._encoding), max_sample_bytes)
        super().__init__(addresses, kind, **options)

    def describe(self) -> dict[str, Any]:
        """Return what a state depends on, including the encoding."""
        return {**super().describe(), "encoding": self._encoding}


# Encodings in which the text of many lines is that of each.
_WHOLE = frozenset({"utf-8", "ascii", "iso8859-1"})


class _TextDecoder:
    """Decodes lines of text."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding

    def one(self, line: bytes) -> str:
        return line.decode(self._encoding)

    def is_plain(self, _piece: bytes | memoryview) -> bool:
        return True

    def many(
        self,
        lines: Sequence[bytes],
        _longest: int,
        *,
        is_plain: bool,  # noqa: ARG002  (all are)
    ) -> list[str] | None:
        encoding = self._encoding
        try:
            if encoding in _WHOLE and lines[-1].endswith(b"\n"):
                text = b"".join(lines).replace(b"\r\n", b"\n").decode(encoding)
                made = text.split("\n")
                made.pop()  # after the last line
                return made
            return [without_end(line).decode(encoding) for line in lines]
        except ValueError:
            return None


def _kind(decoder: Decoder, max_sample_bytes: int) -> Kind:
    check_at_least(max_sample_bytes, 1, "max_sample_bytes")
    check_at_least(max_sample_bytes, 1, "max_sample_bytes")
    steps = functools.partial(samples, decoder, max_sample_bytes)
    return Kind(steps, is_quick=True)
