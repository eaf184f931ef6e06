"""``aioloader pack``: write files or rows to shards."""

import asyncio
import sys
import time
from argparse import ArgumentTypeError, Namespace
from contextlib import aclosing
from typing import Any

from aioloader._cli.sources import PackSource, find_source
from aioloader.datasets.tokens import TokenWriter
from aioloader.datasets.writers import ParquetWriter, ShardWriter, TarWriter

# Seconds between two updates of the progress on a terminal.
_SHOWN_EVERY = 0.2


def run(options: Namespace) -> None:
    try:
        source = find_source(options)
        writer = _make_writer(source, options)
    except (ValueError, TypeError, FileNotFoundError) as error:
        raise ArgumentTypeError(str(error)) from error
    first = asyncio.run(write_all(source, writer, options))
    if not options.quiet:
        lines = [_summary(writer, first, options), *source.notes, ""]
        sys.stdout.write("\n".join(lines))


def _make_writer(source: PackSource, options: Namespace) -> ShardWriter:
    given: dict[str, Any] = {
        "shard_bytes": options.shard_size,
        "shard_samples": options.shard_samples,
        "metadata": source.metadata,
        "store_options": dict(options.dst_option),
    }
    kind = TarWriter if options.format == "tar" else ParquetWriter
    return kind(options.dst, options.name, **given)


async def write_all(
    source: PackSource, writer: ShardWriter | TokenWriter, options: Namespace
) -> int:
    """Write samples and show progress; return how many an earlier run had written."""
    is_seen = sys.stderr.isatty() and not options.quiet
    of = "" if source.count is None else f" of {source.count:,}"
    shown = 0.0
    try:
        async with writer, source.lifespan:
            first, began = writer.next_sample, time.monotonic()
            async with aclosing(aiter(source.stream(first))) as samples:
                try:
                    async for sample in samples:
                        await writer.write(source.fitted(sample))
                        now = time.monotonic()
                        if is_seen and now - shown >= _SHOWN_EVERY:
                            done, shown = f"{writer.next_sample:,}{of} samples", now
                            rate = (writer.next_sample - first) / max(now - began, 1e-9)
                            sys.stderr.write(f"\r{done}, {rate:,.0f}/s\x1b[K")
                            sys.stderr.flush()
                except Exception as error:
                    where = f"at sample {writer.next_sample:,} of SRC, counted from 0"
                    error.add_note(where)
                    raise
    finally:
        if shown:
            sys.stderr.write("\r\x1b[K")
    return first


def _summary(writer: ShardWriter, first: int, options: Namespace) -> str:
    shards = writer.shards
    if not shards:
        return "0 samples"
    names = shards[0]
    if len(shards) > 1:
        last = len(shards) - 1
        names = f"{options.name}-{{{0:06d}..{last:06d}}}.{options.format}"
    there = f" ({first:,} already written)" if first else ""
    count = f"{len(shards):,} shard{'s' * (len(shards) > 1)}"
    return f"{writer.next_sample:,} samples{there} in {count}: {names}"
