"""Labels by folder, as torchvision's ``ImageFolder`` gives them."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from obstore.store import LocalStore

from aioloader import DataLoader
from aioloader.datasets import FileDataset, ObjectDataset
from aioloader.errors import DecodeError
from aioloader.testing import check_dataset
from datasets.pictures import TREE, write_tree

# What torchvision 0.28 says of the tree: ``classes``, and ``samples`` below the root.
CLASSES = ["cat", "cat-b", "dog"]
SAMPLES = [
    ("cat/b.png", 0),
    ("cat/z.v2.PNG", 0),
    ("cat/more/a.png", 0),
    ("cat-b/1.png", 1),
    ("dog/10.png", 2),
    ("dog/2.jpeg", 2),
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return write_tree(tmp_path)


@pytest.fixture(params=["files", "store", "root", "absolute"])
def folders(request: pytest.FixtureRequest, tree: Path) -> Any:
    if request.param == "store":
        return ObjectDataset(LocalStore(tree)).class_folders(), ""
    if request.param == "root":
        above = FileDataset(f"{tree.name}/**/*", root=tree.parent)
        return above.class_folders(tree.name), f"{tree.name}/"
    if request.param == "absolute":
        return FileDataset(f"{tree}/**/*").class_folders(str(tree)), f"{tree}/"
    return FileDataset("**/*", root=tree).class_folders(), ""


async def test_as_torchvision_has_them(folders: Any) -> None:
    dataset, start = folders
    assert dataset.classes == CLASSES
    assert dataset.class_to_idx == {name: at for at, name in enumerate(CLASSES)}
    assert dataset.samples == [(start + name, label) for name, label in SAMPLES]
    assert dataset.targets == [label for _, label in SAMPLES]
    assert len(dataset) == len(SAMPLES)
    async with dataset.lifespan():
        data, label = await dataset[-1]
    assert (bytes(data[:2]), label) == (b"\xff\xd8", 2)
    with pytest.raises(IndexError, match="for 6 samples"):
        await dataset[6]


async def test_decoded(folders: Any) -> None:
    dataset = folders[0].decode("torchrgb8")
    assert dataset.classes == CLASSES
    loader: Any = DataLoader(dataset, batch_size=6, concurrency=4)
    ((images, labels),) = [batch async for batch in loader]
    assert labels.tolist() == [label for _, label in SAMPLES]
    expected = [40 * (TREE[name] or 0) for name, _ in SAMPLES]
    assert images[:, 0, 0, 0].tolist() == pytest.approx(expected, abs=2)  # a JPEG
    again = pickle.loads(pickle.dumps(dataset))
    assert torch.equal((await again[0])[0], images[0])


@pytest.mark.slow
def test_decoded_where_workers_read(tree: Path) -> None:
    (tree / "dog" / "10.png").write_bytes(b"damaged")
    dataset = FileDataset("**/*", root=tree).class_folders().decode("torch")
    options: Any = {"batch_size": 5, "num_workers": 1, "fetch": "workers"}
    loader: Any = DataLoader(dataset, on_error="skip", **options)
    with loader:
        batches = list(loader)
    assert torch.cat([labels for _, labels in batches]).tolist() == [0, 0, 0, 1, 2]
    loader = DataLoader(dataset, **options)
    with loader, pytest.raises(DecodeError, match=r"'png' of sample 'dog/10\.png'"):
        list(loader)


def test_the_laws_hold(tree: Path) -> None:
    (tree / "dog" / "2.jpeg").rename(tree / "dog" / "2.png")
    check_dataset(FileDataset("**/*.png", root=tree).decode("torch"))
    check_dataset(FileDataset("**/*", root=tree).class_folders().decode("torch"))


def test_labels_of_another_set(tree: Path) -> None:
    """The classes of the training set, where a folder is missing or one too many."""
    files = FileDataset("*/**/*", root=tree)
    found = files.class_folders(classes=["ant", *CLASSES])
    assert found.targets == [label + 1 for _, label in SAMPLES]
    assert found.class_to_idx["dog"] == 3
    with pytest.raises(ValueError, match="of no class: 'cat-b'; there are 2 classes"):
        files.class_folders(classes=["dog", "cat"])


def test_what_would_shift_labels(tree: Path) -> None:
    """A class without a picture, unseen in a listing, is an error as in torchvision."""
    (tree / "bee").mkdir()
    (tree / "bee" / "notes.txt").write_text("none yet")
    (tree / ".cache").mkdir()
    files = FileDataset("**/*", root=tree)
    with pytest.raises(ValueError, match="class folders 'bee': without them other"):
        files.class_folders()
    with pytest.raises(ValueError, match="class folders 'bee'"):
        files.decode("pil").class_folders()
    every = FileDataset("*/**/*", root=tree).class_folders(extensions=())
    assert every.classes == ["bee", *CLASSES]
    chosen = FileDataset("cat*/**/*", root=tree)
    assert chosen.class_folders().classes == ["cat", "cat-b"]


@pytest.mark.parametrize(
    ("pattern", "root", "words"),
    [
        ("**/*", "", r"'stray.png' is in no class folder"),
        ("*/**/*", "cats", r"is in no class folder of cats/"),
        ("*.md", "", "none of 1 files has an extension of bmp, jpeg"),
    ],
)
def test_what_is_in_no_class(tree: Path, pattern: str, root: str, words: str) -> None:
    (tree / "stray.png").write_bytes(b"")
    with pytest.raises(ValueError, match=words):
        FileDataset(pattern, root=tree).class_folders(root)


def test_a_list_of_names_without_files() -> None:
    """Nothing is looked up: the names say all; no label costs an object."""
    names = [f"{at % 300:03d}/{at}.png" for at in range(900)]
    found = FileDataset(names).class_folders()
    assert len(found.classes) == 300
    assert found.targets == sorted(np.arange(900) % 300)
    assert len({id(label) for label in found.targets}) == 300
