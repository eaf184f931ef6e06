"""JSON lines give the same samples with and without orjson: those of ``json``."""

import functools
import json
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aioloader._order.blocks import Bad
from aioloader.datasets import _json
from aioloader.datasets._json import JSONDecoder
from aioloader.datasets.lines import samples
from datasets.stepping import steps

# What one of the two reads in a way of its own, or not at all.
ODD = [
    b"18446744073709551616",
    b"-9223372036854775809",
    b'{"id": [1, 123456789012345678901234567890]}',
    b"9223372036854775807",
    b"18446744073709551615",
    b"1e999",
    b"-1e999",
    b"NaN",
    b'{"a": [-Infinity, Infinity]}',
    b'{"a": 1, "a": 2}',
    rb'"\ud800"',
    rb'"\ude00\ud83d"',
    b'"\xed\xa0\x80"',
    b"\xef\xbb\xbf1",
    b'"a\x00b"',
    b"{'a'}",
    '"x"'.encode("utf-16"),
    b"-0",
    b"-0.0",
    b"0.1234567890123456789012345678901234567890",
    b"9" * 5000,
    b"[" * 600 + b"]" * 600,
    b"[" * 100_000,
    b'{"a":' * 1020 + b"1" + b"}" * 1020,
    b'"\xff"',
    b"[1,]",
    b"\r",
    b"  ",
    b"",
    b"1 \r",
    b"\x0c1",
]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(2**63 - 3, 2**64 + 3)
    | st.floats()
    | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
LINES = st.builds(
    lambda value, ascii_only: json.dumps(value, ensure_ascii=ascii_only).encode(
        "utf-8", "surrogatepass"
    ),
    VALUES,
    st.booleans(),
)


def made(lines: list[bytes], limit: int = 1024) -> Iterator[Any]:
    """Yield what lines become: type, value and place of each."""
    make = functools.partial(samples, JSONDecoder(), 1 << 20)
    for block, at in steps(make, b"\n".join(lines), limits=[limit]):
        for sample in block:
            yield str(sample.error) if type(sample) is Bad else repr(sample)
        yield at


def both(lines: list[bytes], limit: int = 1024) -> tuple[list[Any], list[Any]]:
    with_it = list(made(lines, limit))
    with mock.patch.object(_json, "_orjson_loads", return_value=None):
        return with_it, list(made(lines, limit))


@given(
    st.lists(LINES | st.sampled_from(ODD) | st.binary(max_size=9), max_size=9),
    st.integers(1, 9),
)
@example(lines=ODD, limit=1024)
@example(lines=ODD, limit=1)
def test_the_same_with_and_without_orjson(lines: list[bytes], limit: int) -> None:
    found, expected = both(lines, limit)
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("line", ODD)
def test_what_json_reads_is_read(line: bytes) -> None:
    found = next(iter(made([line])), None)
    try:
        assert found == repr(json.loads(line))
    except (ValueError, RecursionError):
        assert found is None or not line.strip() or "damaged" in str(found)


def test_integers_are_exact_in_large_blocks() -> None:
    for at in range(40):
        lines = [b'{"n": %d}' % n for n in range(40)]
        lines[at] = b'{"pad": "%s", "n": %d}' % (b"x" * at, 10**18 + 10**19)
        found, expected = both(lines)
        assert found == expected
        last = at == 39  # a line without its end is a block of its own
        assert str(10**18 + 10**19) in found[at + last]


@pytest.mark.parametrize("pad", range(20))
def test_integers_are_exact_at_any_place(pad: int) -> None:
    """Alone, beside fractions that are as long, at both ends of what is looked at."""
    large = b"9" * 20
    for rest in (b"%s", b"-%s", b"0.%s", b"[0.%s, %s]", b"[%s, 0.%s]", b"[0.1, %s]"):
        line = b" " * pad + rest.replace(b"%s", large)
        found, expected = both([b"[]" * (pad % 2), line])
        assert found == expected
