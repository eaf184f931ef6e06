"""Shards of lines: JSON lines and text, plain, gzip or zstandard."""

import codecs
import functools
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Unpack

from aioloader.datasets._cuts import at_line_ends
from aioloader.datasets._lines import SKIP, LineParser
from aioloader.datasets._options import StreamOptions
from aioloader.datasets.sharded import MAX_SAMPLE_BYTES, ByteStream

if TYPE_CHECKING:
    from aioloader.datasets.sharded import Addresses


class JSONLinesDataset(ByteStream[Any]):
    """Stream samples from files with one JSON value per line.

    Empty lines are left out. A line that is no JSON is one failed sample; the error
    names the shard and the byte offset. ``orjson`` is used where it is installed.

    Args:
        addresses: Paths or URLs, such as ``"https://host/{0..9}.jsonl.zst"``.
        max_sample_bytes: As for ``TarDataset``.
        options: As for ``TarDataset``.
    """

    def __init__(
        self,
        addresses: "Addresses",
        *,
        max_sample_bytes: int = MAX_SAMPLE_BYTES,
        **options: Unpack[StreamOptions],
    ) -> None:
        make = functools.partial(_parser, _json, max_sample_bytes)
        super().__init__(addresses, make, cuts=at_line_ends, **options)


class TextDataset(ByteStream[str]):
    """Stream lines of text, without their ends.

    Args:
        addresses: Paths or URLs.
        encoding: Of the text. A line that is not in it is one failed sample.
        max_sample_bytes: As for ``TarDataset``.
        options: As for ``TarDataset``.
    """

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
        decode = functools.partial(_text, encoding)
        make = functools.partial(_parser, decode, max_sample_bytes)
        super().__init__(addresses, make, cuts=at_line_ends, **options)

    def describe(self) -> dict[str, Any]:
        """Return what a state is bound to; the encoding too."""
        return {**super().describe(), "encoding": self._encoding}


def _parser(
    decode: Callable[[bytes], Any], max_sample_bytes: int, url: str, offset: int
) -> LineParser:
    return LineParser(url, decode, max_sample_bytes=max_sample_bytes, offset=offset)


def _text(encoding: str, line: bytes) -> str:
    return line.decode(encoding)


def _json(line: bytes) -> Any:
    if not line.strip():
        return SKIP
    return _loads()(line)


@functools.cache
def _loads() -> Callable[[bytes], Any]:
    """Return what reads JSON here: imported with the first line, not before."""
    try:
        import orjson  # noqa: PLC0415  (an optional dependency)
    except ImportError:
        return json.loads
    loads: Callable[[bytes], Any] = orjson.loads
    return loads
