"""Members are decoded by their extensions, and folders become labels."""

import io
import json
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset as wds
from hypothesis import given
from hypothesis import strategies as st
from obstore.store import LocalStore
from PIL import Image

from aioloader import DataLoader
from aioloader.datasets import (
    Decoder,
    FileDataset,
    ObjectDataset,
    ParquetDataset,
    TarDataset,
    decoders,
    write_parquet,
)
from aioloader.errors import DecodeError
from datasets.shards import SIDE, TREE, encoded, pixels, write_tree
from datasets.tables import assert_same
from datasets.tar_archives import Member, archive

COLOURS = pixels(0, 3)
SAMPLE = {
    "__key__": "a",
    "__url__": "a.tar",
    "png": encoded(COLOURS),
    "mask.png": encoded(pixels(1)),
    "cls": b"7\n",
    "json": b'{"a": [1, null]}',
    "txt": "grüße".encode(),
    "npy": decoders.encode(np.arange(3), "npy"),
    "npz": decoders.encode({"x": np.arange(2)}, "npz"),
    "pth": decoders.encode({"w": torch.ones(2)}, "pth"),
    "pickle": pickle.dumps(1),
    "bin": b"\x00",
}


def test_extensions_choose_the_decoders() -> None:
    """Unknown extensions and pickles stay bytes."""
    made = Decoder("rgb8", {"mask.png": "l8"})(SAMPLE)
    expected = {
        **SAMPLE,
        "png": COLOURS,
        "mask.png": pixels(1),
        "cls": 7,
        "json": {"a": [1, None]},
        "txt": "grüße",
        "npy": np.arange(3),
        "npz": {"x": np.arange(2)},
        "pth": {"w": torch.ones(2)},
    }
    assert_same(made, expected)


@pytest.mark.parametrize("spec", sorted(set(decoders.SPECS) - {"torchl", "torchl8"}))
@pytest.mark.parametrize("shape", [(), (3,), (4,)])
def test_images_equal_those_of_webdataset(spec: str, shape: tuple[int, ...]) -> None:
    data = encoded(pixels(2, *shape))
    theirs = wds.autodecode.ImageHandler(spec)(".png", data)
    ours = Decoder(spec)(data)
    if isinstance(ours, Image.Image):
        assert ours.mode == theirs.mode
        ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert_same(ours, theirs)


def test_grey_tensors_have_a_channel() -> None:
    """As torchvision's have, so that they stack."""
    assert Decoder("torchl")(encoded(pixels(1))).shape == (1, SIDE, SIDE)


def test_torchvision_is_used_if_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """For formats that it decodes as Pillow does, so not for BMP."""
    module: Any = types.ModuleType("torchvision.io")
    seen: list[str] = []

    def decode_image(raw: torch.Tensor, mode: str) -> torch.Tensor:
        image = Image.open(io.BytesIO(raw.numpy().tobytes())).convert(mode)
        seen.append(str(image.mode))
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)

    module.decode_image = decode_image
    package: Any = types.ModuleType("torchvision")
    package.io = module
    monkeypatch.setitem(sys.modules, "torchvision", package)
    monkeypatch.setitem(sys.modules, "torchvision.io", module)
    decoders._torchvision.cache_clear()
    try:
        with_it = [Decoder("torch")(encoded(COLOURS, f)) for f in ("PNG", "JPEG")]
        Decoder("torch")(encoded(COLOURS, "BMP"))
    finally:
        decoders._torchvision.cache_clear()
    assert seen == ["RGB", "RGB"]
    monkeypatch.setitem(sys.modules, "torchvision.io", None)
    without = [Decoder("torch")(encoded(COLOURS, f)) for f in ("PNG", "JPEG")]
    decoders._torchvision.cache_clear()
    assert_same(with_it, without)


def test_16_bit_images_are_refused() -> None:
    """Pillow would clip values at 255 silently; a function may read them."""
    deep = encoded(Image.fromarray(np.full((2, 2), 300, np.uint16)))
    with pytest.raises(DecodeError, match=r"more than 8 bits .*'I;16'"):
        Decoder("pil")(deep)
    read = Decoder({"png": lambda data: Image.open(io.BytesIO(data)).getpixel((0, 0))})
    assert read({"png": deep}) == {"png": 300}


