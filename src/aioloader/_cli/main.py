"""The command ``aioloader``: its arguments, exit status and error lines.

Exit status 0: done; 1: failed while running; 2: wrong arguments; 130: interrupted.
"""

import math
import re
import sys
import traceback
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from aioloader._cli import bench, index, pack, tokenize
from aioloader.errors import LoaderError

Num = TypeVar("Num", int, float)

_ERRORS = LoaderError, OSError, ValueError, TypeError, ImportError, KeyError
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)

_PACK = """\
Write samples to shards that stream well: tars as WebDataset has them, or Parquet files.

SRC is one of
  a directory, or the URL of a store's folder: files that share a name up to its first
      dot make one sample, as in a tar (a.jpg and a.json: members jpg and json); with
      --class-folders each image is a sample, with the number of its folder as cls
  LIST.txt: a file that lists files, one path a line, relative to the list's directory
  *.jsonl, *.parquet, *.tar: shards in other formats or sizes, one or many (quoted:
      'train-*.jsonl', 'train-{000..127}.tar')

DST is a directory or a URL such as s3://bucket/train. Readers see whole shards only.
Run again after an interruption, the command resumes after the last whole shard.

examples:
  aioloader pack photos/ shards/ --class-folders --shuffle 0 --name train
      then read with TarDataset("shards/train-*.tar").decode("torch")
  aioloader pack captions/ s3://bucket/captions --shard-size 128MB --jobs 64
  aioloader pack 'logs-*.jsonl' tables/ --format parquet
"""
_INDEX = """\
Write where the samples of shards start: so several readers can share a shard, and
IndexedDataset reads any sample.

X is shards: *.tar, *.jsonl or *.txt, as paths, URLs or patterns (quoted:
's3://bucket/train-{000..127}.tar'), not compressed. Each gets its index next to it,
X.idx; tars written by `aioloader pack` have theirs already. With --pack all have one,
which also holds their versions; for MDS shards, X is their directories.

Run again, the command indexes what is new or has changed.

examples:
  aioloader index shards/train-*.tar
  aioloader index 's3://bucket/train-*.tar' --pack s3://bucket/train.aioidx
      then IndexedDataset(TarDataset('s3://bucket/train-*.tar'),
      pack='s3://bucket/train.aioidx')
"""
_TOKENIZE = """\
Write the tokens of texts to one file, for TokenDataset, or Megatron.

SRC is shards of texts, one or many (quoted: 'train-*.jsonl', 'train-{000..127}.txt'):
  *.txt: each line is a document
  *.jsonl, *.parquet: each row is one, the text of --column
packed by gz, zst, bz2 or xz, too; paths or URLs.

DST is the file, as a path or URL; readers see it when it is whole. Run again after an
interruption, the command resumes (an upload to a store starts over).

examples:
  aioloader tokenize 'wiki-*.parquet' wiki.bin --tokenizer tokenizer.json --eos '</s>'
      then read with TokenDataset("wiki.bin", 4096)
  aioloader tokenize books.jsonl books.bin --tokenizer gpt2 --column body \\
      --eos '<|endoftext|>' --format megatron
"""
_BENCH = """\
Compare your loader with torch's, with the same dataset and arguments, alternately.

MODULE:NAME is an aioloader.DataLoader, or a function without arguments that returns
one, in a module of this directory or an installed one. It prints samples and batches
per second, the time to the first batch, and the share of time in which training would
wait; the ratio is above 1 where aioloader is better. Then it prints the loader's own
verdict: the bottleneck, and the one argument to change. A script guards its
other code with `if __name__ == "__main__":`, as for worker processes.

examples:
  aioloader bench train:loader
  aioloader bench my_package.data:make_loader --step 25 --page loader.html
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default from ``sys.argv``; return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except ArgumentTypeError as error:
        options.parser.error(str(error))
    except KeyboardInterrupt:
        resumes = options.command != "bench"
        hint = "; the same command resumes from here" if resumes else ""
        sys.stderr.write(f"\ninterrupted{hint}\n")
        return 130
    except _ERRORS as error:
        said = error.args[0] if isinstance(error, KeyError) else error
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        sys.stderr.write(f"aioloader {options.command}: error: {said}{notes}\n")
        return 1
    except bench.UserCodeError as error:
        traceback.print_exception(error.__cause__)
        sys.stderr.write(f"aioloader {options.command}: error: {error}\n")
        return 1
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="aioloader",
        description="Write shards and tokens for aioloader, and measure loaders.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, run, add_arguments, summary, text in (
        ("pack", pack.run, _add_pack, "write files or rows to shards", _PACK),
        ("index", index.run, _add_shards, "write where samples start", _INDEX),
        ("tokenize", tokenize.run, _add_tokenize, "write texts as tokens", _TOKENIZE),
        ("bench", bench.run, _add_bench, "compare a loader with torch's", _BENCH),
    ):
        description, examples = text.split("examples:\n")
        command = commands.add_parser(
            name,
            help=summary,
            description=description,
            epilog=f"examples:\n{examples}",
            formatter_class=RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run, parser=command)
        add_arguments(command.add_argument)
    return parser


def _add_pack(add: Callable[..., Any]) -> None:
    add("src", metavar="SRC", help="the samples to pack")
    add("dst", metavar="DST", help="directory or URL for the shards")
    add("--format", choices=["tar", "parquet"], default="tar", help="default: tar")
    add("--name", default="shard", help="shards are NAME-000000.tar...; default: shard")
    words = "SRC has a folder of images for each class: labels by folder, sorted"
    add("--class-folders", action="store_true", help=words)
    words = (
        "permute the samples by this number, the same way in each run: shards that are "
        "sorted by class train badly; for directories"
    )
    add("--shuffle", type=int, metavar="SEED", help=words)
    add("--glob", metavar="PATTERN", help="files of a directory; default: **/*")
    words = "such as 64MB or 1G (powers of 1024); default: 256MB"
    add("--shard-size", type=_size, metavar="SIZE", default=256 << 20, help=words)
    add("--shard-samples", type=_count, metavar="N", help="most samples of a shard")
    words = "files read at a time; default: 16"
    add("--jobs", type=_count, metavar="N", default=16, help=words)
    _add_stores(add)
    add("-q", "--quiet", action="store_true", help="print nothing but errors")


def _add_tokenize(add: Callable[..., Any]) -> None:
    add("src", metavar="SRC", help="the texts")
    add("dst", metavar="DST", help="path or URL of the file")
    words = (
        "a tokenizer.json, or the directory or name on the Hub of a tokenizer; or "
        "MODULE:NAME, a function of a list of texts that returns their tokens"
    )
    add("--tokenizer", required=True, metavar="T", help=words)
    words = "column of the texts in rows; default: text"
    add("--column", metavar="NAME", help=words)
    words = "token to add to each document: its text in the vocabulary, or its number"
    add("--eos", metavar="TOKEN", help=words)
    words = "of the tokens; default: uint16 if all of the vocabulary fit, else int32"
    add("--dtype", metavar="TYPE", help=words)
    words = "megatron: DST.bin with DST.idx; default: flat"
    add("--format", choices=["flat", "megatron"], default="flat", help=words)
    _add_stores(add)
    add("-q", "--quiet", action="store_true", help="print nothing but errors")


def _add_stores(add: Callable[..., Any]) -> None:
    for side in ("src", "dst"):
        words = (
            f"option of the store of {side.upper()}, such as region=eu-west-1; may be "
            "repeated; secrets belong in the environment"
        )
        given: dict[str, Any] = {"action": "append", "type": _pair, "default": []}
        add(f"--{side}-option", metavar="KEY=VALUE", help=words, **given)


def _add_shards(add: Callable[..., Any]) -> None:
    add("shards", nargs="+", metavar="X", help="the shards")
    add("--pack", metavar="DST", help="path or URL of one index for all")
    words = "option of the store, such as region=eu-west-1; may be repeated"
    given: dict[str, Any] = {"action": "append", "type": _pair, "default": []}
    add("--option", metavar="KEY=VALUE", help=words, **given)
    add("-q", "--quiet", action="store_true", help="print nothing but errors")


def _add_bench(add: Callable[..., Any]) -> None:
    add("loader", metavar="MODULE:NAME", help="a loader, or a function returning one")
    words = "batches per round at most; default: 200"
    add("--batches", type=_count, metavar="N", default=200, help=words)
    words = "rounds of both loaders; default: 3"
    add("--rounds", type=_count, metavar="N", default=3, help=words)
    words = "seconds per round at most, from the first batch on; default: 10"
    add("--seconds", type=_amount, metavar="S", default=10, help=words)
    words = "milliseconds of a simulated training step per batch; default: 0"
    add("--step", type=_amount, metavar="MS", default=0, help=words)
    add("--page", type=Path, metavar="FILE.html", help="save the report as a page")


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * (1 << _UNITS[match[2].upper()])) if match else 0
    if size < 1:
        raise ArgumentTypeError(f"a size must be like 64MB, got {text!r}")
    return size


def _at_least(least: int, kind: type[Num], text: str) -> Num:
    try:
        number = kind(text)
    except ValueError:
        number = kind(-1)
    if not least <= number < math.inf:
        raise ArgumentTypeError(f"must be at least {least}, got {text!r}")
    return number


_count = partial(_at_least, 1, int)
_amount = partial(_at_least, 0, float)


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ArgumentTypeError("must be KEY=VALUE")
    return key, value
