"""Sources to pack: folders, lists of files, and shards of other formats.

Each source yields samples in the same order in each run, starting at a given number.
A source also describes its contents, so packing resumes only with the same samples.
"""

import asyncio
import hashlib
import itertools
import json
import operator
import os
import re
from argparse import ArgumentTypeError, Namespace
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from aioloader._order.permutation import keyed_order
from aioloader.datasets._stores.addresses import name_of, shown_address
from aioloader.datasets._stores.names import NameTable
from aioloader.datasets.decoders import FOLDER_EXTENSIONS
from aioloader.datasets.files import FileDataset
from aioloader.datasets.iterables import from_iterable
from aioloader.datasets.lines import JSONLinesDataset, TextDataset
from aioloader.datasets.named import ClassFolders, Named
from aioloader.datasets.objects import ObjectDataset
from aioloader.datasets.streams import Stream
from aioloader.datasets.tables import ParquetDataset
from aioloader.datasets.tar import TarDataset

_ROWS: dict[str, Any] = {
    "jsonl": JSONLinesDataset,
    "ndjson": JSONLinesDataset,
    "parquet": ParquetDataset,
}
_STREAMS = _ROWS | {"tar": TarDataset}
_TEXTS = _ROWS | {"txt": TextDataset}
_ENDING = re.compile(
    r"\.(jsonl|ndjson|parquet|tar|txt)(\.(gz|zst|bz2|xz))?$", re.IGNORECASE
)
# A sample's key or other entries, and its files' numbers by column or extension.
Plan: TypeAlias = tuple[dict[str, Any], dict[str, int]]


@dataclass
class PackSource:
    """Samples to pack, and what the writer needs to know about them."""

    stream: Callable[[int], Stream[Any]]  # the samples from a number on
    metadata: dict[str, Any]  # describes their origin; the writer compares it
    count: int | None = None
    fitted: Callable[[Any], Any] = dict  # turns a sample into the writer's form
    # Entered while the samples are read.
    lifespan: AbstractAsyncContextManager[Any] = field(default_factory=nullcontext)
    notes: list[str] = field(default_factory=list)  # printed for the user at the end


def find_source(options: Namespace) -> PackSource:
    src: str = options.src
    kind = find_kind(src)
    folder = src.rpartition("/")[0] or "."
    is_inside = not kind and _lies_in(options.dst, src)
    is_same = _lies_in(options.dst, folder) and _lies_in(folder, options.dst)
    if is_inside or (is_same and kind == options.format):
        dst = shown_address(options.dst)
        raise ArgumentTypeError(
            f"DST {dst} overlaps SRC: another run would pack the shards"
        )
    if kind in _STREAMS:
        return _rows(kind, options)
    dataset = _open_files(options, kind)
    if options.class_folders:
        return _labelled(dataset.class_folders(), options)
    if options.format == "tar":
        return _grouped(dataset, options)
    names = dataset.names

    def plan(number: int) -> Plan:
        return {"path": names[number]}, {"bytes": number}

    return _files(dataset, len(names), plan, options)


def find_kind(src: str) -> str:
    """Return the extension that decides how SRC is read; "" if there is none."""
    ending = re.search(_ENDING, name_of(src))
    is_folder = "://" not in src and Path(src).is_dir()
    return ending[1].lower() if ending and not is_folder else ""


