"""What can be packed: folders, lists of files, and shards of other formats.

Each gives samples from a number on, in an order that is the same in each run, and says
what it is made of, so that packing goes on only with the same.
"""

import abc
import argparse
import asyncio
import hashlib
import json
import os
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from aioloader._cli.usage import UsageError
from aioloader._loader.loader import DataLoader
from aioloader.datasets._decode.pictures import FOLDER_EXTENSIONS
from aioloader.datasets._stores.places import shown_address
from aioloader.datasets.files import FileDataset
from aioloader.datasets.lines import JSONLinesDataset
from aioloader.datasets.named import ClassFolders, Named
from aioloader.datasets.objects import ObjectDataset
from aioloader.datasets.streams import Stream, keyed_order
from aioloader.datasets.tables import ParquetDataset
from aioloader.datasets.tar import TarDataset

_STREAMS: dict[str, Any] = {
    "jsonl": JSONLinesDataset,
    "ndjson": JSONLinesDataset,
    "parquet": ParquetDataset,
    "tar": TarDataset,
}
_PACKED = (".gz", ".zst")


class Source(abc.ABC):
    """Samples to pack.

    Attributes:
        count: How many there are, or None.
        metadata: What they are made of, for the writer.
        notes: What the user should know in the end.
    """

    count: int | None = None

    def __init__(self, metadata: dict[str, Any]) -> None:
        self.metadata = metadata
        self.notes: list[str] = []

    @abc.abstractmethod
    def samples(self, first: int) -> AsyncGenerator[dict[str, Any], None]:
        """Return the samples from number ``first`` on."""


def find_source(options: argparse.Namespace) -> Source:
    """Return what SRC names.

    Raises:
        UsageError: If there is no such thing, or options do not fit it.
        ValueError: If it is empty, or a store's options are wrong.
    """
    src: str = options.src
    kind = _kind_of(src)
    folder = src.rpartition("/")[0] or "."
    is_inside = not kind and _lies_in(options.dst, src)
    is_beside = _lies_in(options.dst, folder) and _lies_in(folder, options.dst)
    if is_inside or (is_beside and kind == options.format):
        raise UsageError(
            f"DST {shown_address(options.dst)} lies where SRC is: another run would "
            f"pack the shards"
        )
    if kind in _STREAMS:
        _refuse(options, "class_folders", "glob", "shuffle")
        is_table = options.format == "parquet"
        return _Rows(_open_stream(_STREAMS[kind], options), src, is_table=is_table)
    dataset, root = _open_files(options, kind)
    if options.class_folders:
        return _Labelled(dataset.class_folders(root), options)
    return _Files(dataset, options)


def _kind_of(src: str) -> str:
    """Return the ending that tells how SRC is read; empty for folders."""
    if "://" not in src and Path(src).is_dir():
        return ""
    name = src.partition("?")[0].lower()
    for packed in _PACKED:
        name = name.removesuffix(packed)
    ending = name.rpartition("/")[2].rpartition(".")[2]
    return ending if ending in {*_STREAMS, "txt"} else ""


