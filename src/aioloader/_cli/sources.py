"""Sources to pack: folders, lists of files, and shards of other formats.

Each yields samples from a given number on, in the same order in each run, and describes
its contents, so that packing resumes only with the same ones.
"""

import abc
import argparse
import array
import asyncio
import hashlib
import json
import os
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from torch.utils.data import Dataset

from aioloader._cli.usage import UsageError
from aioloader._loader.loader import DataLoader
from aioloader._order.permutation import keyed_order
from aioloader.datasets._decode import FOLDER_EXTENSIONS
from aioloader.datasets._stores.addresses import shown_address
from aioloader.datasets._stores.names import NameTable
from aioloader.datasets.files import FileDataset
from aioloader.datasets.lines import JSONLinesDataset
from aioloader.datasets.named import ClassFolders, Named
from aioloader.datasets.objects import ObjectDataset
from aioloader.datasets.streams import Stream
from aioloader.datasets.tables import ParquetDataset
from aioloader.datasets.tar import TarDataset

_STREAMS: dict[str, Any] = {
    "jsonl": JSONLinesDataset,
    "ndjson": JSONLinesDataset,
    "parquet": ParquetDataset,
    "tar": TarDataset,
}
_PACKED = (".gz", ".zst", ".bz2", ".xz")
# The key of a sample, and its files: column or extension to index.
Plan: TypeAlias = tuple[dict[str, Any], dict[str, int]]


class Source(abc.ABC):
    """Samples to pack.

    Attributes:
        count: Number of samples, or None.
        metadata: Their origin, for the writer.
        notes: Messages for the user at the end.
    """

    count: int | None = None

    def __init__(self, metadata: dict[str, Any]) -> None:
        self.metadata = metadata
        self.notes: list[str] = []

    @abc.abstractmethod
    def samples(self, first: int) -> AsyncGenerator[dict[str, Any], None]:
        """Return the samples, starting at number ``first``."""


def find_source(options: argparse.Namespace) -> Source:
    """Return the source that SRC names.

    Raises:
        UsageError: If it does not exist, or options do not fit it.
        ValueError: If it is empty, or a store's options are wrong.
    """
    src: str = options.src
    kind = _kind_of(src)
    folder = src.rpartition("/")[0] or "."
    is_inside = not kind and _lies_in(options.dst, src)
    is_same = _lies_in(options.dst, folder) and _lies_in(folder, options.dst)
    if is_inside or (is_same and kind == options.format):
        raise UsageError(
            f"DST {shown_address(options.dst)} overlaps SRC: another run would "
            f"pack the shards"
        )
    if kind in _STREAMS:
        _refuse(options, "class_folders", "glob", "shuffle")
        is_table = options.format == "parquet"
        return _Rows(_open_stream(_STREAMS[kind], options), src, is_table=is_table)
    dataset = _open_files(options, kind)
    if options.class_folders:
        return _Labelled(dataset.class_folders(), options)
    kind_of_files = _FileMembers if options.format == "tar" else _FileRows
    return kind_of_files(dataset, options)


def _kind_of(src: str) -> str:
    """Return the ending that decides how SRC is read; empty for folders."""
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
                f"--{name.replace('_', '-')} applies to directories, not to "
                f"{shown_address(options.src)}"
            )


def _open_stream(kind: Any, options: argparse.Namespace) -> Stream[Any]:
    src = options.src
    is_local = "://" not in src
    if is_local and not any(sign in src for sign in "*?[{") and not Path(src).exists():
        raise UsageError(f"there is no file {src!r}")
    stream: Stream[Any] = kind(src, store_options=dict(options.src_option) or None)
    return stream


def _open_files(options: argparse.Namespace, kind: str) -> Named:
    """Return the files of SRC."""
    src: str = options.src
    if "://" in src:
        _refuse(options, "glob")
        return ObjectDataset(src, store_options=dict(options.src_option))
    if options.src_option:
        raise UsageError(f"--src-option is for stores, and {src!r} is not one")
    path = Path(src)
    if kind == "txt" and path.is_file():
        _refuse(options, "glob")
        lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        return FileDataset(list(filter(None, lines)), root=path.parent)
    if not path.is_dir():
        raise UsageError(
            f"SRC must be a directory, a URL, a list of files (.txt) or shards "
            f"(.jsonl, .parquet, .tar), and there is no {src!r}"
        )
    return FileDataset(options.glob or "**/*", root=path)


def _lies_in(inner: str, outer: str) -> bool:
    if "://" in inner or "://" in outer:
        return f"{inner.rstrip('/')}/".startswith(f"{outer.rstrip('/')}/")
    return Path(inner).resolve().is_relative_to(Path(outer).resolve())


# -- files ------------------------------------------------------------------------


