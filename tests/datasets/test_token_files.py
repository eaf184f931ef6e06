"""Files of tokens are read back from disk and from stores, also after faults."""

import asyncio
import json
import os
import pickle
import struct
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Subset

from aioloader import DataLoader
from aioloader._cli.main import main
from aioloader.datasets import Piece, Source, TokenDataset, TokenWriter, Version
from aioloader.errors import DatasetError, ObjectNotFoundError, StateMismatchError
from aioloader.protocols import reads_async
from datasets.killed_writing import DOCUMENTS, SIGKILLED, TEXTS, letters, run
from python_process import python
from resuming import assert_resumes_exactly

Documents = Sequence[Sequence[int]]


async def write_async(path: Any, documents: Documents, **options: Any) -> None:
    async with TokenWriter(path, **{"dtype": "uint16", **options}) as writer:
        for document in documents[writer.next_sample :]:
            await writer.write(document)


def write(path: Any, documents: Documents, **options: Any) -> None:
    asyncio.run(write_async(path, documents, **options))


def expected(documents: Documents, length: int, *, is_one: bool = False) -> list[Any]:
    """Return the samples, token by token, by their definition."""
    tokens = [token for document in documents for token in document]
    ends = set() if is_one else set(np.cumsum([*map(len, documents)]).tolist())
    samples = []
    for start in range(0, length * ((len(tokens) - 1) // length), length):
        inputs = tokens[start : start + length]
        labels, positions = list[int](), list[int]()
        for i in range(start, start + length):
            begins = i == start or i in ends
            positions.append(0 if begins else positions[-1] + 1)
            labels.append(-100 if i + 1 in ends else tokens[i + 1])
        samples.append([inputs, labels, positions])
    return samples


def lists(sample: Any) -> list[Any]:
    assert [*sample] == ["input_ids", "labels", "position_ids"]
    assert {array.dtype for array in sample.values()} == {np.dtype(np.int64)}
    return [array.tolist() for array in sample.values()]


def every(dataset: TokenDataset) -> list[Any]:
    return [lists(dataset[index]) for index in range(len(dataset))]


class Shelf(Source):
    """The files of a directory, as a store that counts its answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.gets = 0

    async def get(self, key: str, start: int, stop: int) -> Piece:
        self.gets += 1
        data = await asyncio.to_thread((self.folder / key).read_bytes)
        return Piece(data[start:stop], Version(len(data), f'"{zlib.crc32(data)}"'))


documents_of_tokens = st.lists(
    st.lists(st.integers(1, 250), max_size=9), min_size=1, max_size=12
)


# -- reading ------------------------------------------------------------------------


@pytest.mark.slow
@given(
    documents=documents_of_tokens,
    length=st.integers(1, 12),
    kind=st.sampled_from(["one", "eos", "megatron"]),
    dtype=st.sampled_from(["uint8", "int32", "uint16", "int64"]),
)
def test_written_tokens_are_read_back(
    tmp_path: Path, documents: Documents, length: int, kind: str, dtype: str
) -> None:
    """By index, in batches, and from a store; ``expected`` defines the samples."""
    path = tmp_path / f"{zlib.crc32(repr((documents, kind, dtype)).encode())}.bin"
    options: dict[str, Any] = {"dtype": dtype}
    if kind == "eos":
        options["eos"] = 0
    elif kind == "megatron":
        options["format"] = kind
    write(path, documents, **options)
    if kind == "eos":
        documents = [[*document, 0] for document in documents]
    samples = expected(documents, length, is_one=kind == "one")
    dataset = TokenDataset(path, length)
    assert every(dataset) == samples
    assert [*map(lists, dataset.__getitems__(range(len(dataset))))] == samples
    stored = TokenDataset(path.name, length, store=Shelf(tmp_path))

    async def read() -> list[Any]:
        async with stored:
            return await asyncio.gather(*(stored[i] for i in range(len(stored))))

    assert [*map(lists, asyncio.run(read()))] == samples
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith(".")]


def index_of(sizes: Sequence[int], firsts: Sequence[int], itemsize: int) -> bytes:
    """Return Megatron's index of sizes of sequences, and each document's first one."""
    pointers = np.cumsum([0, *sizes][: len(sizes)]) * itemsize
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 4, len(sizes), len(firsts))
    parts = [np.array(sizes, "<i4"), np.array(pointers, "<i8"), np.array(firsts, "<i8")]
    return head + b"".join(part.tobytes() for part in parts)


@given(
    documents=st.lists(
        st.lists(st.lists(st.integers(1, 9), max_size=3), max_size=3), max_size=9
    ),
    length=st.integers(1, 5),
    modes=st.booleans(),
)
def test_documents_may_have_several_sequences(
    tmp_path: Path, documents: list[Documents], length: int, modes: bool
) -> None:
    """As Megatron splits sentences; documents and sequences may be empty."""
    sequences = [sequence for document in documents for sequence in document]
    firsts = np.cumsum([0, *map(len, documents)]).tolist()
    index = index_of([*map(len, sequences)], firsts, 4) + bytes(modes * len(sequences))
    whole = [[t for sequence in document for t in sequence] for document in documents]
    tokens = np.array([token for document in whole for token in document], "<i4")
    (tmp_path / "a.idx").write_bytes(index)
    (tmp_path / "a.bin").write_bytes(tokens.tobytes())
    for name in ("a", "a.bin", "a.idx"):
        dataset = TokenDataset(tmp_path / name, length)
        assert every(dataset) == expected(whole, length)
    assert dataset.dtype == np.int32


def test_the_written_index_is_megatrons(tmp_path: Path) -> None:
    """One sequence for each document; the .bin has only the tokens."""
    documents = [[5, 6], [], [7], [8, 9, 10]]
    write(tmp_path / "x", documents, dtype="int32", format="megatron")
    assert (tmp_path / "x.idx").read_bytes() == index_of([2, 0, 1, 3], range(5), 4)
    tokens = np.fromfile(tmp_path / "x.bin", "<i4")
    assert tokens.tolist() == [5, 6, 7, 8, 9, 10]
    # An ``eos`` that is given decides where documents end.
    labels = TokenDataset(tmp_path / "x", 5, eos=8)[0]["labels"]
    assert labels.tolist() == [6, 7, 8, -100, 10]


@pytest.mark.parametrize("is_stored", [False, True])
def test_eos_comes_from_the_sidecar(tmp_path: Path, is_stored: bool) -> None:
    """Documents end where the index says, all the same."""
    write(tmp_path / "x", [[5, 0, 6], [7]], format="megatron", eos=0)
    store = Shelf(tmp_path) if is_stored else None

    def made(**options: Any) -> TokenDataset:
        return TokenDataset("x" if store else tmp_path / "x", 5, store=store, **options)

    assert [made().eos, made(eos=7).eos] == [0, 7]
    assert [made().describe()["eos"], made(eos=0).describe()["eos"]] == [None, 0]
    if not is_stored:
        assert made()[0]["labels"].tolist() == [0, 6, 0, -100, 0]
    sidecar = (tmp_path / "x.bin.json").read_text()
    (tmp_path / "x.bin.json").write_text(sidecar.replace('"tokens": 6', '"tokens": 7'))
    with pytest.raises(ValueError, match="its sidecar says 7 tokens of uint16"):
        made()
    (tmp_path / "x.bin.json").unlink()
    assert made().eos is None


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """100 documents, of 1 to 100 tokens."""
    numbers = np.arange(1, 101)
    write(tmp_path / "train.bin", [[*range(1, n + 1)] for n in numbers], eos=0)
    return tmp_path / "train.bin"


def test_a_dataset_is_indexed_like_a_list(path: Path) -> None:
    dataset = TokenDataset(path, 64)
    count = len(dataset)
    assert count == (5050 + 100 - 1) // 64
    assert lists(dataset[-1]) == lists(dataset[count - 1])
    assert lists(dataset[np.int64(-count)]) == lists(dataset[0])
    for index in (count, -count - 1):
        with pytest.raises(IndexError, match=f"index {index} is out of range for"):
            dataset[index]
    # Samples are copies, although the file is mapped.
    dataset[0]["input_ids"][:] = 0
    assert lists(dataset[0])[0][0] == 1


def test_the_description_has_length_tokens_and_eos(path: Path) -> None:
    dataset = TokenDataset(path, 64)
    known = {"kind": "TokenDataset", "length": 64, "tokens": 5150}
    assert dataset.describe() == {**known, "dtype": "uint16", "eos": 0}
    assert repr(dataset) == f"TokenDataset({str(path)!r}, 64, 80 samples)"
    assert len(TokenDataset(path, 10_000)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("is_stored", [False, True])
def test_a_loader_reads_and_resumes_token_files(path: Path, is_stored: bool) -> None:
    """In processes, too, and shuffled."""
    store = Shelf(path.parent) if is_stored else None
    dataset = TokenDataset(path.name if is_stored else path, 512, store=store)
    assert reads_async(dataset) is is_stored
    options: Any = {"batch_size": 3, "shuffle": True}
    for workers in (0, 2):
        with DataLoader(dataset, num_workers=workers, **options) as loader:
            rows = [row.tolist() for batch in loader for row in batch["input_ids"]]
        tokens = np.fromfile(path, "<u2")[: 512 * len(dataset)].reshape(-1, 512)
        assert sorted(rows) == sorted(tokens.tolist())
    assert_resumes_exactly(lambda: DataLoader(dataset, **options))


def test_pickles_hold_no_memory_map(path: Path) -> None:
    dataset = TokenDataset(path, 64)
    first = lists(dataset[0])
    data = pickle.dumps(dataset)
    assert len(data) < 1500
    assert lists(pickle.loads(data)[0]) == first
    assert lists(Subset(dataset, [5, 0])[1]) == first


@pytest.mark.slow
def test_a_huge_file_takes_no_memory(tmp_path: Path) -> None:
    """10^10 tokens and 10^7 documents: only what a sample needs is read."""
    tokens, documents = 10**10, 10**7
    for name, size in (("flat", 2 * tokens), ("huge.bin", 2 * tokens)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    end = 34 + 12 * documents + 8 * (documents + 1)
    with (tmp_path / "huge.idx").open("wb") as file:
        file.write(
            struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, documents, documents + 1)
        )
        file.seek(34 + 12 * documents - 8)
        file.write(struct.pack("<q", 2 * tokens))
        file.seek(end - 8)
        file.write(struct.pack("<q", documents))
    code = f"""
import sys
sys.path[:0] = {sys.path!r}
from aioloader import DataLoader
from aioloader.datasets import TokenDataset
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
next(iter(DataLoader(TokenDataset({str(tmp_path / "flat")!r}, 4, "u2"), batch_size=8)))
before = resident()
for name in ("flat", "huge"):
    path = {str(tmp_path)!r} + "/" + name
    dataset = TokenDataset(path, 4096, "u2", None if name == "huge" else 1)
    places = range(0, len(dataset), len(dataset) // 7)
    batch = next(iter(DataLoader(dataset, sampler=places, batch_size=8)))
    assert batch["labels"].shape == (8, 4096)
print(resident() - before)
"""
    assert int(python("-c", code, check=True).stdout) < 20 << 20


# -- from a store -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flat.bin", "mega"])
async def test_each_sample_takes_one_request(tmp_path: Path, name: str) -> None:
    """One more copies the index, once for the process."""
    form = "flat" if name == "flat.bin" else "megatron"
    await write_async(tmp_path / name, [[*range(1, 90)]] * 9, format=form)
    shelf = Shelf(tmp_path)
    dataset = await TokenDataset.discover(name, 100, store=shelf)
    shelf.gets = 0
    async with dataset:
        samples = await asyncio.gather(*(dataset[i] for i in (0, 3, -1)))
        assert shelf.gets == (3 if form == "flat" else 4)
        assert lists(await dataset[3]) == lists(samples[1])
    local = await asyncio.to_thread(lambda: every(TokenDataset(tmp_path / name, 100)))
    assert [lists(sample) for sample in samples] == [local[i] for i in (0, 3, -1)]
    with pytest.raises(TypeError, match="not iterable"):
        iter(dataset)


async def test_a_changed_object_is_an_error(tmp_path: Path) -> None:
    await write_async(tmp_path / "a", [[1, 2, 3, 4]])
    dataset = await TokenDataset.discover("a", 3, store=Shelf(tmp_path))
    await asyncio.to_thread((tmp_path / "a").write_bytes, bytes(8))
    async with dataset:
        with pytest.raises(DatasetError, match="changed while being read"):
            await dataset[0]


async def test_a_url_is_read_and_written(s3: str) -> None:
    """Megatron's two objects and the sidecar."""
    documents = [[1, 2, 3], [4], [5, 6]]
    url = f"{s3}-tokens"
    options: Any = {"format": "megatron"}
    await write_async(url, documents, **options)
    dataset = await TokenDataset.discover(url, 2)
    async with dataset:
        samples = [lists(await dataset[i]) for i in range(len(dataset))]
    assert samples == expected(documents, 2)
    async with TokenWriter(url, "uint16", **options) as writer:
        assert (writer.next_sample, writer.tokens) == (3, 6)
    with pytest.raises(StateMismatchError, match="started with another dtype"):
        await write_async(url, documents, dtype="int32", **options)


# -- bad input ----------------------------------------------------------------------


def mega(folder: Path, change: Callable[[bytearray], Any]) -> Path:
    write(folder / "m", [[1, 2], [3]], dtype="int32", format="megatron")
    index = bytearray((folder / "m.idx").read_bytes())
    change(index)
    (folder / "m.idx").write_bytes(index)
    return folder / "m"


def put(offset: int, form: str, number: int) -> Callable[[bytearray], Any]:
    return lambda index: struct.pack_into(form, index, offset, number)


def cut(count: int) -> Callable[[bytearray], Any]:
    return lambda index: index.__delitem__(slice(len(index) - count, None))


@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (cut(1), "has 81 bytes, and an index of 2 sequences and 3 ends has 82: it is"),
        (cut(60), "has 22 bytes, .* it is cut, or was not finished"),
        (cut(82), "m.idx' is not an index of Megatron"),
        (put(0, "<B", 0), "is not an index of Megatron"),
        (put(9, "<Q", 2), "is an index of version 2; only 1 is known"),
        (put(17, "<B", 7), "has no integers, but type 7: pass"),
        (put(18, "<Q", 2**60), "it is cut, or was not finished"),
        (put(38, "<i", 2), "sizes that make 16 bytes, and the .bin has 12"),
        (put(42, "<q", 4), "is damaged: it starts at byte 4"),
        (put(74, "<q", 1), "ends with 1 of 2"),
    ],
)
def test_a_wrong_megatron_index_is_refused(
    tmp_path: Path, change: Callable[[bytearray], Any], words: str, is_stored: bool
) -> None:
    path = mega(tmp_path, change)
    store = Shelf(tmp_path) if is_stored else None
    with pytest.raises(ValueError, match=words):
        TokenDataset(path.name if is_stored else path, 1, store=store)


def test_no_bit_of_an_index_changes_silently(tmp_path: Path) -> None:
    """Except in an entry that then names another sequence between its neighbors."""
    path, documents = tmp_path / "m", [[1], [], [2, 3], [4], [5]]
    write(path, documents, dtype="int32", format="megatron")
    good, whole = (tmp_path / "m.idx").read_bytes(), every(TokenDataset(path, 1))
    firsts_at = 8 * (34 + 12 * 5)
    for bit in range(8 * len(good)):
        changed = int.from_bytes(good, "little") ^ 1 << bit
        (tmp_path / "m.idx").write_bytes(changed.to_bytes(len(good), "little"))
        if bit < firsts_at or (bit - firsts_at) % 64 > 2:
            try:
                is_known = every(TokenDataset(path, 1)) == whole
            except (ValueError, DatasetError) as error:
                is_known = f"{path}." in str(error)
            assert is_known, bit


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, "uint16"), "length must be at least 1, got 0"),
        ((4,), "the type of the tokens in .* is not known"),
        ((4, "uint15"), "dtype must be an integer type such as 'uint16', got 'uint15'"),
        ((4, "float32"), "dtype must be an integer type"),
        ((4, "uint16"), "has 9 bytes and ends inside a token of uint16"),
        ((4, "uint8", 256), "eos is 256, and uint8 holds 0 to 255"),
    ],
)
def test_bad_arguments_are_refused(tmp_path: Path, arguments: Any, words: str) -> None:
    (tmp_path / "raw").write_bytes(bytes(9))
    with pytest.raises(ValueError, match=words):
        TokenDataset(tmp_path / "raw", *arguments)
    with pytest.raises(ValueError, match=words):
        TokenDataset("raw", *arguments, store=Shelf(tmp_path))


