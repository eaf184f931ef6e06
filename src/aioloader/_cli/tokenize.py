"""``aioloader tokenize``: write the tokens of texts to one file."""

import asyncio
import contextlib
import functools
import importlib
import inspect
import re
import sys
from argparse import ArgumentTypeError, Namespace
from pathlib import Path
from typing import Any

from aioloader._cli.bench import find_object, users
from aioloader._cli.pack import write_all
from aioloader._cli.sources import find_texts
from aioloader.datasets.tokens import TokenWriter

_MAX_UINT16 = (1 << 16) - 1


def run(options: Namespace) -> None:
    tokenizer = _find_tokenizer(options.tokenizer)
    try:
        source = find_texts(options, tokenizer)
        writer = TokenWriter(
            options.dst,
            options.dtype or _dtype_for(tokenizer),
            format=options.format,
            eos=None if options.eos is None else _number_of(options.eos, tokenizer),
            metadata=source.metadata,
            store_options=dict(options.dst_option),
        )
    except (ValueError, TypeError, FileNotFoundError) as error:
        raise ArgumentTypeError(str(error)) from error
    first = asyncio.run(write_all(source, writer, options))
    if not options.quiet:
        there = f" ({first:,} documents already written)" if first else ""
        sys.stdout.write(
            f"{writer.tokens:,} tokens in {writer.next_sample:,} documents{there}\n"
        )


def _find_tokenizer(name: str) -> Any:
    """Load a tokenizer; ``name``: a file, a directory, a Hub name or module:name."""
    if re.fullmatch(r"[\w.]+:[\w.]+", name):
        return _named(find_object(*name.split(":")), name)
    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    if path.suffix == ".json" and not path.exists():
        raise ArgumentTypeError(f"there is no file {name!r}")
    transformers = None if file.is_file() else _module("transformers")
    if transformers is not None:
        return transformers.AutoTokenizer.from_pretrained(name)
    tokenizers = _module("tokenizers")
    if tokenizers is None:
        raise ImportError("reading a tokenizer needs the package tokenizers")
    if file.is_file():
        return tokenizers.Tokenizer.from_file(str(file))
    return tokenizers.Tokenizer.from_pretrained(name)


def _named(tokenizer: Any, name: str) -> Any:
    """Return the tokenizer; wrap a plain function so that errors show ``name``."""
    if not inspect.isfunction(tokenizer) or inspect.iscoroutinefunction(tokenizer):
        return tokenizer

    @functools.wraps(tokenizer)
    def called(texts: list[str]) -> Any:
        with users(f"{name}() raised"):
            return tokenizer(texts)

    return called


def _module(name: str) -> Any:
    """Return the imported module, or None if it is not installed."""
    with contextlib.suppress(ImportError):
        return importlib.import_module(name)
    return None


def _vocabulary(tokenizer: Any) -> dict[str, int]:
    """Return each token's number by its text; empty if the tokenizer is a function."""
    get = getattr(tokenizer, "get_vocab", dict)
    numbers: dict[str, int] = get()
    return numbers


def _dtype_for(tokenizer: Any) -> str:
    vocabulary = _vocabulary(tokenizer)
    if not vocabulary:
        raise ValueError("--dtype is needed with a function: its vocabulary is unknown")
    return "uint16" if max(vocabulary.values()) <= _MAX_UINT16 else "int32"


def _number_of(token: str, tokenizer: Any) -> int:
    if token.isdecimal():
        return int(token)
    vocabulary = _vocabulary(tokenizer)
    if token not in vocabulary:
        raise ValueError(f"--eos {token!r} is not in the vocabulary of the tokenizer")
    return vocabulary[token]
