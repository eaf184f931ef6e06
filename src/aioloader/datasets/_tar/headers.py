"""Parsing the headers of a tar archive: v7, ustar, GNU, PAX.

Pure functions on whole blocks of 512 bytes, each in constant time and memory except PAX
records, which take as much as their length. Damage is a ``DamageError`` without a
position; the parser adds it.
"""

from collections.abc import Iterator
from functools import lru_cache
from struct import Struct
from zlib import adler32

from typing_extensions import Buffer

BLOCK_BYTES = 512
ZEROS = bytes(BLOCK_BYTES)
EXTENDED_BYTES = 1 << 20  # a longer name or PAX header is damage, or an attack

# Typeflags.
PAX, GLOBAL, LONG_NAME = b"xgL"
PAX_KINDS = b"xX"  # X is Solaris' x
SPARSE = ord("S")
REGULAR = b"0\x007S"
LINKS = b"12"
EXTENDED = b"LKxXg"
_PLAIN = b"0\0"
_BODILESS = b"123456"  # links, devices, directories, fifos: whatever their size field

# Name, size, checksum, and the rest from the typeflag on.
FIELDS = Struct("100s24x12s12x8s356s")
_TAIL = 156  # start of the part that most members share, with the typeflag


class DamageError(Exception):
    """A header is damaged."""


def sum_plain(block: bytes) -> int | None:
    """Return the share of the bytes from the typeflag on in a member's checksum.

    It is equal for members of the same type and owner, so it is computed once.

    Returns:
        The sum; None if ``read_plain`` cannot read such a header.
    """
    if block[_TAIL] not in _PLAIN or block[345]:
        return None
    return sum(block[_TAIL:].translate(None, b"\0"))


def read_plain(head: Buffer, fields: tuple[bytes, ...], tail_sum: int) -> int:
    """Return the size; -1 if the checksum or another field is not plain.

    The low half of an Adler sum is 1 and the sum of the bytes, modulo 65521, which 148
    bytes do not reach: exact, and much faster than ``sum``.

    Args:
        head: The first 148 bytes of a header.
        fields: The fields of ``head``, unpacked by ``FIELDS``.
        tail_sum: Result of ``sum_plain`` for it, or for a header with the same tail.
    """
    try:
        checksum = int(fields[2].rstrip(b"\0 "), 8)
        size = int(fields[1].rstrip(b"\0 "), 8)
    except ValueError:
        return -1
    # 255: eight spaces in place of the checksum, less the 1.
    is_sound = (adler32(head) & 0xFFFF) + 255 + tail_sum == checksum
    return size if is_sound else -1


def is_sound(block: bytes) -> bool:
    """Verify a checksum, of unsigned bytes or, as from old writers, signed ones."""
    try:
        checksum = _read_number(block[148:156])
    except DamageError:
        return False
    rest = block[:148] + b" " * 8 + block[156:]
    # In halves, because 256 bytes do not reach the modulus either.
    found = (adler32(rest[:256]) & 0xFFFF) + (adler32(rest[256:]) & 0xFFFF) - 2
    if found == checksum:
        return True
    return found - 256 * sum(byte > 127 for byte in rest) == checksum


@lru_cache(maxsize=16)
def size_of_pax(block: bytes) -> int | None:
    """Return the size of the records after a PAX header; None if it is invalid.

    Some writers put the same header before each member.
    """
    try:
        return read_extended_size(block) if is_sound(block) else None
    except DamageError:
        return None


def read_extended_size(block: bytes) -> int:
    """Return the size of a long name or of PAX records.

    Raises:
        DamageError: If it is not a number, or over 1 MiB.
    """
    size = _read_number(block[124:136])
    if size > EXTENDED_BYTES:
        raise DamageError(f"a long name or PAX header of {size:,} bytes, over 1 MiB")
    return size


def read_member(block: bytes, extras: dict[str, bytes]) -> tuple[str, int]:
    """Return name and size of the body.

    Args:
        block: The header of a member.
        extras: Values from ``read_pax`` and long names.

    Raises:
        DamageError: If the size is not a number.
    """
    path = extras.get("path")
    name = _read_name(block) if not path else read_text(path)
    return name, 0 if block[_TAIL] in _BODILESS else _read_size(block, extras)


def read_text(field: bytes) -> str:
    """Return text up to a zero; bytes that are not UTF-8 can be encoded back."""
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _read_name(block: bytes) -> str:
    name = read_text(block[:100])
    if block[345] and block[257:263] == b"ustar\0":
        return f"{read_text(block[345:500])}/{name}"
    return name


def _read_size(block: bytes, extras: dict[str, bytes]) -> int:
    digits = extras.get("size")
    if not digits:
        return _read_number(block[124:136])
    if len(digits) > 20 or not digits.isdigit():
        raise DamageError(f"{digits[:20]!r} for a size in a PAX header")
    return int(digits)


def _read_number(field: bytes) -> int:
    """Return a number: octal digits, or base 256 if the top bit is set."""
    try:
        if field[0] & 0x80:
            number = int.from_bytes(field, signed=True)
            # The first of the top two bits marks the base, the second is the sign.
            number += 0 if field[0] & 0x40 else 1 << (8 * len(field) - 1)
        else:
            number = int(field.partition(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        raise DamageError(f"{field!r} for an octal number") from None
    if number < 0:
        raise DamageError(f"a negative number, {number:,}")
    return number


def is_silent(records: bytes) -> bool:
    """Return whether PAX records are irrelevant, by a quick search."""
    has_any = b"path=" in records or b"size=" in records or b"GNU.sparse." in records
    return not has_any


def read_pax(records: bytes) -> dict[str, bytes]:
    """Return the relevant PAX records: path, size, whether the member is sparse.

    Raises:
        DamageError: If a record that may be relevant is broken.
    """
    if is_silent(records):
        return {}
    extras = {}
    for key, value in _pax_records(records.rstrip(b"\0")):
        if key == b"size":
            extras["size"] = value
        elif key in {b"path", b"GNU.sparse.name"}:
            extras["path"] = value
        if key.startswith(b"GNU.sparse."):
            extras["sparse"] = value
    return extras


def _pax_records(records: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield key and value of each ``length key=value`` line."""
    pos = 0
    while pos < len(records):
        space = records.find(b" ", pos, pos + 20)
        digits = records[pos : max(space, pos)]
        stop = pos + int(digits) if digits.isdigit() else 0
        if stop <= space or records[stop - 1 : stop] != b"\n":
            raise DamageError(f"a broken PAX record at byte {pos:,} of its header")
        key, _, value = records[space + 1 : stop - 1].partition(b"=")
        yield key, value
        pos = stop


# The last character of a key whose base name is empty: that of a hidden file. Of
# those in folders WebDataset makes samples named "folder/", which nobody wants.
_NO_STEM = frozenset({"", "/"})


def split_name(name: str) -> tuple[str, str] | None:
    """Return the key and the field of a member; None if it is of no sample."""
    key, dot, field = name.partition(".")
    if "/" in field:  # the dot is in a folder name
        folder, _, base = name.rpartition("/")
        stem, dot, field = base.partition(".")
        key = f"{folder}/{stem}"
    if not dot or key[-1:] in _NO_STEM:
        return None
    # The first part of a path like ``__meta__``.
    top = name.partition("/")[0]
    if len(top) >= 4 and top.startswith("__") and top.endswith("__"):
        return None
    return key, field.lower()
