"""Map-style datasets of named bytes, plain, decoded, or labeled by folder.

``DecodedDataset`` and ``ClassFolders`` wrap another dataset. They support several event
loops, and pickling, if that dataset does.
"""

import abc
import copy
from collections.abc import Collection, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar, Self, SupportsIndex

import numpy as np
from torch.utils.data import Dataset

from aioloader._base.cancellation import in_thread
from aioloader.datasets._stores.names import NameTable
from aioloader.datasets.decoders import FOLDER_EXTENSIONS, Decoder, DecoderSpec
from aioloader.protocols import HasLifespan


class Named(HasLifespan):
    """Base class of map-style datasets whose samples have names like paths."""

    # Without this, `for x in dataset` never ends: only awaiting raises IndexError.
    __iter__: ClassVar[None] = None
    _names: NameTable

    @property
    def names(self) -> NameTable:
        """The samples' names, in order."""
        return self._names

    def __len__(self) -> int:
        return len(self.names)

    @abc.abstractmethod
    def __getitem__(self, index: SupportsIndex) -> Coroutine[Any, Any, Any]:
        """Return a coroutine that reads one sample."""

    def decode(self, *specs: DecoderSpec) -> "Named":
        """Return the dataset with its bytes decoded by the extensions of the names.

        Decoding runs in threads, for all samples that the loader reads concurrently. To
        decode in worker processes, use the loader's ``transform=Decoder("torch")``.

        Args:
            specs: As for ``Decoder``: ``"pil"``, ``"torch"``...

        Raises:
            ValueError: If a word is unknown.
            ImportError: If images need Pillow, and it is not installed.
        """
        return DecodedDataset(self, Decoder(*specs))

    def class_folders(
        self,
        root: str = "",
        *,
        classes: Sequence[str] | None = None,
        extensions: Iterable[str] = FOLDER_EXTENSIONS,
    ) -> "ClassFolders":
        """Return the dataset with labels by folder, like torchvision's ``ImageFolder``.

        For a ``FileDataset``, this call lists folders, which blocks.

        Args:
            root: Folder that contains one folder per class; names must start with it.
            classes: The classes, in the order of their labels. Default: the folders,
                sorted. For a validation set, pass the training set's classes.
            extensions: Extensions of files to include. Default: torchvision's (not
                ``gif``). Empty: all files.

        Raises:
            ValueError: If no file is included, if a file is in no known class folder,
                or if, without ``classes``, a class folder has no file to include.
        """
        return ClassFolders(self, root, classes=classes, extensions=extensions)

    def folders(self, root: str) -> list[str]:  # noqa: ARG002  (stores have none)
        """Return the folders in ``root``, including empty ones; [] for a store."""
        return []


class DecodedDataset(Dataset[Coroutine[Any, Any, Any]], Named):
    """Decodes the samples of a dataset of bytes, in threads."""

    def __init__(self, dataset: Named, decoder: Decoder) -> None:
        self.dataset = dataset
        self.decoder = decoder
        self._names = dataset.names

    async def __getitem__(self, index: SupportsIndex) -> Any:
        """Read and decode one sample.

        Raises:
            DecodeError: If the bytes do not match the name's extension.
            DatasetError: If the bytes cannot be read.
        """
        data = await self.dataset[index]
        name = self.names[index]
        extension = name.rpartition("/")[2].partition(".")[2]  # as in a tar
        return await in_thread(self.decoder.decode, data, extension, name)

    def lifespan(self) -> AbstractAsyncContextManager[Any]:
        """Return the lifespan of the wrapped dataset."""
        return self.dataset.lifespan()

    def folders(self, root: str) -> list[str]:
        """Return the folders in ``root`` of the wrapped dataset."""
        return self.dataset.folders(root)

    def __repr__(self) -> str:
        return f"{self.dataset!r}.decode({', '.join(map(repr, self.decoder.specs))})"