def test_files_that_do_not_match_are_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"dtype is int32, and .* tokens of uint16"):
        TokenDataset(path, 4, "int32")
    with pytest.raises(ObjectNotFoundError, match=r"no such file: .*none'"):
        TokenDataset(tmp_path / "none", 4)
    with pytest.raises(ObjectNotFoundError, match=r"no such file: .*none\.idx'"):
        TokenDataset(tmp_path / "none.idx", 4)
    with pytest.raises(DatasetError, match="is a directory"):
        TokenDataset(tmp_path, 4, "uint16")
    dataset, mapped = TokenDataset(path, 4), TokenDataset(path, 4)
    mapped[0]
    os.utime(path, (1, 1))
    with pytest.raises(DatasetError, match="has 10,300 bytes as before, but another"):
        dataset[0]
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match="its sidecar says 5,150 tokens"):
        TokenDataset(path, 4)
    for stale in (dataset, mapped):
        with pytest.raises(DatasetError, match="it had 10,300 bytes and has 10,298"):
            stale[0]
    known = (tmp_path / "train.bin.json").read_text()
    for text in ('{"version": 1}', known.replace('"eos": 0', '"eos": "x"')):
        (tmp_path / "train.bin.json").write_text(text)
        with pytest.raises(ValueError, match="is not the sidecar of a file of tokens"):
            TokenDataset(path, 4)


