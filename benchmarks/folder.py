"""Folder: how fast is a folder of JPEGs read, by two workers of one machine?

What most scripts do: 1,024 files in the page cache, 500 x 375, decoded by Pillow, cut
at random, resized to 224, shuffled, in batches of 64; two worker processes, and
defaults for all else. Three epochs from the making of the loader on, workers started
for each.
``quiet``: the machine has nothing else to do. ``busy``: four other processes compute
without a pause, each in a session of its own, as the jobs of other users are.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset

from harness import Contender, Figures, Metric, Options, Question, Target, main
from pictures import PICTURES, jpegs, with_pillow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FILES, EPOCHS, BUSY = 1024, 3, 4
SPIN = "while True: sum(range(10_000))"
SETTINGS: dict[str, Any] = {"batch_size": 64, "shuffle": True, "num_workers": 2}


class Folder(Dataset[tuple[torch.Tensor, int]]):
    """Pictures of a folder per class, as people write it."""

    def __init__(self, root: str) -> None:
        self._paths = sorted(Path(root).rglob("*.jpg"))

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path = self._paths[index]
        return prepare((path.read_bytes(), int(path.parent.name)))


def prepare(sample: tuple[Any, int]) -> tuple[torch.Tensor, int]:
    data, label = sample
    pixels = torch.from_numpy(with_pillow(bytes(data)))
    return pixels.permute(2, 0, 1).contiguous(), label


def torchs(root: str) -> Any:
    return DataLoader(Folder(root), **SETTINGS)


def ours(root: str) -> Any:
    import aioloader  # noqa: PLC0415

    return aioloader.DataLoader(Folder(root), **SETTINGS)


def our_files(root: str) -> Any:
    """Build what the README shows, with workers that decode."""
    import aioloader  # noqa: PLC0415
    from aioloader.datasets import FileDataset  # noqa: PLC0415

    files = FileDataset("*/*.jpg", root=root).class_folders()
    return aioloader.DataLoader(files, transform=prepare, **SETTINGS)


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Keep the cores busy with as many processes of other sessions."""
    started = [
        subprocess.Popen([sys.executable, "-c", SPIN], start_new_session=True)
        for _ in range(count)
    ]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def run(make: Callable[[str], Any], busy: int, options: Options) -> Figures:
    torch.set_num_threads(1)
    epochs = 1 if options.quick else EPOCHS
    with neighbours(busy):
        start, first, count = time.perf_counter(), 0.0, 0
        loader = make(options.url)
        for _ in range(epochs):
            for pictures, _labels in loader:
                first = first or time.perf_counter() - start
                count += len(pictures)
        seconds = time.perf_counter() - start
        getattr(loader, "close", int)()
    if count != epochs * FILES:
        raise RuntimeError(f"{count} pictures of {epochs * FILES} came")
    return {"rate": count / seconds, "first_ms": first * 1e3}


@contextlib.contextmanager
def serve() -> Iterator[str]:
    """Write the folder."""
    with tempfile.TemporaryDirectory() as root:
        bodies = jpegs()
        for number in range(FILES):
            path = Path(root) / str(number % 2) / f"{number}.jpg"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(bodies[number % PICTURES])
        yield root


CASES = {"quiet": 0, "busy": BUSY}
MAKERS = {"aioloader": ours, "aioloader files": our_files, "torch": torchs}

QUESTION = Question(
    name="folder",
    text="How fast is a folder of JPEGs read, by two workers?",
    contenders={
        f"{case}: {name}": Contender(partial(run, make, busy), against=f"{case}: torch")
        for case, busy in CASES.items()
        for name, make in MAKERS.items()
    },
    metrics=[
        Metric("rate", "images/s"),
        Metric("first_ms", "first batch, ms", higher=False),
    ],
    targets=[Target(f"{case}: aioloader", [f"{case}: torch"], 1.0) for case in CASES],
    rounds=5,
    serve=serve,
)

if __name__ == "__main__":
    main(QUESTION)
