"""Count what the first batch enters: modules and functions, from ``iter`` to the batch.

Run: ``python tools/count_path.py``. A function is a code object that was entered, in
any thread; comprehensions and module bodies are not counted. Imports happen before.
torch's loader is counted the same way, in its own package.
"""

import argparse
import asyncio
import importlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.utils.data as torch_data

import aioloader

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
    """Return the functions below ``root`` that ``run`` entered.

    What it returns is dropped afterwards: the end of an iteration is not counted.
    """
    codes: set[CodeType] = set()

    def profile(frame: FrameType, event: str, _arg: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        kept = run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    del kept
    return {
        code
        for code in codes.copy()
        if code.co_name not in _SKIPPED and root in Path(code.co_filename).parents
    }


def main() -> None:
    """Print the counts; with ``--list``, the functions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the functions")
    is_listed = parser.parse_args().list
    importlib.import_module("aioloader._loader.sources")
    ours, torchs = (Path(one.__file__).parent for one in (aioloader, torch_data))
    plain = aioloader.DataLoader(Plain(), batch_size=4)
    with_coroutines = aioloader.DataLoader(Asynchronous(), batch_size=4)
    peer = torch_data.DataLoader(Plain(), batch_size=4)
    cases: dict[str, tuple[Callable[[], object], Path]] = {
        "torch, for": (lambda: first_plain(lambda: peer), torchs),
        "aioloader, for": (lambda: first_plain(lambda: plain), ours),
        "aioloader, async for, async dataset": (
            lambda: first_async(lambda: with_coroutines),
            ours,
        ),
    }
    for name, (run, root) in cases.items():
        run()  # imports and one-time work
        codes = passed(run, root)
        modules = {code.co_filename for code in codes}
        print(f"{name}: {len(modules)} modules, {len(codes)} functions")
        if is_listed:
            for module in sorted(modules):
                names = sorted(
                    code.co_qualname for code in codes if code.co_filename == module
                )
                print(f"  {Path(module).relative_to(root)}: {', '.join(names)}")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