@pytest.mark.parametrize("is_stored", [False, True])
def test_tokens_above_int64_fail_their_samples(tmp_path: Path, is_stored: bool) -> None:
    """They would be negative; the other samples are read."""
    tokens = np.arange(17, dtype=np.uint64)
    tokens[9] = 2**63
    tokens.tofile(tmp_path / "a")
    store = Shelf(tmp_path) if is_stored else None
    path = "a" if is_stored else tmp_path / "a"
    dataset = TokenDataset(path, 3, "uint64", store=store)
    with DataLoader(dataset, 5, on_error="skip") as loader:
        (batch,) = loader
    assert batch["input_ids"][:, 0].tolist() == [0, 3, 12]
    words = r"token 9 of .*a' is 9,223,372,036,854,775,808, which is above int64's"
    with pytest.raises(ValueError, match=words):
        list(DataLoader(dataset, 5))


# -- writing ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "error", "words"),
    [
        ([70_000], ValueError, "a token of document 1 is 70,000, and uint16 holds 0"),
        ([-1], ValueError, "a token of document 1 is -1"),
        ([0.5], TypeError, "document 1 must be 1-D integers, got float64 of shape"),
        ([[1]], TypeError, r"got int64 of shape \(1, 1\)"),
        ("text", TypeError, "document 1 must be 1-D integers"),
    ],
)
async def test_a_bad_document_is_not_written(
    tmp_path: Path, document: Any, error: type[Exception], words: str
) -> None:
    """The writer continues with the next document."""
    async with TokenWriter(tmp_path / "a", "uint16") as writer:
        await writer.write([1, 2])
        with pytest.raises(error, match=words):
            await writer.write(document)
        await writer.write(np.array([3], np.uint64))
    tokens = await asyncio.to_thread(np.fromfile, tmp_path / "a", "<u2")
    assert tokens.tolist() == [1, 2, 3]


