"""``aioloader index``: write where samples start, per shard or in one pack."""

import asyncio
import math
import sys
import time
from argparse import ArgumentTypeError, Namespace
from contextlib import AsyncExitStack, aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Any

from aioloader._base.cancellation import in_order, in_thread
from aioloader._cli.sources import find_kind
from aioloader.datasets import indexed
from aioloader.datasets._stores.addresses import (
    Address,
    has_signs,
    is_local,
    shown_address,
    sibling,
)
from aioloader.datasets._stores.failures import Version
from aioloader.datasets._stores.storage import Storage
from aioloader.datasets._streams.edges import (
    EdgesBuilder,
    IndexPack,
    Offsets,
    check_end,
    index_bytes,
    index_name,
    read_index,
)
from aioloader.datasets._streams.engine import ByteFormat
from aioloader.datasets._streams.shards import names_of
from aioloader.datasets.lines import JSONLinesDataset, TextDataset
from aioloader.datasets.mds import MDSDataset, MDSFormat
from aioloader.datasets.tar import TarDataset
from aioloader.errors import DatasetError

_STREAMS: dict[str, Any] = {
    "tar": partial(TarDataset, missing_end="warn"),
    "jsonl": JSONLinesDataset,
    "ndjson": JSONLinesDataset,
    "txt": TextDataset,
    "": MDSDataset,
}
# Seconds after which an unfinished pack is saved again.
_SAVED_EVERY = 60.0


def run(options: Namespace) -> None:
    """Index shards that no earlier run has indexed, or that have changed since."""
    for path in options.shards:
        is_plain = is_local(path) and not (has_signs(path) or "{" in path)
        if is_plain and not Path(path).exists():
            raise ArgumentTypeError(f"there is no file {path!r}")
    kinds = {*map(find_kind, options.shards)}
    if len(kinds) > 1 or not kinds <= _STREAMS.keys():
        names = ", ".join(sorted(kinds))
        raise ArgumentTypeError(
            f"X must be tars, lines (.jsonl, .txt), or directories of MDS shards, all "
            f"of one kind, got {names}"
        )
    kind = kinds.pop()
    if options.pack is None and not kind:
        raise ArgumentTypeError(
            "directories of MDS shards hold their index: write that of all, --pack; "
            "files of other kinds need scan=True and save() of IndexedDataset"
        )
    given = dict(options.option) or None
    asyncio.run(_index(_STREAMS[kind](options.shards, store_options=given), options))


async def _index(stream: Any, options: Namespace) -> None:
    """Write an index next to each shard, or one pack with the indices of all."""
    made_by: ByteFormat = stream.made_by
    of, pack, growing = indexed.kind_of(stream), options.pack, EdgesBuilder()
    before: dict[str, tuple[Offsets, Version]] = {}
    async with AsyncExitStack() as stack:
        stack.callback(_show, "", options)
        shards = await indexed.listed(made_by, stack)
        addresses = [*map(made_by.address, shards)]
        names = names_of(addresses) if pack is None else indexed.pack_names(addresses)
        if pack is not None:
            with suppress(DatasetError):  # there is no pack, or it is damaged
                known = await indexed.pack_at(stream, pack)
                before = known.by_name() if known.format == of else {}
        is_new, saved = not before.keys() >= {*names}, time.monotonic()
        find = lambda i: _find(made_by, shards[i], before.get(names[i]))  # noqa: E731
        indices = in_order(find, range(len(shards)))
        await stack.enter_async_context(aclosing(indices))
        async for numbers, version, is_there in indices:
            growing.add(numbers, version)
            done = len(growing)
            if pack is None:
                beside = sibling(shards[done - 1], index_name)
                if not is_there:
                    await indexed.write(stream, beside, index_bytes(numbers))
                label = made_by.storage.label(beside)
                _say(f"{label}: {len(numbers) - 1:,} samples", options)
            elif done == len(shards) or (
                is_new and time.monotonic() - saved > _SAVED_EVERY
            ):
                so_far = IndexPack(names[:done], growing.done(), of)
                await indexed.write(stream, pack, so_far.contents())
                saved = time.monotonic()
            _show(f"{done:,} of {len(shards):,} shards", options)
    if pack is not None:
        count = f"{len(growing.done()):,} samples in {len(shards):,} shards"
        _say(f"{shown_address(pack)}: {count}", options)


async def _find(
    made_by: ByteFormat, shard: Any, before: tuple[Offsets, Version] | None = None
) -> tuple[Offsets, Version, bool]:
    """Return a shard's offsets, its version, and whether an index had the offsets.

    An index file is used if it is newer than the shard and fits the shard's end.
    """
    storage, address = made_by.storage, made_by.address(shard)
    now = await storage.version(address)
    if before is not None and now.is_marked and before[1].is_of(now):
        return *before, True
    if isinstance(made_by, MDSFormat):  # each shard starts with its own index
        return await made_by.offsets(shard), now, False
    with suppress(DatasetError):  # there is no index, or it is invalid
        index = sibling(address, index_name)
        beside = await storage.version(index)
        written = await _written(storage, address, now) or math.inf
        if (await _written(storage, index, beside) or 0) > written:
            numbers = await read_index(storage, address)
            if numbers is not None:
                end = int(numbers[-1])
                stop = max(1, min(end + 512, now.size))
                rest, _ = await storage.part(address, max(0, end - 1), stop, now)
                check_end(address, end, now.size, rest[min(end, 1) :])
                return numbers, now, True
    numbers, scanned = await indexed.scan_of(storage, address, made_by.spec(shard))
    return numbers, scanned or now, False


async def _written(
    storage: Storage, address: Address, version: Version
) -> float | None:
    """Return when a file was written or, if it is local, moved to its name."""
    path = storage.path(address)
    if path is None:
        return version.modified
    return (await in_thread(Path(path).stat)).st_ctime


def _say(line: str, options: Namespace) -> None:
    _show("", options)
    if not options.quiet:
        sys.stdout.write(f"{line}\n")


def _show(text: str, options: Namespace) -> None:
    """Replace the progress line on stderr with ``text``, if stderr is a terminal."""
    if sys.stderr.isatty() and not options.quiet:
        sys.stderr.write(f"\r{text}\x1b[K")
        sys.stderr.flush()
