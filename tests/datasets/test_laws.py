"""What holds for every dataset, whatever the samples are read from."""

import asyncio
import glob
import itertools
import json
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from torch.utils.data import ConcatDataset, Subset

from aioloader.datasets import (
    FileDataset,
    JSONLinesDataset,
    ObjectDataset,
    ParquetDataset,
    SQLRows,
    TextDataset,
    TokenDataset,
)
from aioloader.errors import (
    DatasetError,
    ObjectNotFoundError,
    ObjectPermissionError,
    TruncatedReadError,
)

AnyDataset: TypeAlias = FileDataset | ObjectDataset | SQLRows


@pytest.fixture
def bodies(contents: dict[str, bytes]) -> list[bytes]:
    return [contents[name] for name in sorted(contents)]


def names(dataset: AnyDataset) -> list[str]:
    table = dataset.paths if isinstance(dataset, FileDataset) else dataset.keys
    return list(table)


def body_of(sample: Any) -> memoryview:
    return memoryview(sample["body"] if isinstance(sample, dict) else sample)


async def read_all(dataset: AnyDataset) -> list[bytes]:
    reads: Any = (dataset[index] for index in range(len(dataset)))
    return [bytes(body_of(sample)) for sample in await asyncio.gather(*reads)]


async def test_a_dataset_is_indexed_like_a_list(
    dataset: AnyDataset, contents: dict[str, bytes], bodies: list[bytes]
) -> None:
    """It is not iterable: IndexError comes when awaited, so a loop would never end."""
    assert len(dataset) == len(contents)
    assert names(dataset) == sorted(contents)
    assert body_of(await dataset[-1]) == bodies[-1]
    assert body_of(await dataset[-len(bodies)]) == bodies[0]
    assert body_of(await dataset[np.int64(2)]) == bodies[2]
    for index in (12, -13, 2**40):
        with pytest.raises(IndexError, match=f"{index} is out of range for 12 samp"):
            await dataset[index]
    with pytest.raises(TypeError, match="not iterable"):
        iter(dataset)


@pytest.mark.slow
async def test_torch_wrappers_return_the_awaitable(
    dataset: AnyDataset, bodies: list[bytes]
) -> None:
    assert body_of(await Subset(dataset, [3, 1])[1]) == bodies[1]
    both = ConcatDataset[Any]([dataset, dataset])
    assert body_of(await both[len(bodies) + 2]) == bodies[2]


@pytest.mark.slow
async def test_pickles_while_in_use(dataset: AnyDataset, bodies: list[bytes]) -> None:
    async with dataset:
        await dataset[0]
        if "memory://" in repr(dataset):
            with pytest.raises(pickle.PicklingError, match="one process"):
                pickle.dumps(dataset)
            return
        copy = pickle.loads(pickle.dumps(dataset))
    assert names(copy) == names(dataset)
    assert await read_all(copy) == bodies
    if not isinstance(copy, FileDataset):
        await copy.aclose()


@pytest.mark.slow
async def test_cancelled_reads_leave_no_task(
    dataset: AnyDataset, bodies: list[bytes], noise: list[Any]
) -> None:
    async with dataset:
        for turns in range(4):
            tasks = [asyncio.create_task(read_all(dataset)) for _ in range(4)]
            kept = asyncio.create_task(read_all(dataset))
            for _ in range(turns):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(end, asyncio.CancelledError) for end in ends)
            assert await kept == bodies
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.slow
async def test_contexts_nest_and_reads_work_after_exit(
    dataset: AnyDataset, bodies: list[bytes]
) -> None:
    async with dataset:
        async with dataset as same:
            assert same is dataset
        assert await read_all(dataset) == bodies
    assert await read_all(dataset) == bodies
    async with dataset:
        assert await read_all(dataset) == bodies


@pytest.mark.slow
async def test_several_loops_read_at_once(
    dataset: AnyDataset, bodies: list[bytes]
) -> None:
    results: list[list[bytes]] = []

    async def enter_and_read() -> None:
        async with dataset:
            results.extend([await read_all(dataset) for _ in range(5)])

    def run() -> None:
        asyncio.run(enter_and_read())

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    await enter_and_read()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    assert results == [bodies] * 15


async def test_closing_does_not_wait_for_a_hanging_server(
    loopback: Any, noise: list[Any]
) -> None:
    hanging = ObjectDataset(loopback.at("hang"), ["cats/z.bin"])
    task = asyncio.create_task(hanging[0])
    await asyncio.to_thread(loopback.entered.wait)
    await hanging.aclose(seconds=0.0)
    with pytest.raises(asyncio.CancelledError):
        await task