async def test_a_file_appears_only_when_it_is_finished(tmp_path: Path) -> None:
    """An error keeps what was saved; another writer resumes there."""
    path = tmp_path / "deep" / "a.bin"
    options: Any = {"save_bytes": 4, "metadata": {"from": "x"}}
    with pytest.raises(ZeroDivisionError):
        async with TokenWriter(path, "uint16", **options) as writer:
            await asyncio.gather(*(writer.write([n]) for n in range(5)))
            assert not [x for x in path.parent.iterdir() if x.name[0] != "."]
            with pytest.raises(StateMismatchError, match="another writer is writing"):
                await TokenWriter(path, "uint16", **options).__aenter__()
            raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="is not open: use it in 'async with'"):
        await writer.write([1])
    with pytest.raises(StateMismatchError, match="started with another metadata"):
        await write_async(path, [])
    async with TokenWriter(path, "uint16", **options) as writer:
        assert (writer.next_sample, writer.tokens) == (4, 4)
        await writer.write([4, 5])
    tokens = await asyncio.to_thread(np.fromfile, path, "<u2")
    assert tokens.tolist() == [0, 1, 2, 3, 4, 5]
    async with TokenWriter(path, "uint16", **options) as writer:
        assert writer.next_sample == 5
        with pytest.raises(StateMismatchError, match="is finished, with 5 documents"):
            await writer.write([6])


