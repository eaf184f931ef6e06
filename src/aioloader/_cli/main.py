"""The command ``aioloader``: arguments in, an exit status out, errors in one line.

0: done; 1: failed while running; 2: wrong arguments; 130: interrupted.
"""

import argparse
import math
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from aioloader._cli import bench, index, pack
from aioloader._cli.usage import UsageError, UserCodeError
from aioloader.errors import LoaderError

_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)

_PACK = """\
Write samples to shards that stream well: tars as WebDataset has them, or Parquet files.

SRC is one of
  a directory, or the URL of a store's folder: files that share a name up to its first
      dot make one sample, as in a tar (a.jpg and a.json: members jpg and json); with
      --class-folders each picture is a sample, with the number of its folder as cls
  LIST.txt: a file that lists files, one path a line, relative to the list's directory
  *.jsonl, *.parquet, *.tar: shards in other formats or sizes, one or many (quoted:
      'train-*.jsonl', 'train-{000..127}.tar')

DST is a directory or a URL such as s3://bucket/train. Readers see whole shards only.
Run again after an interruption, the command resumes after the last whole shard.
"""
_PACK_EXAMPLES = """\
examples:
  aioloader pack photos/ shards/ --class-folders --shuffle 0 --name train
      then read with TarDataset("shards/train-*.tar").decode("torch")
  aioloader pack captions/ s3://bucket/captions --shard-size 128MB --jobs 64
  aioloader pack 'logs-*.jsonl' tables/ --format parquet
"""
_INDEX = """\
Write an index next to each tar, X.tar.idx, so that several readers can share a shard.

It says where samples start. Tars written by `aioloader pack` have one already.
Compressed tars cannot have one.
"""
_BENCH = """\
Compare your loader with torch's, with the same dataset and arguments, alternately.

MODULE:NAME is an aioloader.DataLoader, or a function without arguments that returns
one, in a module of this directory or an installed one. It prints samples and batches
per second, the time to the first batch, and the share of time in which training would
wait; the ratio is above 1 where aioloader is better. Then it prints the loader's own
verdict: what holds training back, and the one argument to change. A script guards its
other code with `if __name__ == "__main__":`, as for worker processes.
"""
_BENCH_EXAMPLES = """\
examples:
  aioloader bench train:loader
  aioloader bench my_package.data:make_loader --step 25 --page loader.html
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Those after the program's name; None: those of this process.

    Returns:
        The exit status.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except UsageError as error:
        options.parser.error(str(error))
    except KeyboardInterrupt:
        hint = "; the same command resumes from here" if options.resumes else ""
        sys.stderr.write(f"\ninterrupted{hint}\n")
        return 130
    except UserCodeError as error:
        traceback.print_exception(error.__cause__)
        sys.stderr.write(f"aioloader {options.command}: error: {error}\n")
        return 1
    except (LoaderError, OSError, ValueError, TypeError, ImportError) as error:
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        sys.stderr.write(f"aioloader {options.command}: error: {error}{notes}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="aioloader",
        description="Write shards for aioloader's streams, and measure loaders.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_pack(commands)
    _add_index(commands)
    _add_bench(commands)
    return parser


def _add_pack(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "pack",
        help="write files or rows to shards",
        description=_PACK,
        epilog=_PACK_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=pack.run, parser=command, resumes=True)
    add = command.add_argument
    add("src", metavar="SRC", help="the samples to pack")
    add("dst", metavar="DST", help="directory or URL for the shards")
    add("--format", choices=["tar", "parquet"], default="tar", help="default: tar")
    add("--name", default="shard", help="shards are NAME-000000.tar...; default: shard")
    add(
        "--class-folders",
        action="store_true",
        help="SRC has a folder of pictures for each class: labels by folder, sorted",
    )
    add(
        "--shuffle",
        type=int,
        metavar="SEED",
        help="permute the samples by this number, the same way in each run: shards "
        "that are sorted by class train badly; for directories",
    )
    add("--glob", metavar="PATTERN", help="files of a directory; default: **/*")
    add(
        "--shard-size",
        type=_size,
        metavar="SIZE",
        default=256 << 20,
        help="such as 64MB or 1G (powers of 1024); default: 256MB",
    )
    add("--shard-samples", type=_count, metavar="N", help="most samples of a shard")
    add(
        "--jobs",
        type=_count,
        metavar="N",
        default=16,
        help="files read at a time; default: 16",
    )
    for side in ("src", "dst"):
        add(
            f"--{side}-option",
            action="append",
            type=_pair,
            default=[],
            metavar="KEY=VALUE",
            help=f"option of the store of {side.upper()}, such as region=eu-west-1; "
            f"may be repeated; secrets belong in the environment",
        )
    add("-q", "--quiet", action="store_true", help="print nothing but errors")


def _add_index(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "index",
        help="let several readers share a tar",
        description=_INDEX,
        epilog="example:\n  aioloader index shards/train-*.tar\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=index.run, parser=command, resumes=True)
    command.add_argument("tars", nargs="+", type=Path, metavar="X.tar", help="the tars")
    command.add_argument(
        "-q", "--quiet", action="store_true", help="print nothing but errors"
    )


def _add_bench(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "bench",
        help="compare a loader with torch's",
        description=_BENCH,
        epilog=_BENCH_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=bench.run, parser=command, resumes=False)
    add = command.add_argument
    add("loader", metavar="MODULE:NAME", help="a loader, or a function returning one")
    counts = {"batches": (200, "per round at most"), "rounds": (3, "of both loaders")}
    for name, (count, what) in counts.items():
        help_ = f"{name} {what}; default: {count}"
        add(f"--{name}", type=_count, metavar="N", default=count, help=help_)
    times = {
        "seconds": ("S", 10, "seconds per round at most, from the first batch on"),
        "step": ("MS", 0, "milliseconds of a simulated training step per batch"),
    }
    for name, (unit, amount, what) in times.items():
        help_ = f"{what}; default: {amount}"
        add(f"--{name}", type=_amount, metavar=unit, default=amount, help=help_)
    add("--page", type=Path, metavar="FILE.html", help="save figures and verdict")


# -- values of options: argparse shows the error -----------------------------------


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * (1 << _UNITS[match[2].upper()])) if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"a size must be like 64MB, got {text!r}")
    return size


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text!r}")
    return int(text)


def _amount(text: str) -> float:
    try:
        amount = float(text)
    except ValueError:
        amount = -1.0
    if not 0 <= amount < math.inf:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text!r}")
    return amount


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError("must be KEY=VALUE")
    return key, value
