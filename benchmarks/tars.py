"""The server of ``bounded.py``: tar shards that are computed on request.

A shard has ``SAMPLES`` members of ``BODY_BYTES``, named by their number in the whole
set; a body starts with that number, and continues with shared noise. Nothing is stored:
any part of any shard is made when it is requested.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Self

SAMPLES = 4_800
BODY_BYTES = 20_480  # a multiple of 512: members need no padding
_HEADER_BYTES = 512
_MEMBER = _HEADER_BYTES + BODY_BYTES
_END_BYTES = 2 * _HEADER_BYTES
SHARD_BYTES = SAMPLES * _MEMBER + _END_BYTES
_NAME_BYTES = 9
_NOISE = os.urandom(BODY_BYTES - 8)


def name_of(shard: int) -> str:
    return f"shard-{shard:06d}.tar"


def _template() -> tuple[bytes, bytes, int]:
    """Return the header around the digits of a name, and its sum.

    The sum is that of the bytes with blanks in place of the checksum, as in tar, and
    without digits.
    """
    info = tarfile.TarInfo("0" * _NAME_BYTES + ".bin")
    info.size = BODY_BYTES
    block = info.tobuf(tarfile.USTAR_FORMAT)
    before, after = block[_NAME_BYTES:148], block[156:]
    return before, after, sum(before) + sum(after) + 8 * ord(" ")


_BEFORE, _AFTER, _SUM = _template()


def header(number: int) -> bytes:
    digits = b"%09d" % number
    return b"%b%b%06o\0 %b" % (digits, _BEFORE, _SUM + sum(digits), _AFTER)


def make(name: str, start: int, stop: int) -> bytes:
    """Make a part of a shard."""
    base = int(name[6:12]) * SAMPLES
    first, last = start // _MEMBER, min(SAMPLES, -(-stop // _MEMBER))
    pieces = []
    for number in range(base + first, base + last):
        pieces += [header(number), number.to_bytes(8, "little"), _NOISE]
    if stop > SAMPLES * _MEMBER:
        pieces.append(bytes(_END_BYTES))
    skipped = min(first, SAMPLES) * _MEMBER
    return b"".join(pieces)[start - skipped : stop - skipped]


class TarProcess:
    """The server in a separate process; leaving the ``with`` block stops it."""

    def __init__(self, shards: int) -> None:
        self._command = [sys.executable, str(Path(__file__)), "--shards", str(shards)]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        return self

    def __exit__(self, *exc: object) -> None:
        # its stdin closes, and with it the server
        self._process.communicate()


def main() -> None:
    from served import ObjectServer  # noqa: PLC0415

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=200)
    sizes = {name_of(one): SHARD_BYTES for one in range(parser.parse_args().shards)}
    with ObjectServer(make=make, sizes=sizes) as server:
        print(server.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
