"""``aioloader index``: writes where the samples of tars start."""

import argparse
import importlib
import sys

from aioloader._cli.usage import UsageError


def run(options: argparse.Namespace) -> None:
    """Write an index next to each tar.

    Raises:
        UsageError: If a tar does not exist.
        DatasetError: If one is damaged.
    """
    for path in options.tars:
        if not path.is_file():
            raise UsageError(f"there is no file {str(path)!r}")
    write_index = importlib.import_module("aioloader.datasets.tar").write_index
    for path in options.tars:
        count = write_index(str(path))
        if not options.quiet:
            sys.stdout.write(f"{path}.idx: {count:,} samples\n")