def _refuse(options: Namespace, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if value is not None and value is not False:
            raise ArgumentTypeError(
                f"--{name.replace('_', '-')} applies to directories, not to "
                f"{shown_address(options.src)}"
            )


def _lies_in(inner: str, outer: str) -> bool:
    if "://" in inner or "://" in outer:
        return f"{inner.rstrip('/')}/".startswith(f"{outer.rstrip('/')}/")
    return Path(inner).resolve().is_relative_to(Path(outer).resolve())


def _open_files(options: Namespace, kind: str) -> Named:
    src: str = options.src
    if "://" in src:
        _refuse(options, "glob")
        return ObjectDataset(src, store_options=dict(options.src_option))
    if options.src_option:
        raise ArgumentTypeError(f"--src-option is for stores, and {src!r} is not one")
    path = Path(src)
    if kind == "txt" and path.is_file():
        _refuse(options, "glob")
        lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        return FileDataset(list(filter(None, lines)), root=path.parent)
    if not src or not path.is_dir():
        raise ArgumentTypeError(
            f"SRC must be a directory, a URL, a list of files (.txt) or shards "
            f"(.jsonl, .parquet, .tar), and there is no {src!r}"
        )
    return FileDataset(options.glob or "**/*", root=path)


def _files(
    dataset: Named,
    count: int,
    plan: Callable[[int], Plan],
    options: Namespace,
    read: Callable[[int], Awaitable[Any]] | None = None,
    **metadata: Any,
) -> PackSource:
    """Return a source of samples that consist of files, read several at a time.

    ``plan`` returns a sample's files. ``read`` replaces the dataset's ``__getitem__``.
    ``metadata`` is added to the description of the samples' origin.
    """
    read_file = read or dataset.__getitem__
    order: Sequence[int] = range(count)
    if options.shuffle is not None:
        order = keyed_order(count, options.shuffle, 0, 0).take(0, count).tolist()
    digest = hashlib.sha256()
    for number in order:
        digest.update(repr(plan(number)).encode("utf-8", "surrogateescape"))

    async def make(number: int) -> dict[str, Any]:
        sample, parts = plan(number)
        data = await asyncio.gather(*map(read_file, parts.values()))
        return {**sample, **dict(zip(parts, data, strict=True))}

    content = {"count": count, "digest": digest.hexdigest()[:16]}
    return PackSource(
        lambda first: from_iterable(order[first:]).map(make, concurrency=options.jobs),
        {"kind": "files", **_place_of(options.src), **content, **metadata},
        count,
        lifespan=dataset.lifespan(),
    )


def _grouped(dataset: Named, options: Namespace) -> PackSource:
    """Return a source whose samples are files with equal names up to the first dot."""
    members = []
    for number, name in enumerate(dataset.names):
        folder, slash, base = name.rpartition("/")
        stem, _, extension = base.partition(".")
        if stem and extension:
            key = f"{folder}{slash}{stem}".lstrip("/")
            members.append((key, extension, number))
    if not members:
        raise ArgumentTypeError(
            f"no file in {options.src!r} has a name with an extension, which "
            "names the member: rename the files"
        )
    members.sort()
    bare = len(dataset.names) - len(members)
    samples = [
        (key, [(extension, number) for _, extension, number in files])
        for key, files in itertools.groupby(members, operator.itemgetter(0))
    ]

    def plan(number: int) -> Plan:
        key, files = samples[number]
        parts = dict(files)
        if len(parts) < len(files):
            twice = [extension for extension, _ in files]
            raise ValueError(
                f"two files are for the same member of {key!r}: {twice}; rename one"
            )
        return {"__key__": key}, parts

    source = _files(dataset, len(samples), plan, options)
    if bare:
        source.notes.append(f"left out: {bare:,} files without an extension")
    return source


def _labelled(folders: ClassFolders, options: Namespace) -> PackSource:
    """Return a source of images, each labelled with the number of its folder."""
    names, labels = folders.names, folders.targets
    keys = NameTable(_unique_keys(names)) if options.format == "tar" else None

    def plan(number: int) -> Plan:
        name, label = names[number], labels[number]
        if keys is None:
            return {"path": name, "label": label}, {"bytes": number}
        extension = name.rpartition(".")[2].lower()
        return {"__key__": keys[number], "cls": label}, {extension: number}

    async def read(number: int) -> Any:
        return (await folders[number])[0]

    classes = folders.classes
    source = _files(folders, len(folders), plan, options, read, classes=classes)
    if options.shuffle is None and len(classes) > 1:
        source.notes.append("sorted by class: --shuffle 0 would mix them for training")
    left = len(folders.dataset) - len(folders)
    if left:
        shown = ", ".join(sorted(FOLDER_EXTENSIONS))
        source.notes.append(f"left out: {left:,} files that are not {shown}")
    return source


def _unique_keys(names: Iterable[str]) -> Iterator[str]:
    """Yield a unique key per name: the name without extension, ``_`` for other dots.

    All names in one folder must be adjacent.
    """
    keys: set[str] = set()
    last = ""
    for name in names:
        folder, slash, base = name.lstrip("/").rpartition("/")
        if folder != last:
            keys, last = set(), folder
        key = stem = base.rpartition(".")[0].replace(".", "_")
        numbers = itertools.count(2)
        while key in keys:
            key = f"{stem}-{next(numbers)}"
        keys.add(key)
        yield f"{folder}{slash}{key}"


def _rows(kind: str, options: Namespace) -> PackSource:
    """Return a source that reads shards; a resumed run rereads earlier samples."""
    _refuse(options, "class_folders", "glob", "shuffle")
    stream = _open_shards(_STREAMS[kind], options)
    metadata = {"kind": type(stream).__name__, **_origin_of(stream, options.src)}
    fitted = _row if options.format == "parquet" else _members
    return PackSource(stream.skip, metadata, fitted=fitted)


def find_texts(options: Namespace, tokenizer: Any) -> PackSource:
    """Return a source of SRC's texts as tokens; a resumed run rereads earlier texts."""
    kind = find_kind(options.src)
    if kind not in _TEXTS:
        raise ArgumentTypeError(
            "SRC must be texts (.txt, .jsonl, .parquet), one or many, as in "
            f"'texts/*.txt', got {shown_address(options.src)}"
        )
    is_lines = kind == "txt"
    if is_lines and options.column is not None:
        raise ArgumentTypeError(
            f"--column is for rows, and {shown_address(options.src)} has lines; "
            "leave it out"
        )
    column = None if is_lines else options.column or "text"
    more = {"columns": [column]} if kind == "parquet" else {}
    stream = _open_shards(_TEXTS[kind], options, **more)

    def tokens(first: int) -> Stream[Any]:
        return stream.skip(first).tokenize(tokenizer, column)

    described = stream.tokenize(tokenizer, column).describe()
    metadata = {"tokenizer": described, **_origin_of(stream, options.src)}
    return PackSource(tokens, metadata, fitted=lambda document: document)


def _open_shards(kind: Any, options: Namespace, **more: Any) -> Stream[Any]:
    src: str = options.src
    is_one = "://" not in src and not any(sign in src for sign in "*?[{")
    if is_one and not Path(src).exists():
        raise ArgumentTypeError(f"there is no file {src!r}")
    stream: Stream[Any] = kind(
        src, store_options=dict(options.src_option) or None, **more
    )
    return stream


def _origin_of(stream: Any, src: str) -> dict[str, Any]:
    """Return what identifies SRC: its location and a summary of its shards."""

    async def listed() -> Any:
        async with AsyncExitStack() as stack:
            return stream.made_by.summary(await stream.made_by.shards(stack, None))

    return {**_place_of(src), "shards": asyncio.run(listed())}


def _place_of(src: str) -> dict[str, str]:
    """Return SRC's name and a digest of its location, as the path may be private."""
    whole = shown_address(src) if "://" in src else str(Path(src).resolve())
    digest = hashlib.sha256(whole.encode("utf-8", "surrogateescape")).hexdigest()
    name = src.partition("?")[0].rpartition(os.sep)[2].rpartition("/")[2]
    return {"name": name, "place": digest[:16]}


def _row(sample: Any) -> dict[str, Any]:
    if not isinstance(sample, dict):
        raise TypeError(
            f"rows are dicts of columns, and SRC has {type(sample).__name__}: "
            f"{str(sample)[:40]!r}"
        )
    return {name: value for name, value in sample.items() if name != "__url__"}


def _members(sample: Any) -> dict[str, Any]:
    """Return a row as tar members: one per bytes column, a JSON of other columns."""
    if isinstance(sample, dict) and "__url__" in sample:
        return sample  # from a tar
    members: dict[str, Any] = {}
    rest: Any = sample
    if isinstance(sample, dict):
        rest = {}
        for name, value in sample.items():
            is_key = name == "__key__" and isinstance(value, str)
            kept = members if is_key or isinstance(value, bytes) else rest
            kept[name] = value
    if rest or not members.keys() - {"__key__"}:
        members["json"] = json.dumps(rest, ensure_ascii=False, default=_plain)
    return members


def _plain(value: Any) -> Any:
    """Return a NumPy number or array as Python numbers and lists, for JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(
        f"a {type(value).__name__} cannot be stored as JSON: --format parquet keeps it"
    )
