"""A training that logs what is delivered and saves its state after each batch."""

import asyncio
import json
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import uvloop  # noqa: F401  (each training would import it)

from aioloader import DataLoader, get_worker_info, warm_up
from aioloader.datasets import JSONLinesDataset
from working import Numbers

SAMPLES, BATCH, EPOCHS, SHARDS = 48, 4, 3, 6
# What a training reports, a letter each.
BEGUN, DELIVERED, LOGGED, WRITTEN, SAVED = b"b", b"d", b"l", b"w", b"s"


class Waiting(Numbers):
    """Read on a loop; a few samples take so long that others overtake them."""

    async def __getitem__(self, index: int) -> Any:
        await asyncio.sleep(0.005 if index % 16 == 3 else 0)
        return index


def augmented(sample: Any) -> tuple[int, float]:
    """Return the number of a sample, and what a worker draws for it."""
    index = sample if isinstance(sample, int) else sample["index"]
    info = get_worker_info()
    return index, info.rng.random.random() if info is not None else 0.0


def write_shards(folder: Path) -> None:
    """Write the samples as JSON lines, in shards of different lengths."""
    folder.mkdir()
    bounds = [0, 5, 12, 13, 24, 39, SAMPLES]
    for shard in range(SHARDS):
        numbers = range(bounds[shard], bounds[shard + 1])
        lines = [json.dumps({"index": number}) + "\n" for number in numbers]
        (folder / f"{shard}.jsonl").write_text("".join(lines))


def dataset_of(variant: str, shards: Path) -> Any:
    """Return what a variant reads."""
    if variant == "stream":
        lines = JSONLinesDataset(
            f"{shards}/*.jsonl", shuffle=True, seed=2, interleave=2
        )
        return lines.shuffle(10, seed=3)
    return (Numbers if variant in {"processes", "served"} else Waiting)(SAMPLES)


# Without workers nothing is drawn: with keyed draws nothing would be read ahead.
WORKERS: dict[str, dict[str, Any]] = {
    "processes": {"num_workers": 2},
    "served": {"num_workers": 2, "multiprocessing_context": "forkserver"},
    "loop": {"concurrency": 16},
    "stream": {"num_workers": 2, "workers": "thread"},
    "unordered": {"num_workers": 2, "workers": "thread", "in_order": False},
}


def loader_of(variant: str, shards: Path) -> DataLoader[Any]:
    """Return the loader of a variant; all it draws is the generator's."""
    return DataLoader(
        dataset_of(variant, shards),
        BATCH,
        shuffle=None if variant == "stream" else True,
        transform=augmented,
        generator=torch.Generator().manual_seed(1),
        **WORKERS[variant],
    )


class Training:
    """What is delivered goes to a log; the state tells how much of it counts.

    Args:
        variant: What is read, and how.
        folder: Of the log and the state, and beside the shards.
        report: Where to tell of each step of the work.
    """

    def __init__(self, variant: str, folder: Path, report: Connection) -> None:
        self.loader = loader_of(variant, folder.parent / "shards")
        self._report = report
        self._saved = folder / "state.json"
        self._length = 0
        if self._saved.exists():
            saved = json.loads(self._saved.read_text())
            self.loader.load_state_dict(saved["loader"])
            self._length = saved["length"]
        self._log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.ftruncate(self._log, self._length)
        self._tell(BEGUN)

    def epoch(self) -> int:
        """Return the epoch that is under way or next."""
        epoch: int = self.loader.state_dict()["epoch"]
        return epoch

    def run(self) -> None:
        """Train, in a ``for`` loop."""
        while (epoch := self.epoch()) < EPOCHS:
            for batch in self.loader:
                self._step(epoch, batch)

    async def run_async(self) -> None:
        """Train, in an ``async for`` loop."""
        while (epoch := self.epoch()) < EPOCHS:
            async for batch in self.loader:
                self._step(epoch, batch)

    def _step(self, epoch: int, batch: Any) -> None:
        self._tell(DELIVERED)
        numbers, draws = (part.tolist() for part in batch)
        line = json.dumps([epoch, numbers, draws]) + "\n"
        self._length += os.write(self._log, line.encode())
        self._tell(LOGGED)
        state = {"loader": self.loader.state_dict(), "length": self._length}
        new = self._saved.with_suffix(".new")
        new.write_text(json.dumps(state))
        self._tell(WRITTEN)
        new.replace(self._saved)
        self._tell(SAVED)

    def _tell(self, letter: bytes) -> None:
        self._report.send_bytes(letter)


def run_in_fork(_program: str, arguments: list[str], *_: object, **_s: object) -> int:
    """Run the fork server as ``posix_spawn`` would, without its imports."""
    child = os.fork()
    if child == 0:
        try:
            exec(arguments[-1])
        finally:
            os._exit(1)
    return child


def train(variant: str, folder: Path, report: Connection) -> None:
    """Train from the last saved state to the end, in a session of its own."""
    os.setsid()
    if variant == "served":
        warm_up()
    else:
        os.posix_spawn = run_in_fork  # type: ignore[assignment]
    training = Training(variant, folder, report)
    if variant == "loop":
        asyncio.run(training.run_async())
    else:
        training.run()