# -- files: patterns, threads, the page cache, errors of paths -------------------------


def pseudo(path: str) -> str:
    if not Path(path).exists():
        pytest.skip(f"needs {path}")
    return path


def thread_names() -> set[str]:
    every = {thread.name for thread in threading.enumerate()}
    return {name for name in every if name.startswith("aioloader-files")}


def test_patterns_match_sorted_files_as_glob_does(folder: Path) -> None:
    (folder / "cats" / "zz.bin").mkdir()
    assert list(FileDataset(folder / "cats" / "z*").paths) == [f"{folder}/cats/z.bin"]
    for pattern in ("cats/*", "**/*.bin", "**", "**/**"):
        matches = glob.glob(pattern, root_dir=folder, recursive=True)  # noqa: PTH207
        expected = sorted({path for path in matches if (folder / path).is_file()})
        assert list(FileDataset(pattern, root=folder).paths) == expected


@pytest.mark.parametrize("pattern", ["**/*.bin", f"*/{'x' * 300}"])
def test_unlistable_directories_are_an_error(folder: Path, pattern: str) -> None:
    (folder / ("y" * 250)).symlink_to(".")  # the path gets longer until it is too long
    with pytest.raises(DatasetError, match=r"cannot read .*: File name too long"):
        FileDataset(pattern, root=folder)


@pytest.mark.parametrize("pattern", ["*.png", "cats", "nothing[/"])
def test_a_pattern_without_files_is_refused(folder: Path, pattern: str) -> None:
    with pytest.raises(ValueError, match="no file matches") as caught:
        FileDataset(pattern, root=folder)
    assert repr(pattern) in str(caught.value)
    assert repr(str(folder)) in str(caught.value)


def test_repr_shows_the_first_names(folder: Path, tmp_path: Path) -> None:
    """A given list keeps its order and its duplicates."""
    odd = os.fsdecode(b"not-utf8-\xff[1].png")
    given: list[Path | str] = [tmp_path / "b", tmp_path / "a", tmp_path / "b", odd]
    assert FileDataset(given).paths == [os.fspath(path) for path in given]
    assert len(FileDataset([])) == 0
    shown = repr(FileDataset("**/*.bin", root=folder))
    assert shown.startswith("FileDataset(<12 names: 'cats/a b.bin', ")
    assert shown.endswith(f"root={str(folder)!r})")


@pytest.mark.parametrize(
    ("path", "kind", "builtin", "words"),
    [
        ("{0}/gone", ObjectNotFoundError, FileNotFoundError, "no such file"),
        ("{1}", ObjectPermissionError, PermissionError, "may not read"),
        (".", DatasetError, Exception, "is a directory"),
        ("{0}/fifo", DatasetError, Exception, "it is a pipe, not a file"),
        ("/dev/null/x", DatasetError, Exception, "Not a directory"),
        ("a\0b", DatasetError, Exception, "null (byte|char)"),
    ],
)
async def test_unreadable_paths_raise_dataset_errors(
    path: str, kind: Any, builtin: Any, words: str, tmp_path: Path, forbidden: Path
) -> None:
    path = path.format(tmp_path, forbidden)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(kind, match=words) as caught:
        await FileDataset([path])[0]
    assert type(caught.value) is kind
    assert isinstance(caught.value, builtin)
    assert isinstance(caught.value.__cause__, builtin)
    assert caught.value.location == path


async def test_a_file_shorter_than_its_size_is_truncated() -> None:
    assert b"Pid:" in await FileDataset([pseudo("/proc/self/status")])[0]
    with pytest.raises(TruncatedReadError) as caught:
        await FileDataset([pseudo("/sys/kernel/mm/transparent_hugepage/enabled")])[0]
    assert caught.value.received
    assert (caught.value.expected or 0) > caught.value.received