def test_functions_take_precedence_over_formats() -> None:
    """Dicts by their longest extension first, then WebDataset's handlers."""
    handler = wds.handle_extension("left.png", lambda _data: "handled")
    decoder = Decoder("l8", handler, {"png": len, ".Seg.PNG": str})
    made = decoder({"seg.png": b"12", "left.png": b"12", "x.y.png": b"123"})
    assert made == {"seg.png": "b'12'", "left.png": 2, "x.y.png": 3}
    assert Decoder("l8", handler)({"left.png": b""}) == {"left.png": "handled"}


@pytest.mark.parametrize(
    ("specs", "error", "words"),
    [
        (("toch",), ValueError, "'toch' .*did you mean 'torch'"),
        (("pil", "torch"), ValueError, "one format, got"),
        (({"png": "rbg"},), ValueError, "'rbg' .*did you mean 'rgb'"),
        ((7,), TypeError, "got int"),
    ],
)
def test_unknown_formats_are_refused(
    specs: tuple[Any, ...], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Decoder(*specs)
    with pytest.raises(error, match=words):
        TarDataset("x.tar").decode(*specs)


def test_tuples_are_decoded_and_strings_refused() -> None:
    made, label = Decoder("rgb8")((encoded(COLOURS), 3))
    assert_same([made, label], [COLOURS, 3])
    with pytest.raises(TypeError, match="got str"):
        Decoder("pil")("text")
    with pytest.raises(TypeError, match="has no word for images"):
        Decoder({"png": len})((b"1", 3))


def test_without_pillow_images_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ImportError, match=r'pip install "aioloader\[pictures\] @ git'):
        Decoder("pil")
    assert Decoder()({"cls": b"1"}) == {"cls": 1}


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("jpg", b"no", "'jpg' of sample 'a' in 'a.tar' .2 bytes.: Unidentified"),
        ("png", SAMPLE["png"][:60], "'png' of sample 'a' .*truncated"),
        ("cls", b"x", "'cls' of sample 'a' in 'a.tar' .1 bytes.: ValueError: invalid"),
        ("x.json", b"{", "'x.json' of sample 'a'"),
        ("npy", decoders.encode(np.array(1), "npy")[:9], "'npy' of sample"),
        ("pth", pickle.dumps(Decoder), "'pth' of sample"),
    ],
)
def test_errors_name_the_sample(name: str, data: bytes, words: str) -> None:
    with pytest.raises(DecodeError, match=words) as raised:
        Decoder("pil")({"__key__": "a", "__url__": "a.tar", name: data})
    assert raised.value.location == "a.tar"
    assert raised.value.__cause__ is not None