class _Folder(Source, Dataset[Any]):
    """Files of a directory, a store or a list, several read at a time.

    Args:
        dataset: The files.
        count: How many samples there are.
        options: The arguments.
        metadata: The samples' origin, besides the names of the files.
    """

    def __init__(
        self, dataset: Named, count: int, options: argparse.Namespace, **metadata: Any
    ) -> None:
        self._dataset, self._jobs = dataset, options.jobs
        self._order: Sequence[int] = range(count)
        if options.shuffle is not None:
            order = keyed_order(count, options.shuffle, 0, 0)
            self._order = order.take(0, count).tolist()
        digest = hashlib.sha256()
        for number in self._order:
            digest.update(repr(self.plan(number)).encode("utf-8", "surrogateescape"))
        content = {"count": count, "digest": digest.hexdigest()[:16]}
        super().__init__({"kind": "files", **content, **metadata})
        self.count = count

    @abc.abstractmethod
    def plan(self, number: int) -> Plan:
        """Return the plan of one sample."""

    async def __getitem__(self, number: int) -> dict[str, Any]:
        sample, parts = self.plan(self._order[number])
        data = await asyncio.gather(*(self._dataset[at] for at in parts.values()))
        return {**sample, **dict(zip(parts, data, strict=True))}

    def __len__(self) -> int:
        return len(self._order)

    def lifespan(self) -> Any:
        """Return the lifespan of the files."""
        return self._dataset.lifespan()

    async def samples(self, first: int) -> AsyncGenerator[dict[str, Any], None]:
        """Read the samples, in their order."""
        loader: Any = DataLoader(
            self,
            batch_size=None,
            sampler=range(first, len(self)),
            collate_fn=_same,
            concurrency=self._jobs,
            lifespan=_Folder.lifespan,
        )
        try:
            async for sample in loader:
                yield sample
        finally:
            await loader.aclose()


def _same(sample: Any) -> Any:
    return sample


class _FileRows(_Folder):
    """A row for each file."""

    def __init__(self, dataset: Named, options: argparse.Namespace) -> None:
        self._names = dataset.names
        super().__init__(dataset, len(self._names), options)

    def plan(self, number: int) -> Plan:
        """Return path and file."""
        return {"path": self._names[number]}, {"bytes": number}


class _FileMembers(_Folder):
    """Files whose names are equal up to the first dot: the members of a sample."""

    def __init__(self, dataset: Named, options: argparse.Namespace) -> None:
        found = []
        for at, name in enumerate(dataset.names):
            folder, slash, base = name.rpartition("/")
            stem, _, extension = base.partition(".")
            if stem and extension:
                found.append((f"{folder}{slash}{stem}".lstrip("/"), extension, at))
        if not found:
            raise UsageError(f"no file in {options.src!r} has a name with an extension")
        found.sort()
        self._extensions = NameTable(extension for _, extension, _ in found)
        self._files = array.array("Q", (at for *_, at in found))
        groups = {key: start for start, (key, *_) in reversed([*enumerate(found)])}
        self._keys = NameTable(reversed(groups))
        self._starts = array.array("Q", [*reversed(groups.values()), len(found)])
        super().__init__(dataset, len(groups), options)
        bare = len(dataset.names) - len(found)
        if bare:
            self.notes = [f"left out: {bare:,} files without an extension"]

    def plan(self, number: int) -> Plan:
        """Return key and members."""
        members = range(self._starts[number], self._starts[number + 1])
        parts = {self._extensions[at]: self._files[at] for at in members}
        if len(parts) < len(members):
            twice = [self._extensions[at] for at in members]
            raise ValueError(
                f"two files are for the same member of {self._keys[number]!r}: {twice}"
            )
        return {"__key__": self._keys[number]}, parts


class _Labelled(_Folder):
    """Pictures with the number of their folder, as members or as rows."""

    def __init__(self, found: ClassFolders, options: argparse.Namespace) -> None:
        self._names, self._labels = found.names, found.targets
        self._keys: NameTable | None = None
        if options.format == "tar":
            self._keys = NameTable(_unlike(found.names))
        files = _Pictures(found)
        super().__init__(files, len(found), options, classes=found.classes)
        if options.shuffle is None and len(found.classes) > 1:
            self.notes = ["sorted by class: --shuffle 0 would mix them for training"]
        left = len(found.dataset) - len(found)
        if left:
            shown = ", ".join(sorted(FOLDER_EXTENSIONS))
            self.notes += [f"left out: {left:,} files that are not {shown}"]

    def plan(self, number: int) -> Plan:
        """Return key or path, label and file."""
        name, label = self._names[number], self._labels[number]
        if self._keys is None:
            return {"path": name, "label": label}, {"bytes": number}
        extension = name.rpartition(".")[2].lower()
        return {"__key__": self._keys[number], "cls": label}, {extension: number}


class _Pictures(Named):
    """The samples of class folders without their labels."""

    def __init__(self, folders: ClassFolders) -> None:
        self._folders = folders

    @property
    def names(self) -> NameTable:
        """The names by index."""
        return self._folders.names

    async def __getitem__(self, index: Any) -> Any:
        """Read one file."""
        return (await self._folders[index])[0]

    def lifespan(self) -> Any:
        """Return the lifespan of the files."""
        return self._folders.lifespan()


def _unlike(names: Iterable[str]) -> Iterator[str]:
    """Yield a unique key for each name, without ending and dots.

    Names of one folder must be adjacent.
    """
    keys: set[str] = set()
    last = ""
    for name in names:
        folder, slash, base = name.lstrip("/").rpartition("/")
        if folder != last:
            keys, last = set(), folder
        stem = base.rpartition(".")[0].replace(".", "_")
        key, number = stem, 1
        while key in keys:
            number += 1
            key = f"{stem}-{number}"
        keys.add(key)
        yield f"{folder}{slash}{key}"


# -- shards of other formats ------------------------------------------------------


class _Rows(Source):
    """The samples of a stream; samples before the first one are read again.

    Args:
        stream: The stream.
        src: The SRC argument.
        is_table: Whether samples become rows, not members of a tar.
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
    """Return a row as members: bytes under their column, everything else as JSON."""
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
    """Return a NumPy number or array in a form that JSON has."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(
        f"a {type(value).__name__} cannot be stored as JSON: --format parquet keeps it"
    )
