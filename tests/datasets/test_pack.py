"""The command line: packed shards are read back, and errors are explained."""

import asyncio
import importlib
import json
import os
import pty
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import aioloader
from aioloader._cli import pack
from aioloader._cli.main import main
from aioloader.datasets import JSONLinesDataset, ParquetDataset, TarDataset
from datasets.shards import items, write_tree
from datasets.test_decoders import CLASSES, LABELLED

ROOT = Path(aioloader.__file__).parents[2]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "pictures")


def packed(*arguments: object) -> None:
    assert main(["pack", *map(str, arguments)]) == 0


def read(stream: Any) -> list[Any]:
    return asyncio.run(items(stream))


def test_class_folders_are_packed_with_labels(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (tree, tmp_path / "out", "--class-folders", "--name", "train")
    packed(*arguments, "--shard-samples", 4)
    said = "6 samples in 2 shards: train-{000000..000001}.tar"
    assert capsys.readouterr().out.splitlines() == [
        said,
        "sorted by class: --shuffle 0 would mix them for training",
        "left out: 3 files that are not bmp, jpeg, jpg, pgm, png, ppm, tif, tiff, webp",
    ]
    stream = TarDataset(f"{tmp_path}/out/train-*.tar")
    samples = read(stream)
    assert [int(sample["cls"]) for sample in samples] == [n for _, n in LABELLED]
    for sample, (name, _) in zip(samples, LABELLED, strict=True):
        key, _, extension = name.rpartition(".")
        assert sample["__key__"] == key.replace("z.v2", "z_v2")
        assert sample[extension.lower()] == (tree / name).read_bytes()
    images = [s.get("png", s.get("jpeg")) for s in read(stream.decode("torch"))]
    assert {tuple(image.shape) for image in images} == {(3, 6, 6)}
    manifest = json.loads((tmp_path / "out" / "train-shards.json").read_text())
    assert manifest["metadata"]["classes"] == CLASSES
    packed(*arguments, "--shard-samples", 4)
    assert capsys.readouterr().out.startswith("6 samples (6 already written) in 2 sh")
    assert len(read(stream)) == 6


def test_the_seed_alone_decides_the_shuffled_order(tree: Path, tmp_path: Path) -> None:
    orders = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        packed(tree, tmp_path / name, "--class-folders", "--shuffle", seed)
        samples = read(TarDataset(f"{tmp_path}/{name}/*.tar"))
        orders.append([sample["__key__"] for sample in samples])
        labels = {sample["__key__"]: int(sample["cls"]) for sample in samples}
        assert labels["cat-b/1"] == 1
        assert labels["dog/10"] == 2
    assert orders[0] == orders[1] != sorted(orders[0])
    assert orders[2] != orders[0]
    assert sorted(orders[2]) == sorted(orders[0])
    assert main(["pack", str(tree), f"{tmp_path}/a", "--class-folders"]) == 1


def test_names_that_share_a_key_are_numbered(tmp_path: Path) -> None:
    for name in ("a.png", "a.jpg", "a.b.jpg", "a_b.jpg"):
        (tmp_path / "x").mkdir(exist_ok=True)
        (tmp_path / "x" / name).write_bytes(name.encode())
    packed(tmp_path, tmp_path.parent / f"{tmp_path.name}-out", "--class-folders")
    samples = read(TarDataset(f"{tmp_path}-out/*.tar"))
    keys = [sample["__key__"] for sample in samples]
    assert keys == ["x/a_b", "x/a", "x/a-2", "x/a_b-2"]
    names = [next(v for k, v in s.items() if k in {"jpg", "png"}) for s in samples]
    assert names == [b"a.b.jpg", b"a.jpg", b"a.png", b"a_b.jpg"]


def test_files_are_grouped_as_in_a_tar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By folder and the name up to the first dot, although others sort in between."""
    folder = tmp_path / "in"
    names = ["a.json", "a-1.txt", "a.seg.png", "b.d/c.txt", "README", "b.d/a.txt"]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())
    packed(folder, tmp_path / "out", "--jobs", 1)
    samples = {
        sample.pop("__key__"): {k: v for k, v in sample.items() if k != "__url__"}
        for sample in read(TarDataset(f"{tmp_path}/out/*.tar"))
    }
    assert samples == {
        "a": {"json": b"a.json", "seg.png": b"a.seg.png"},
        "a-1": {"txt": b"a-1.txt"},
        "b.d/a": {"txt": b"b.d/a.txt"},
        "b.d/c": {"txt": b"b.d/c.txt"},
    }
    assert "left out: 1 files without an extension" in capsys.readouterr().out


def test_files_are_packed_as_rows(tree: Path, tmp_path: Path) -> None:
    packed(tree, tmp_path / "out", "--format", "parquet", "--class-folders")
    packed(tree, tmp_path / "all", "--format", "parquet", "--glob", "dog/*")
    rows = read(ParquetDataset(f"{tmp_path}/out/*.parquet"))
    assert [(row["path"], row["label"]) for row in rows] == LABELLED
    assert rows[0]["bytes"] == (tree / "cat/b.png").read_bytes()
    paths = [row["path"] for row in read(ParquetDataset(f"{tmp_path}/all/*.parquet"))]
    assert paths == sorted(f"dog/{path.name}" for path in (tree / "dog").iterdir())


def test_a_list_of_files_keeps_its_order(tree: Path, tmp_path: Path) -> None:
    (tree / "list.txt").write_text("dog/10.png\ncat/b.png\n\n")
    packed(tree / "list.txt", tmp_path / "out", "--format", "parquet")
    rows = read(ParquetDataset(f"{tmp_path}/out/*.parquet"))
    assert [row["path"] for row in rows] == ["dog/10.png", "cat/b.png"]


def test_repeated_files_are_refused(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "list.txt").write_text("cat/b.png\ndog/10.png\ncat/b.png\n")
    with pytest.raises(SystemExit):
        main(["pack", str(tree / "list.txt"), str(tmp_path / "out")])
    assert "the same member of 'cat/b': ['png', 'png']" in capsys.readouterr().err
    (tree / "cat" / "b.PNG").write_bytes(b"")
    assert main(["pack", str(tree), str(tmp_path / "out")]) == 1
    assert "'cat/b' has two members of the same name" in capsys.readouterr().err


def test_rows_become_members_and_come_back(tmp_path: Path) -> None:
    lines = [{"id": number, "text": f"ü{number}"} for number in range(5)]
    source = tmp_path / "x.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    packed(source, tmp_path / "a", "--format", "parquet", "--shard-samples", 2)
    packed(f"{tmp_path}/a/shard-00000?.parquet", tmp_path / "b")
    packed(f"{tmp_path}/b/shard-{{000000..000000}}.tar", tmp_path / "c")
    packed(f"{tmp_path}/c/*.tar", tmp_path / "d", "--format", "parquet")
    assert read(JSONLinesDataset(str(source))) == lines
    assert read(ParquetDataset(f"{tmp_path}/a/*.parquet")) == lines
    for name in "bc":
        samples = read(TarDataset(f"{tmp_path}/{name}/*.tar").decode())
        assert [sample["json"] for sample in samples] == lines
    rows = read(ParquetDataset(f"{tmp_path}/d/*.parquet"))
    assert [json.loads(row["json"]) for row in rows] == lines
    assert [row["__key__"] for row in rows] == [f"{n:09d}" for n in range(5)]


def test_columns_of_bytes_become_members(tmp_path: Path) -> None:
    """Numbers, arrays and nulls become JSON."""
    rows = [{"jpg": b"picture", "x": 1.5, "v": [1, 2], "n": None}, {"jpg": b"2"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    packed(tmp_path / "x.parquet", tmp_path / "out")
    first, second = read(TarDataset(f"{tmp_path}/out/*.tar").decode())
    assert first["jpg"] == b"picture"
    assert first["json"] == {"x": 1.5, "v": [1, 2], "n": None}
    assert second["json"]["x"] is None


def test_packing_from_store_to_store(s3: str, s3_port: int, tmp_path: Path) -> None:
    region = ("--src-option", "region=us-east-1", "--dst-option", "region=us-east-1")
    packed(s3 + "/dogs", f"{s3}-packed", *region)
    samples = read(TarDataset("shard-*.tar", store=f"{s3}-packed"))
    keys = ["a b", "big", "empty", "per%20cent", "z", "ünicode"]
    assert [sample["__key__"] for sample in samples] == keys
    assert samples[0]["bin"] == b"dogs-a b"


WRONG: list[tuple[list[str], str]] = [
    ([], "the following arguments are required: COMMAND"),
    (["pakc"], "invalid choice: 'pakc'"),
    (["pack", "{tree}"], "required: DST"),
    (["pack", "", "{out}"], "and there is no ''"),
    (["pack", "{tree}", ""], "the destination is empty"),
    (["pack", "nowhere", "{out}"], "and there is no 'nowhere'"),
    (["pack", "no.jsonl", "{out}"], "there is no file 'no.jsonl'"),
    (["pack", "{tree}", "{tree}/out"], "overlaps SRC"),
    (["pack", "{tree}/*.tar", "{tree}"], "overlaps SRC"),
    (["pack", "s3://b/x", "s3://b/x/"], "overlaps SRC"),
    (["pack", "http://u:KEY@h/x", "http://u:KEY@h/x/y"], "DST 'http://h/x/y' overlaps"),
    (["pack", "{tree}", "{out}", "--shard-size", "big"], "like 64MB, got 'big'"),
    (["pack", "{tree}", "{out}", "--jobs", "0"], "must be at least 1, got '0'"),
    (["pack", "{tree}", "{out}", "--dst-option", "x"], "must be KEY=VALUE"),
    (["pack", "{tree}", "{out}", "--dst-option", "x=y"], "takes no store_options"),
    (["pack", "{tree}", "{out}", "--src-option", "x=y"], "is for stores, and"),
    (["pack", "{tree}", "{out}", "--name", "a/b"], "got 'a/b'"),
    (["pack", "{tree}", "s9://x"], "no object store is known"),
    (["pack", "{tree}", "{out}", "--glob", "*.png"], "no file matches '*.png'"),
    (["pack", "{tree}/cat", "{out}", "--class-folders"], "is in no class folder"),
    (["pack", "x.jsonl", "{out}", "--class-folders"], "--class-folders applies to dir"),
    (["pack", "x.jsonl", "{out}", "--shuffle", "0"], "--shuffle applies to director"),
    (["index", "nowhere.tar"], "there is no file 'nowhere.tar'"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=str)
def test_the_command_refuses_wrong_arguments(
    arguments: list[str],
    words: str,
    tree: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [argument.format(tree=tree, out=tmp_path / "out") for argument in arguments]
    with pytest.raises(SystemExit) as raised:
        main(given)
    assert raised.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("usage: aioloader")
    assert words in said.splitlines()[-1]
    assert "KEY@" not in said
    assert not (tmp_path / "out").exists()


def test_packing_resumes_after_an_error(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed(tree, tmp_path / "out", "--quiet")
    assert main(["pack", str(tree), str(tmp_path / "out"), "--class-folders"]) == 1
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n{"a"\n')
    again = [tmp_path / "bad.jsonl", tmp_path / "o2", "--shard-samples", "1"]
    assert main(["pack", *map(str, again)]) == 1
    captured = capsys.readouterr()
    first, second = captured.err.splitlines()
    assert first.startswith("aioloader pack: error: ")
    assert "started with another metadata" in first
    assert "bad.jsonl" in second
    assert captured.out == ""
    # Run again, it packs the rest.
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    packed(*again)
    assert "2 samples (1 already written) in 2 shards" in capsys.readouterr().out
    samples = read(TarDataset(f"{tmp_path}/o2/*.tar").decode())
    assert [sample["json"] for sample in samples] == [{"a": 1}, {"a": 2}]


def test_an_interrupt_exits_with_130(
    tree: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As shells expect, and without a traceback."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pack, "_make_writer", interrupt)
    assert main(["pack", str(tree), str(tmp_path / "out")]) == 130
    assert "interrupted; the same command resumes" in capsys.readouterr().err


def test_pack_and_index_write_the_same_index(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed(tree, tmp_path / "out", "--class-folders")
    tar = tmp_path / "out" / "shard-000000.tar"
    index = Path(f"{tar}.idx").read_bytes()
    Path(f"{tar}.idx").unlink()
    (tmp_path / "bad.tar").write_bytes(tar.read_bytes()[1:])
    capsys.readouterr()
    assert main(["index", str(tar), f"{tmp_path}/bad.tar"]) == 1
    captured = capsys.readouterr()
    assert captured.out == f"{tar}.idx: 6 samples\n"
    assert "bad.tar' is damaged at byte 0" in captured.err
    assert Path(f"{tar}.idx").read_bytes() == index
    parts = [read(TarDataset(str(tar)).shard(rank, 2)) for rank in range(2)]
    keys = [sorted(sample["__key__"] for sample in part) for part in parts]
    assert all(keys)
    assert sorted(keys[0] + keys[1]) == sorted(
        name.rpartition(".")[0].replace(".", "_") for name, _ in LABELLED
    )


@pytest.mark.slow
def test_the_program_shows_progress_on_a_terminal(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"]["aioloader"].partition(":")
    assert getattr(importlib.import_module(module), name) is main
    command = [*(sys.executable, "-m", "aioloader", "pack"), str(tree)]
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [*command, str(tmp_path / "a")],
        stdout=subprocess.PIPE,
        stderr=theirs,
        check=True,
    )
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "of 9 samples" in shown
    assert done.stdout == b"9 samples in 1 shard: shard-000000.tar\n"
    packed(tree, tmp_path / "b")
    assert capsys.readouterr().err == ""