@pytest.mark.filterwarnings("ignore")
@given(
    st.sampled_from(["png", "json", "npy", "npz", "pth", "txt", "cls"]),
    st.integers(0, 2000),
    st.binary(max_size=8),
)
def test_damage_raises_only_decode_errors(name: str, start: int, junk: bytes) -> None:
    """Or gives a value, if the damage does no harm."""
    body: Any = SAMPLE[name]
    start %= len(body) + 1
    damaged = body[:start] + junk + body[start + len(junk) // 2 :]
    try:
        Decoder("torch")({"__key__": "a", name: damaged})
    except DecodeError as error:
        text = str(error)
    else:
        return
    assert f"{name!r} of sample 'a'" in text


def test_errors_of_functions_get_a_note() -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        Decoder({"bin": lambda _: 1 // 0})(SAMPLE)
    (note,) = raised.value.__notes__
    assert note == "aioloader: decoding 'bin' of sample 'a' in 'a.tar' (1 bytes)"


def test_pickle_and_repr_keep_the_arguments() -> None:
    decoder = Decoder("torch", {"x": len})
    assert pickle.loads(pickle.dumps(decoder)).specs == decoder.specs
    assert repr(decoder) == f"Decoder('torch', {{'x': {len!r}}})"


@pytest.mark.slow
@given(
    st.one_of(
        st.tuples(st.sampled_from(["txt", "transcript"]), st.text()),
        st.tuples(st.sampled_from(["cls", "id", "x.index"]), st.integers()),
        st.tuples(
            st.just("json"),
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.lists(st.text()),
                lambda inner: st.dictionaries(st.text(), inner),
                max_leaves=4,
            ),
        ),
    )
)
def test_encoded_values_are_decoded_unchanged(member: tuple[str, Any]) -> None:
    name, value = member
    assert_same(Decoder()({name: decoders.encode(value, name)}), {name: value})


@pytest.mark.parametrize("spec", ["rgb", "rgb8", "l8", "torch", "torchrgba8", "torchl"])
@pytest.mark.parametrize("extension", ["png", "tif"])
def test_encoded_images_are_decoded_unchanged(spec: str, extension: str) -> None:
    value = Decoder(spec)(encoded(pixels(5, 4)))
    assert_same(Decoder(spec)(decoders.encode(value, extension)), value)


@pytest.mark.parametrize(
    ("value", "extension", "words"),
    [
        (np.full((2, 2), 1.5), "png", "from 0 to 1, got 1.5 to 1.5"),
        (np.full((2, 2), np.nan), "png", "from 0 to 1, got nan"),
        (np.zeros((2, 2), np.int64), "png", "uint8 or float, got int64"),
        ([1], "bin", "a list cannot be stored as 'bin'"),
        (np.zeros(2), "bin", "a ndarray cannot be stored"),
        (1.5, "cls", "float"),
    ],
)
def test_unencodable_values_are_refused(value: Any, extension: str, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        decoders.encode(value, extension)


def write(path: Path, bad: int = -1) -> str:
    members = []
    for number in range(8):
        body = encoded(np.full((2, 2, 3), number, np.uint8))
        members.append(Member(f"{number:04}.png", b"bad" if number == bad else body))
        members.append(Member(f"{number:04}.cls", b"%d" % number))
    path.write_bytes(archive(members))
    return str(path)


async def test_a_decoded_stream_is_batched_and_resumes(tmp_path: Path) -> None:
    stream = TarDataset(write(tmp_path / "a.tar")).decode("torchrgb8")
    loader: Any = DataLoader(stream, batch_size=3)
    batches = [batch async for batch in loader]
    assert torch.cat([batch["cls"] for batch in batches]).tolist() == list(range(8))
    values = torch.cat([batch["png"] for batch in batches])
    assert values[:, 0, 0, 0].tolist() == list(range(8))
    assert values.shape == (8, 3, 2, 2)
    iterator = aiter(stream)
    await iterator.pull(5)
    stream.load_state_dict(json.loads(json.dumps(iterator.state_dict())))
    await iterator.aclose()
    assert [sample["cls"] async for sample in stream] == [5, 6, 7]


async def test_columns_of_parquet_are_decoded(tmp_path: Path) -> None:
    rows = [{"image": encoded(pixels(n, 3)), "label": n} for n in range(20)]
    await write_parquet(rows, tmp_path)
    stream = ParquetDataset(f"{tmp_path}/*.parquet").decode({"image": "rgb8"})
    samples = [sample async for sample in stream]
    assert [sample["label"] for sample in samples] == list(range(20))
    assert_same([x["image"] for x in samples], [pixels(n, 3) for n in range(20)])


async def test_damaged_samples_can_be_skipped(tmp_path: Path) -> None:
    stream = TarDataset(write(tmp_path / "a.tar", bad=5)).decode("torch")
    loader: Any = DataLoader(stream, batch_size=4)
    with pytest.raises(DecodeError, match=r"'png' of sample '0005' in .*a\.tar"):
        [batch async for batch in loader]
    loader = DataLoader(stream, batch_size=4, on_error="skip")
    labels = [label async for batch in loader for label in batch["cls"].tolist()]
    assert labels == [0, 1, 2, 3, 4, 6, 7]


async def test_files_are_decoded_by_extension(tmp_path: Path) -> None:
    (tmp_path / "a.b.png").write_bytes(encoded(COLOURS))
    (tmp_path / "c.json").write_bytes(b"{}")
    (tmp_path / "d.PNG").write_bytes(b"no picture")
    names = ["a.b.png", "c.json", "d.PNG"]
    decoded = FileDataset(names, root=tmp_path).decode("rgb8")
    assert_same(await decoded[0], COLOURS)
    assert await decoded[-2] == {}
    with pytest.raises(DecodeError, match=r"'png' of sample 'd.PNG'"):
        await decoded[2]
    assert len(pickle.loads(pickle.dumps(decoded))) == 3


def test_the_description_names_formats_and_functions() -> None:
    """Formats and extensions bind a state; another function name only warns."""
    description = TarDataset("x.tar").decode("torch", {"a": len, "b": "l8"}).describe()
    assert description["kind"] == "decode"
    assert description["pictures"] == "torch"
    assert description["extensions"] == {"a": "function", "b": "l8"}
    assert description["function"] == [{"a": "builtins.len"}]
    assert json.loads(json.dumps(description)) == description
    assert description != TarDataset("x.tar").decode("pil").describe()


# The tree in torchvision 0.28: ``classes``, and ``samples`` relative to the root.
CLASSES = ["cat", "cat-b", "dog"]
LABELLED = [
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


async def test_class_folders_equal_those_of_torchvision(folders: Any) -> None:
    dataset, start = folders
    assert dataset.classes == CLASSES
    assert dataset.class_to_idx == {name: label for label, name in enumerate(CLASSES)}
    assert dataset.samples == [(start + name, label) for name, label in LABELLED]
    assert dataset.targets == [label for _, label in LABELLED]
    assert len(dataset) == len(LABELLED)
    async with dataset.lifespan():
        data, last = await dataset[-1]
    assert (bytes(data[:2]), last) == (b"\xff\xd8", 2)
    with pytest.raises(IndexError, match="for 6 samples"):
        await dataset[6]


async def test_class_folders_are_decoded(folders: Any) -> None:
    dataset = folders[0].decode("torchrgb8")
    assert dataset.classes == CLASSES
    loader: Any = DataLoader(dataset, batch_size=6, concurrency=4)
    ((images, labels),) = [batch async for batch in loader]
    assert labels.tolist() == [label for _, label in LABELLED]
    expected = [40 * (TREE[name] or 0) for name, _ in LABELLED]
    assert images[:, 0, 0, 0].tolist() == pytest.approx(expected, abs=2)  # a JPEG
    again = pickle.loads(pickle.dumps(dataset))
    assert torch.equal((await again[0])[0], images[0])


@pytest.mark.slow
def test_workers_decode_class_folders(tree: Path) -> None:
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


def test_labels_follow_the_given_classes(tree: Path) -> None:
    """Those of the training set, where a folder is missing or unknown."""
    files = FileDataset("*/**/*", root=tree)
    dataset = files.class_folders(classes=["ant", *CLASSES])
    assert dataset.targets == [label + 1 for _, label in LABELLED]
    assert dataset.class_to_idx["dog"] == 3
    with pytest.raises(ValueError, match="of no class: 'cat-b'; there are 2 classes"):
        files.class_folders(classes=["dog", "cat"])


def test_class_folders_without_images_are_refused(tree: Path) -> None:
    """Without them, other labels would shift; torchvision refuses them, too."""
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
def test_files_outside_of_class_folders_are_refused(
    tree: Path, pattern: str, root: str, words: str
) -> None:
    (tree / "stray.png").write_bytes(b"")
    with pytest.raises(ValueError, match=words):
        FileDataset(pattern, root=tree).class_folders(root)


def test_a_list_of_names_needs_no_files() -> None:
    """All samples of a class share one label object."""
    names = [f"{i % 300:03d}/{i}.png" for i in range(900)]
    dataset = FileDataset(names).class_folders()
    assert len(dataset.classes) == 300
    assert dataset.targets == sorted(np.arange(900) % 300)
    assert len({id(label) for label in dataset.targets}) == 300
