"""``aioloader pack``: samples of any kind to shards."""

import argparse
import asyncio
import sys
from contextlib import aclosing
from typing import Any

from aioloader._cli.sources import Source, find_source
from aioloader._cli.usage import Progress, UsageError
from aioloader.datasets.writers import ParquetWriter, ShardWriter, TarWriter


def run(options: argparse.Namespace) -> None:
    """Pack the samples that the arguments name.

    Raises:
        UsageError: If the arguments are wrong.
        DatasetError: If something cannot be read or written.
        ValueError: If a sample does not fit the format.
    """
    try:
        source = find_source(options)
        writer = _make_writer(source, options)
    except (ValueError, TypeError, FileNotFoundError) as error:
        raise UsageError(str(error)) from error
    first = asyncio.run(_pack(source, writer, options))
    if not options.quiet:
        sys.stdout.write(_summary(writer, first, options))
        for note in source.notes:
            sys.stdout.write(f"{note}\n")


def _make_writer(source: Source, options: argparse.Namespace) -> ShardWriter:
    given: dict[str, Any] = {
        "shard_bytes": options.shard_size,
        "shard_samples": options.shard_samples,
        "metadata": source.metadata,
        "store_options": dict(options.dst_option),
    }
    kind = TarWriter if options.format == "tar" else ParquetWriter
    return kind(options.dst, options.name, **given)


async def _pack(
    source: Source, writer: ShardWriter, options: argparse.Namespace
) -> int:
    """Write the missing samples; return how many were there."""
    async with writer:
        first = writer.next_sample
        with Progress(first, source.count, is_quiet=options.quiet) as progress:
            async with aclosing(source.samples(first)) as samples:
                async for sample in samples:
                    await writer.write(sample)
                    progress.add()
    return first


def _summary(writer: ShardWriter, first: int, options: argparse.Namespace) -> str:
    shards = writer.shards
    there = f" ({first:,} already written)" if first else ""
    if not shards:
        return "0 samples\n"
    names = shards[0]
    if len(shards) > 1:
        last = len(shards) - 1
        names = f"{options.name}-{{{0:06d}..{last:06d}}}.{options.format}"
    count = f"{len(shards):,} shard{'s' * (len(shards) > 1)}"
    return f"{writer.next_sample:,} samples{there} in {count}: {names}\n"