class ClassFolders(Dataset[Coroutine[Any, Any, "tuple[Any, int]"]], Named):
    """A dataset of ``(sample, label)`` pairs, labeled by folder.

    The order is torchvision's: by class, folder and name. Memory holds a second copy of
    the names, and 16 bytes per sample.

    Args:
        dataset: The dataset of files or objects.
        root: As for ``Named.class_folders``.
        classes: As for ``Named.class_folders``.
        extensions: As for ``Named.class_folders``.

    Attributes:
        classes: Names of the classes, by label.
        class_to_idx: Label of each class.
        targets: Label of each sample.

    Raises:
        ValueError: As for ``Named.class_folders``.

    Example:
        >>> from aioloader.datasets import FileDataset
        >>> found = FileDataset(["cat/1.png", "dog/1.png", "cat/2.png"]).class_folders()
        >>> found.classes, found.targets
        (['cat', 'dog'], [0, 0, 1])
    """

    def __init__(
        self,
        dataset: Named,
        root: str = "",
        *,
        classes: Sequence[str] | None = None,
        extensions: Iterable[str] = FOLDER_EXTENSIONS,
    ) -> None:
        self.dataset = dataset
        endings = {extension.lower().lstrip(".") for extension in extensions}
        start = f"{root.rstrip('/')}/" if root else ""
        files = _find_labels(dataset.names, start, endings)
        folders = {folder for folder, *_ in files}
        if classes is None:
            if empty := sorted({*dataset.folders(root)} - folders):
                raise ValueError(
                    f"no file with an extension of {', '.join(sorted(endings))} in the "
                    f"class folders {', '.join(map(repr, empty))}: without them other "
                    f"classes would have other labels; remove the folders, or pass "
                    f"classes"
                )
            classes = sorted(folders)
        self.classes: list[str] = list(classes)
        self.class_to_idx: dict[str, int] = {
            name: label for label, name in enumerate(self.classes)
        }
        if unknown := sorted(folders - self.class_to_idx.keys()):
            raise ValueError(
                f"files are in folders of no class: {', '.join(map(repr, unknown))}; "
                f"there are {len(self.class_to_idx)} classes: "
                f"{', '.join(map(repr, self.class_to_idx))}"
            )
        self.targets: list[int] = [self.class_to_idx[folder] for folder, *_ in files]
        self._order = np.array([position for *_, position in files], np.int64)
        self._names = NameTable(dataset.names[position] for *_, position in files)

    @property
    def samples(self) -> list[tuple[str, int]]:
        """Each sample's name and label; a new list at each access."""
        return list(zip(self._names, self.targets, strict=True))

    async def __getitem__(self, index: SupportsIndex) -> tuple[Any, int]:
        """Read one sample.

        Returns:
            The dataset's sample, and the label.

        Raises:
            IndexError: If ``index`` is out of range.
            DatasetError: If the sample cannot be read.
        """
        position = self._names.position(index)
        return await self.dataset[int(self._order[position])], self.targets[position]

    def decode(self, *specs: DecoderSpec) -> Self:
        """Return the dataset with its samples decoded, as by ``Named.decode``."""
        clone = copy.copy(self)
        clone.dataset = self.dataset.decode(*specs)
        return clone

    def lifespan(self) -> AbstractAsyncContextManager[Any]:
        """Return the lifespan of the wrapped dataset."""
        return self.dataset.lifespan()

    def __repr__(self) -> str:
        count = len(self.classes)
        return f"{self.dataset!r}.class_folders() of {len(self):,} in {count} classes"


def _find_labels(
    names: NameTable, start: str, extensions: Collection[str]
) -> list[tuple[str, str, str, int]]:
    """Return class, folder, base name and index of each included file, sorted."""
    files: list[tuple[str, str, str, int]] = []
    for index, name in enumerate(names):
        folder, _, base = name.rpartition("/")
        if extensions and base.rpartition(".")[2].lower() not in extensions:
            continue
        label, slash, _ = name.removeprefix(start).partition("/")
        if not name.startswith(start) or not slash or not label:
            raise ValueError(
                f"{name!r} is in no class folder of {start or 'the dataset'}: move it, "
                f"list only files in folders ('*/**/*'), or pass the folder that "
                f"has the class folders as root"
            )
        files.append((label, folder, base, index))
    if not files:
        shown = ", ".join(sorted(extensions))
        raise ValueError(
            f"none of {len(names):,} files has an extension of {shown}: pass others"
        )
    files.sort()
    return files