def _refuse(options: argparse.Namespace, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if value is not None and value is not False:
            raise UsageError(
                f"--{name.replace('_', '-')} is for directories, not for "
                f"{shown_address(options.src)}"
            )


def _open_stream(kind: Any, options: argparse.Namespace) -> Stream[Any]:
    src = options.src
    is_local = "://" not in src
    if is_local and not any(sign in src for sign in "*?[{") and not Path(src).exists():
        raise UsageError(f"there is no file {src!r}")
    stream: Stream[Any] = kind(src, store_options=dict(options.src_option) or None)
    return stream


def _open_files(options: argparse.Namespace, kind: str) -> tuple[Named, str]:
    """Return the files of SRC, and the folder that class folders would be in."""
    src: str = options.src
    if "://" in src:
        _refuse(options, "glob")
        return ObjectDataset(src, store_options=dict(options.src_option)), ""
    if options.src_option:
        raise UsageError(f"--src-option is for stores, and {src!r} is none")
    path = Path(src)
    if kind == "txt" and path.is_file():
        _refuse(options, "glob")
        lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        return FileDataset(list(filter(None, lines)), root=path.parent), ""
    if not path.is_dir():
        raise UsageError(
            f"SRC must be a directory, a URL, a list of files (.txt) or shards "
            f"(.jsonl, .parquet, .tar), and there is no {src!r}"
        )
    return FileDataset(options.glob or "**/*", root=path), ""


def _lies_in(inner: str, outer: str) -> bool:
    if "://" in inner or "://" in outer:
        return f"{inner.rstrip('/')}/".startswith(f"{outer.rstrip('/')}/")
    return Path(inner).resolve().is_relative_to(Path(outer).resolve())


# -- files ------------------------------------------------------------------------


class _Read(Dataset[Any]):
    """Samples that are made of one or more files each.

    Args:
        dataset: The files.
        parts: Of each sample: index and column of its files.
        fixed: Of each sample: what it has besides.
    """

    def __init__(
        self,
        dataset: Named,
        parts: list[list[tuple[int, str]]],
        fixed: list[dict[str, Any]],
    ) -> None:
        self.dataset, self.parts, self.fixed = dataset, parts, fixed

    def __len__(self) -> int:
        return len(self.parts)

    async def __getitem__(self, number: int) -> dict[str, Any]:
        parts = self.parts[number]
        data = await asyncio.gather(*(self.dataset[index] for index, _ in parts))
        names = (name for _, name in parts)
        return {**self.fixed[number], **dict(zip(names, data, strict=True))}


class _Folder(Source):
    """Files of a directory, a store or a list, several read at a time.

    Args:
        read: The samples.
        options: The arguments.
        metadata: What the samples are made of, besides the names of the files.
    """

    def __init__(
        self, read: _Read, options: argparse.Namespace, **metadata: Any
    ) -> None:
        if options.shuffle is not None:
            order = keyed_order(len(read), options.shuffle, 0, 0)
            read.parts = [read.parts[at] for at in order]
            read.fixed = [read.fixed[at] for at in order]
        digest = hashlib.sha256()
        for parts, fixed in zip(read.parts, read.fixed, strict=True):
            digest.update(repr((parts, fixed)).encode("utf-8", "surrogateescape"))
        super().__init__(
            {
                "kind": "files",
                "count": len(read),
                "digest": digest.hexdigest()[:16],
                **metadata,
            }
        )
        self.count = len(read)
        self._read, self._jobs = read, options.jobs

    async def samples(self, first: int) -> AsyncGenerator[dict[str, Any], None]:
        """Read the samples, in their order."""
        loader: Any = DataLoader(
            self._read,
            batch_size=None,
            sampler=range(first, len(self._read)),
            collate_fn=_same,
            concurrency=self._jobs,
            lifespan=_lifespan,
        )
        try:
            async for sample in loader:
                yield sample
        finally:
            await loader.aclose()


def _same(sample: Any) -> Any:
    return sample


def _lifespan(read: _Read) -> Any:
    return read.dataset.lifespan()


class _Files(_Folder):
    """Files by their names: for tars grouped to samples as readers group members."""

    def __init__(self, dataset: Named, options: argparse.Namespace) -> None:
        if options.format == "parquet":
            parts = [[(at, "bytes")] for at in range(len(dataset))]
            fixed: list[dict[str, Any]] = [{"path": name} for name in dataset.names]
            super().__init__(_Read(dataset, parts, fixed), options)
            return
        groups: dict[str, list[tuple[int, str]]] = {}
        bare = 0
        for at, name in enumerate(dataset.names):
            folder, slash, base = name.rpartition("/")
            stem, dot, extension = base.partition(".")
            if stem and dot and extension:
                key = f"{folder}{slash}{stem}".lstrip("/")
                groups.setdefault(key, []).append((at, extension))
            else:
                bare += 1
        if not groups:
            raise UsageError(f"no file in {options.src!r} has a name with an extension")
        keys = sorted(groups)
        fixed = [{"__key__": key} for key in keys]
        super().__init__(_Read(dataset, [groups[k] for k in keys], fixed), options)
        if bare:
            self.notes = [f"left out: {bare:,} files without an extension"]


class _Labelled(_Folder):
    """Pictures with the number of their folder."""

    def __init__(self, found: ClassFolders, options: argparse.Namespace) -> None:
        samples = found.samples
        if options.format == "parquet":
            parts = [[(at, "bytes")] for at in range(len(samples))]
            fixed = [{"path": name, "label": label} for name, label in samples]
        else:
            extensions = (name.rpartition(".")[2].lower() for name, _ in samples)
            parts = [[(at, extension)] for at, extension in enumerate(extensions)]
            keys = _unlike(name for name, _ in samples)
            labels = (label for _, label in samples)
            fixed = [
                {"__key__": k, "cls": label}
                for k, label in zip(keys, labels, strict=True)
            ]
        dataset = _Bytes(found)
        super().__init__(_Read(dataset, parts, fixed), options, classes=found.classes)
        if options.shuffle is None and len(found.classes) > 1:
            self.notes = ["sorted by class: --shuffle 0 would mix them for training"]
        left = len(found.dataset) - len(found)
        if left:
            shown = ", ".join(sorted(FOLDER_EXTENSIONS))
            self.notes += [f"left out: {left:,} files that are not {shown}"]


class _Bytes(Named):
    """The samples of class folders without their labels."""

    def __init__(self, folders: ClassFolders) -> None:
        self._folders = folders

    @property
    def names(self) -> Any:
        """The names by index."""
        return self._folders.names

    async def __getitem__(self, index: Any) -> Any:
        """Read one file."""
        return (await self._folders[index])[0]

    def lifespan(self) -> Any:
        """Return that of the files."""
        return self._folders.lifespan()


def _unlike(names: Iterable[str]) -> list[str]:
    """Return a key for each name: without ending and dots, and no two alike."""
    keys: dict[str, None] = {}
    for name in names:
        folder, slash, base = name.lstrip("/").rpartition("/")
        stem = base.rpartition(".")[0].replace(".", "_")
        key, number = f"{folder}{slash}{stem}", 1
        while key in keys:
            number += 1
            key = f"{folder}{slash}{stem}-{number}"
        keys[key] = None
    return list(keys)


# -- shards of other formats ------------------------------------------------------


class _Rows(Source):
    """The samples of a stream; those before the first are read again.

    Args:
        stream: The stream.
        src: What was given for it.
        is_table: Whether they are to be rows, not members of a tar.
    """

    def __init__(self, stream: Stream[Any], src: str, *, is_table: bool) -> None:
        name = src.partition("?")[0].rpartition(os.sep)[2].rpartition("/")[2]
        super().__init__({"kind": type(stream).__name__, "name": name})
        self._stream, self._is_table = stream, is_table

    async def samples(self, first: int) -> AsyncGenerator[dict[str, Any], None]:
        """Read the samples, in their order."""
        iterator = aiter(self._stream.skip(first))
        try:
            async for sample in iterator:
                yield _row(sample) if self._is_table else _members(sample)
        finally:
            await iterator.aclose()


def _row(sample: Any) -> dict[str, Any]:
    if not isinstance(sample, dict):
        raise TypeError(
            f"rows are dicts of columns, and SRC has {type(sample).__name__}: "
            f"{str(sample)[:40]!r}"
        )
    return {name: value for name, value in sample.items() if name != "__url__"}


def _members(sample: Any) -> dict[str, Any]:
    """Return a row as members: bytes under their column, all else as JSON."""
    if isinstance(sample, dict) and "__url__" in sample:
        return sample  # of a tar
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
    """Return a number or an array of NumPy as JSON has it."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(
        f"a {type(value).__name__} has no form in JSON: --format parquet keeps it"
    )