@pytest.mark.parametrize("kind", [TextDataset, ParquetDataset, TokenDataset])
async def test_pipes_and_pseudo_files_are_no_shards(kind: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    arguments = (1, "uint8") if kind is TokenDataset else ()
    for path in (f"{tmp_path}/fifo", pseudo("/proc/self/status")):
        words = "pipe, not a file" if "fifo" in path else "size is 0, but it has bytes"
        with pytest.raises(DatasetError, match=words):
            await anext(aiter(kind(path, *arguments)))


async def test_one_failure_fails_one_read(folder: Path) -> None:
    """Reads of one chunk do not share their errors."""
    dataset = FileDataset(["cats/z.bin", "gone", "dogs/z.bin"], root=folder)
    ends = await asyncio.gather(*(dataset[i] for i in range(3)), return_exceptions=True)
    assert ends[0] == b"cats-z" * 5
    assert isinstance(ends[1], ObjectNotFoundError)
    assert ends[2] == b"dogs-z" * 5


async def test_threads_live_while_a_dataset_is_entered(folder: Path) -> None:
    dataset = await FileDataset.discover("**/*.bin", root=folder, num_threads=2)
    async with dataset:
        async with dataset:
            await asyncio.gather(*(dataset[i] for i in range(12)))
        owned = thread_names()
        assert 1 <= len(owned) <= 2
        await dataset[0]
        assert thread_names() >= owned
    assert not thread_names()
    async with dataset:  # the exit joins threads with reads in flight
        reads = [asyncio.ensure_future(dataset[-1]) for _ in range(50)]
        await asyncio.sleep(0)
    assert not thread_names()
    assert await asyncio.gather(*reads) == [b"dogs-\xc3\xbcnicode" * 4] * 50


async def test_a_read_on_a_closing_loop_fails(folder: Path) -> None:
    """It does not hang, although no executor accepts it."""
    await asyncio.get_running_loop().shutdown_default_executor()
    with pytest.raises(DatasetError, match="shutdown"):
        await FileDataset([folder / "cats" / "z.bin"])[0]


# -- the page cache, which is simulated ------------------------------------------------

SMALL, LARGE = "x" * 200, "y" * 700_000
LINES = [json.dumps([n, LARGE if n in {3000, 3001} else SMALL]) for n in range(6000)]
PLANS: dict[str, list[float]] = {
    "all": [1],
    "half of each": [0.5],
    "nothing": [0],
    "less and less": [1, 0.5, 0.001, 0],
    "nothing, as Linux 5.9 has it": [1, -1],
}
Play = Callable[[list[float]], list[int]]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Give ``preadv`` these shares of what is wanted, and return the bytes it gives.

    0: it would wait; -1: it returns 0 instead of saying so.
    """

    def start(plan: list[float]) -> list[int]:
        shares, given = itertools.chain(plan, itertools.repeat(plan[-1])), list[int]()

        def preadv(file: int, buffers: list[memoryview], _at: int, _flags: int) -> int:
            share = next(shares)
            if not share:
                raise BlockingIOError
            length = max(1, int(len(buffers[0]) * share))
            given.append(0 if share < 0 else os.readv(file, [buffers[0][:length]]))
            return given[-1]

        monkeypatch.setattr(os, "preadv", preadv)
        return given

    return start


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "a.jsonl"
    made.write_text("".join(f"{line}\n" for line in LINES))
    return made


@pytest.mark.slow
@pytest.mark.one_loop
@pytest.mark.parametrize("plan", [*PLANS, "a system that cannot tell"])
async def test_samples_and_states_ignore_the_page_cache(
    plan: str, path: Path, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    if plan in PLANS:
        play(PLANS[plan])
    else:
        monkeypatch.delattr(os, "RWF_NOWAIT", raising=False)
    kinds: Any = {JSONLinesDataset: [*map(json.loads, LINES)], TextDataset: LINES}
    for kind, known in kinds.items():
        samples: list[Any] = []
        states: list[tuple[int, Any]] = []
        async with aiter(kind(path)) as blocks:
            while block := await blocks.pull(700):
                samples += block
                states.append((len(samples), blocks.state_dict()))
        assert samples == known
        for count, state in states[::3]:
            stream = kind(path)
            stream.load_state_dict(state)
            async with aiter(stream) as blocks:
                assert [sample async for sample in blocks] == known[count:]


@pytest.mark.parametrize("line", ["line", LARGE], ids=["small", "large"])
async def test_only_large_samples_need_a_thread(
    line: str, tmp_path: Path, play: Play
) -> None:
    path, count = tmp_path / "a.txt", 1_000_000 // len(line) + 20
    path.write_text(f"{line}\n" * count)
    given = play([1])
    async with aiter(TextDataset(path)) as blocks:
        assert sum([1 async for _ in blocks]) == count
    if line is LARGE:
        assert sum(given) < len(LARGE)
    else:
        assert sum(given) == path.stat().st_size
    assert max(given) <= 1 << 17


async def test_reading_lets_other_tasks_run(path: Path, play: Play) -> None:
    play([1])
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(count_turns())
    async with aiter(JSONLinesDataset(path)) as blocks:
        while await blocks.pull(256):
            assert turns
            turns = 0
    task.cancel()