async def test_foreign_files_are_not_overwritten(tmp_path: Path) -> None:
    await asyncio.to_thread((tmp_path / "a").write_bytes, b"theirs")
    with pytest.raises(StateMismatchError, match="exists, without the sidecar"):
        await write_async(tmp_path / "a", [[1]])
    assert await asyncio.to_thread((tmp_path / "a").read_bytes) == b"theirs"


@pytest.mark.slow
@pytest.mark.parametrize(
    "numbers",
    [
        # At the beginning, while it grows, and at each step of the end.
        pytest.param([0, 2, 5, 9, *range(14, 25)], id="some"),
        pytest.param(range(26), marks=pytest.mark.fuzz, id="all"),
    ],
)
def test_killed_writers_resume_exactly(tmp_path: Path, numbers: Sequence[int]) -> None:
    """Run again, they write the same bytes; until then there is nothing to read."""
    kinds = ("flat", "megatron", "tokenize")
    (tmp_path / "texts.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    jobs = [
        (kind, f"{tmp_path}/{kind}-{n}", n)
        for kind in kinds
        for n in (numbers[1::4] if kind == "tokenize" else numbers)
    ]
    ended = run("kill", jobs)
    assert set(ended) == {SIGKILLED, 0}  # the last ones had no step left
    for (kind, folder, _), end in zip(jobs, ended, strict=True):
        if end == SIGKILLED and (Path(folder) / "tokens.bin").exists():
            assert len(TokenDataset(f"{folder}/tokens.bin", 1)) > 0, kind
    assert set(run("write", jobs)) == {0}
    for kind in kinds:
        made = [
            {file.name: file.read_bytes() for file in Path(folder).iterdir()}
            for its, folder, _ in jobs
            if its == kind
        ]
        assert all(files == made[0] for files in made)
        documents = [letters([text])[0] for text in TEXTS]
        if kind != "tokenize":
            documents = DOCUMENTS
        tokens = [token for document in documents for token in (*document, 0)]
        assert np.frombuffer(made[0]["tokens.bin"], "<u2").tolist() == tokens
        assert ("tokens.idx" in made[0]) is (kind == "megatron")


