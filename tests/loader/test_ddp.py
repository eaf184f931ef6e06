"""Two ranks of torchrun share a dataset: every sample once, and as torch deals them.

As a program this file is one rank; it writes what it was delivered.
"""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from aioloader import DataLoader
from aioloader.datasets import TextDataset

pytestmark = pytest.mark.slow

Delivered = dict[str, list[list[int]]]

SAMPLES, BATCH, EPOCHS, SHARDS = 21, 3, 2, 5


# -- a rank ---------------------------------------------------------------------------


class Numbers:
    """Read in this process."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


def loaders(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield a loader of each kind, by name."""
    auto: Any = {"shuffle": True, "rank": "auto"}
    for tail in ("wrap", "pad", "uneven"):
        yield tail, DataLoader(Numbers(), BATCH, tail=tail, **auto)
    yield "workers", DataLoader(Numbers(), BATCH, num_workers=1, **auto)
    lines = TextDataset(f"{folder}/*.txt", shuffle=True).map(int)
    yield "stream", DataLoader(lines, BATCH, rank="auto", tail="pad")
    yield "in turns", DataLoader(lines.readers(4), BATCH, rank="auto", tail="pad")
    yield "not asked, shuffled", DataLoader(Numbers(), BATCH, shuffle=True)
    yield "not asked, stream", DataLoader(lines, BATCH)


def read(loader: Any) -> list[list[int]]:
    """Return the numbers of all epochs, but for those that only stand in."""
    epochs = []
    for _ in range(EPOCHS):
        found: list[int] = []
        for batch in loader:
            numbers = batch[0][batch[1]] if isinstance(batch, tuple) else batch
            found += numbers.tolist()
        epochs.append(found)
    return epochs


def be_rank(folder: Path) -> None:
    """Read everything as one rank."""
    made = list(loaders(folder))  # before the group
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())  # ranks agree, however each is seeded
    found: dict[str, Any] = {}
    for name, loader in made:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found[name] = read(loader)
        found[f"{name}: warnings"] = [str(one.message) for one in caught]
    if not dist.get_rank():  # a collective would wait for the other ranks for ever
        found["one validates"] = read(DataLoader(Numbers(), BATCH, num_workers=1))
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


# -- the tests ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Delivered]:
    """Run two ranks; return what each was delivered."""
    folder = tmp_path_factory.mktemp("ranks")
    for shard in range(SHARDS):
        numbers = range(shard, SAMPLES, SHARDS)
        (folder / f"{shard}.txt").write_text("".join(f"{n}\n" for n in numbers))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", __file__, str(folder)),
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def of_both(ranks: list[Delivered], name: str) -> list[list[int]]:
    """Return the sorted numbers of each epoch, of both ranks."""
    one, other = (rank[name] for rank in ranks)
    return [sorted(a + b) for a, b in zip(one, other, strict=True)]


@pytest.mark.parametrize("name", ["pad", "uneven", "stream", "in turns"])
def test_every_sample_once(ranks: list[Delivered], name: str) -> None:
    """In each epoch, in an order of its own; no rank is idle."""
    assert of_both(ranks, name) == [list(range(SAMPLES))] * EPOCHS
    for rank in ranks:
        first, second = rank[name]
        assert first
        assert first != second


@pytest.mark.parametrize("name", ["wrap", "workers"])
def test_one_stands_in(ranks: list[Delivered], name: str) -> None:
    """The first of the order, where nothing else is asked for; wherever it is read."""
    for epoch, found in enumerate(of_both(ranks, name)):
        first = ranks[0][name][epoch][0]
        assert found == sorted([*range(SAMPLES), first])
    assert [rank[name] for rank in ranks] == [rank["wrap"] for rank in ranks]


def test_nothing_is_dealt_unasked(ranks: list[Delivered]) -> None:
    """As with torch's loader: each rank has it all; who trains so is warned, once."""
    everything = list(range(SAMPLES))
    for number, rank in enumerate(ranks):
        for name in ("not asked, shuffled", "not asked, stream"):
            assert list(map(sorted, rank[name])) == [everything] * EPOCHS
            (warning,) = rank[f"{name}: warnings"]
            assert "runs 2 ranks" in str(warning)
        quiet = [name for name in rank if name.endswith(": warnings")]
        assert [name for name in quiet if rank[name]] == [
            "not asked, shuffled: warnings",
            "not asked, stream: warnings",
        ]
        assert ("one validates" in rank) == (number == 0)
    assert ranks[0]["one validates"] == [everything] * EPOCHS


if __name__ == "__main__":
    be_rank(Path(sys.argv[1]))
