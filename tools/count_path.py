"""Count what the first batch enters: functions and modules, from making the loader.

Run: ``python tools/count_path.py``. A function is a code object that was entered, in
any thread; comprehensions and module bodies are not counted. Imports happen before.
torch's loader is counted the same way, in its own package. ``tests/unit/test_path.py``
holds the counts: they only go down.
"""

import argparse
import asyncio
import contextlib
import importlib
import io
import itertools
import os
import sys
import tarfile
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.utils.data as torch_data

import aioloader
from aioloader.datasets import TarDataset

_SKIPPED = {"<module>", "<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}


class Plain:
    """A map-style dataset of numbers."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        return index


class Asynchronous(Plain):
    """The same, read by coroutines."""

    async def __getitem__(self, index: int) -> int:  # type: ignore[override]
        await asyncio.sleep(0)
        return index


def first_plain(make: Callable[[], Any]) -> object:
    """Take the first batch by ``for``; return the iterator."""
    iterator = iter(make())
    next(iterator)
    return iterator


def first_async(make: Callable[[], Any]) -> object:
    """Take the first batch by ``async for``; return the iterator."""

    async def main() -> object:
        iterator = aiter(make())
        await anext(iterator)
        return iterator

    return asyncio.run(main())


def passed(run: Callable[[], object], root: Path) -> set[CodeType]:
    """Return the functions below ``root`` that ``run`` entered."""
    codes: set[CodeType] = set()

    def profile(frame: FrameType, event: str, _arg: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    entered(run, profile)
    return {
        code
        for code in codes.copy()
        if code.co_name not in _SKIPPED and root in Path(code.co_filename).parents
    }


def followed(run: Callable[[], object], root: Path) -> dict[int, list[str]]:
    """Return the functions below ``root``, in the order of their first calls.

    By process: those of workers that were forked from this one are followed too.
    """
    # A thread may be slower to write its function than another one is to call the next,
    # or to end the run: each writes its own.
    seen: defaultdict[tuple[int, int], set[CodeType]] = defaultdict(set)
    numbers = itertools.count()
    # Threads and workers may still write as they end.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:

        def profile(frame: FrameType, event: str, _arg: Any) -> None:
            code, pid, number = frame.f_code, os.getpid(), next(numbers)
            known = seen[pid, threading.get_ident()]
            if event != "call" or code in known:
                return
            known.add(code)
            if root in Path(code.co_filename).parents:
                with contextlib.suppress(OSError):  # the folder is gone: enough is seen
                    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
                    file = os.open(f"{folder}/{pid}", flags)
                    os.write(file, f"{number:09} {code.co_qualname}\n".encode())
                    os.close(file)

        entered(run, profile)
        return {
            int(path.name): [
                *dict.fromkeys(
                    line[10:] for line in sorted(path.read_text().splitlines())
                )
            ]
            for path in Path(folder).iterdir()
        }


def entered(run: Callable[[], object], profile: Callable[..., None]) -> None:
    """Call ``run``, with a profile of all threads.

    What it returns is dropped afterwards: the end of an iteration is not profiled.
    """
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        kept = run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    del kept


def first_of_tar() -> object:
    """Take the first batch of a tar file by ``async for``."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples.tar"
        with tarfile.open(path, "w") as archive:
            for number in range(64):
                member = tarfile.TarInfo(f"{number:06}.txt")
                member.size = 1
                archive.addfile(member, io.BytesIO(b"x"))
        dataset = TarDataset(str(path))
        return first_async(
            lambda: aioloader.DataLoader(dataset, batch_size=4, collate_fn=list)
        )


# From the making of a loader to its first batch, in this process.
CASES: dict[str, Callable[[], object]] = {
    "for": lambda: first_plain(lambda: aioloader.DataLoader(Plain(), batch_size=4)),
    "for, two workers": lambda: first_plain(
        lambda: aioloader.DataLoader(Plain(), batch_size=4, num_workers=2)
    ),
    "async for, async dataset": lambda: first_async(
        lambda: aioloader.DataLoader(Asynchronous(), batch_size=4)
    ),
    "async for, tar": first_of_tar,
}


# Where batches may be made: see "One iteration" in ``CONTRIBUTING.md``.
RUNNERS: dict[str, Callable[[], object]] = {
    "the caller's thread": CASES["for"],
    "the caller's thread, with a transform": lambda: first_plain(
        lambda: aioloader.DataLoader(Plain(), batch_size=4, transform=float)
    ),
    "a private thread": lambda: first_async(
        lambda: aioloader.DataLoader(Plain(), batch_size=4)
    ),
    "a private loop": lambda: first_plain(
        lambda: aioloader.DataLoader(Asynchronous(), batch_size=4)
    ),
    "the caller's loop": lambda: first_async(
        lambda: aioloader.DataLoader(Asynchronous(), batch_size=4, loop="caller")
    ),
    "threads": lambda: first_plain(
        lambda: aioloader.DataLoader(Plain(), 4, num_workers=2, workers="thread")
    ),
    "an executor": lambda: first_plain(
        lambda: aioloader.DataLoader(
            Plain(), 4, num_workers=1, workers=ThreadPoolExecutor(1)
        )
    ),
    "processes": CASES["for, two workers"],
}


def count(name: str) -> set[CodeType]:
    """Return the functions of aioloader that one of ``CASES`` enters."""
    importlib.import_module("aioloader._loader.sources")
    run = CASES[name]
    run()  # imports and one-time work
    return passed(run, Path(aioloader.__file__).parent)


def main() -> None:
    """Print the counts; or the functions, in order, if one runner is followed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the functions")
    parser.add_argument("--follow", choices=RUNNERS, help="where batches are made")
    given = parser.parse_args()
    if given.follow is not None:
        run = RUNNERS[given.follow]
        run()  # imports and one-time work
        for process, names in followed(run, Path(aioloader.__file__).parent).items():
            where = "this process" if process == os.getpid() else "a worker"
            print(f"{where}:", *dict.fromkeys(names), sep="\n    ")
        return
    is_listed = given.list
    root = Path(torch_data.__file__).parent
    torchs = lambda: first_plain(lambda: torch_data.DataLoader(Plain(), 4))  # noqa: E731
    torchs()
    found = {"torch, for": passed(torchs, root)}
    for name, codes in (found | {name: count(name) for name in CASES}).items():
        modules = {code.co_filename for code in codes}
        print(f"{name}: {len(codes)} functions in {len(modules)} modules")
        if is_listed:
            for module in sorted(modules):
                names = sorted(
                    code.co_qualname for code in codes if code.co_filename == module
                )
                print(f"  {module}: {', '.join(names)}")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