# -- the command --------------------------------------------------------------------


@pytest.fixture(autouse=True)
def unchanged_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore ``sys.path``, to which loading a function adds a folder."""
    monkeypatch.setattr(sys, "path", [*sys.path])


TOKENIZER = ("--tokenizer", "datasets.killed_writing:letters")


def shards(folder: Path, kind: str) -> list[Any]:
    """Write the texts as shards; return SRC, and the options for it."""
    half = len(TEXTS) // 2
    for number, part in enumerate((TEXTS[:half], TEXTS[half:])):
        file = folder / f"{number}.{kind}"
        if kind == "txt":
            file.write_text("".join(f"{text}\n" for text in part))
        elif kind == "jsonl":
            rows = [json.dumps({"body": text, "n": 1}) for text in part]
            file.write_text("\n".join(rows))
        else:
            pq.write_table(pa.table({"text": part, "n": [1] * len(part)}), file)
    options = ["--column", "body"] if kind == "jsonl" else []
    return [f"{folder}/*.{kind}", *options]


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
@pytest.mark.parametrize("form", ["flat", "megatron"])
def test_tokenize_writes_texts_of_each_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, form: str
) -> None:
    """The same tokens, in order, and only once."""
    src, *options = shards(tmp_path, kind)
    made = ("--dtype", "uint16", "--eos", "0", "--format", form)
    command = ["tokenize", src, f"{tmp_path}/out.bin", *options, *TOKENIZER, *made]
    assert main(command) == 0
    documents = [[*letters([text])[0], 0] for text in TEXTS]
    dataset = TokenDataset(tmp_path / "out.bin", 7)
    assert every(dataset) == expected(documents, 7)
    tokens = sum(map(len, documents))
    said = f"{tokens} tokens in {len(TEXTS)} documents"
    assert capsys.readouterr().out == f"{said}\n"
    assert main(command) == 0
    assert f"{said} ({len(TEXTS)} documents already written)" in capsys.readouterr().out
    # Shards of the same names elsewhere, or an added shard, are other texts.
    (tmp_path / "other").mkdir()
    command[1] = shards(tmp_path / "other", kind)[0]
    assert main(command) == 1
    assert "another metadata (place)" in capsys.readouterr().err
    command[1] = src
    assert main([*command, "--tokenizer", "textwrap:dedent"]) == 1
    assert "another metadata (tokenizer)" in capsys.readouterr().err
    (tmp_path / f"00.{kind}").write_bytes((tmp_path / f"0.{kind}").read_bytes())
    assert main(command) == 1
    assert "another metadata (shards)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("none.txt", "a"), 2, "there is no file 'none.txt'"),
        (("a.txt", "d"), 1, "'d' is a directory: name a file in it, such as 'd/train."),
        (("a.tar", "a"), 2, "SRC must be texts (.txt, .jsonl, .parquet), one or many"),
        (("a.txt", "a", "--column", "b"), 2, "--column is for rows, and 'a.txt' has"),
        (("a.txt", "a", "--eos", "</s>"), 2, "--eos '</s>' is not in the vocabulary"),
        (("a.txt", "a", "--dtype", "f4"), 2, "dtype must be an integer type"),
        (("a.txt", "a", "--dtype", ""), 2, "--dtype is needed with a function"),
        (("a.txt", "a", "--tokenizer", "b.json"), 2, "there is no file 'b.json'"),
        (("a.txt", "a", "--tokenizer", "none:b"), 2, "there is no module 'none'"),
        (("a.txt", "a", "--dtype", "int8"), 1, "a token of document 0 is"),
        (("a.jsonl", "a", "--column", "b"), 1, "stream) (at sample 0 of SRC, count"),
        (("a.txt", "a", "--tokenizer", "textwrap:dedent"), 1, "dedent() raised TypeE"),
    ],
)
def test_tokenize_names_mistakes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: Sequence[str],
    status: int,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("\xfe\n")
    (tmp_path / "a.jsonl").write_text('{"a": "x"}\n')
    (tmp_path / "d").mkdir()
    command = ["tokenize", *TOKENIZER, "--dtype", "uint16", *arguments]
    try:
        ended = main(command)
    except SystemExit as error:
        ended = error.code  # type: ignore[assignment]
    assert (ended, words in capsys.readouterr().err) == (status, True)


def test_tokenize_reads_a_tokenizers_file(tmp_path: Path) -> None:
    """Its vocabulary decides the type, and the token at the end."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"a": 0, "b": 1, "</s>": 2}
    model = tokenizers.models.WordLevel(words, unk_token="</s>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(f"{tmp_path}/tokenizer.json")
    (tmp_path / "x.txt").write_text("a b\nb\n")
    for name in (f"{tmp_path}/tokenizer.json", str(tmp_path)):
        out = tmp_path / f"{len(name)}.bin"
        arguments = [f"{tmp_path}/x.txt", str(out), "--tokenizer", name]
        assert main(["tokenize", *arguments, "--eos", "</s>"]) == 0
        assert np.fromfile(out, "<u2").tolist() == [0, 1, 2, 1, 2]
