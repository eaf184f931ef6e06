"""Text to batches of tokens: what do packing, mixing and files of tokens cost?

Documents have log-normal lengths (6.2, 1.1), samples 4,096 tokens. Each figure is
beside the plainest numpy code that makes the same arrays, in one process, in turn:
tokens per second and the median of the ratios. Grain's ``ConcatThenSplit`` and its
first-fit packing with 64 bins run if it is installed (``make peers``).
"""

from __future__ import annotations

import asyncio
import collections
import importlib.util
import math
import os
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from aioloader import DataLoader
from aioloader.datasets import ParquetDataset, Stream, TokenDataset, from_iterable, mix
from harness import Metric, Question, main_in_one_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from harness import Rounds

LENGTH, DOCUMENTS, BATCH, IGNORED = 4_096, 6_000, 8, -100
Sample = dict[str, Any]


def documents(seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    sizes = np.maximum(1, rng.lognormal(6.2, 1.1, DOCUMENTS).astype(np.int64))
    return [rng.integers(1, 50_000, size) for size in sizes]


# -- the plain code --------------------------------------------------------------------


def concatenated(texts: Iterable[Any]) -> Iterator[Sample]:
    """Yield the samples of ``pack(LENGTH)``, by the plainest loop over arrays."""
    tokens, labels, starts, held = list[Any](), list[Any](), list[Any](), 0
    for text in texts:
        tokens.append(text)
        labels.append(np.append(text[1:], IGNORED))
        starts.append(np.full(len(text), held))
        held += len(text)
        if held < LENGTH:
            continue
        every = [np.concatenate(one) for one in (tokens, labels, starts)]
        for at in range(0, held - LENGTH + 1, LENGTH):
            part = slice(at, at + LENGTH)
            first = np.maximum(every[2][part], at)
            yield {
                "input_ids": every[0][part],
                "labels": every[1][part],
                "position_ids": np.arange(at, at + LENGTH) - first,
            }
        cut = held // LENGTH * LENGTH
        tokens, labels = [every[0][cut:]], [every[1][cut:]]
        starts, held = [np.maximum(every[2][cut:], cut) - cut], held - cut


def batches(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Yield batches of stacked arrays."""
    batch: list[Sample] = []
    for sample in samples:
        batch.append(sample)
        if len(batch) == BATCH:
            yield {key: np.stack([one[key] for one in batch]) for key in sample}
            batch = []


def encoded(path: str, tokenizer: Any) -> Iterator[Any]:
    """Yield the tokens of texts in Parquet, by the tokenizer's own batches."""
    for block in parquet.ParquetFile(path).iter_batches(256, columns=["text"]):
        for one in tokenizer.encode_batch(block.column(0).to_pylist()):
            yield np.array(one.ids)


def tokens_of(samples: Iterable[Sample]) -> int:
    return sum(math.prod(one["input_ids"].shape) for one in samples)


async def pulled(stream: Any) -> int:
    """Return how many tokens a stream has, read in blocks, as a loader reads it."""
    iterator, found = aiter(stream), 0
    while block := await iterator.pull(64):
        found += tokens_of(block)
    await iterator.aclose()
    return found


def consumed(samples: Any) -> int:
    """Return how many tokens a stream, a loader or a generator has."""
    if isinstance(samples, Stream):
        return asyncio.run(pulled(samples))
    return tokens_of(samples)


def speed(samples: Any) -> float:
    """Return millions of tokens per second of time."""
    began = time.perf_counter()
    return consumed(samples) / (time.perf_counter() - began) / 1e6


def cpu(samples: Any) -> float:
    began = time.process_time()
    consumed(samples)
    return time.process_time() - began


async def listed(stream: Any) -> list[Sample]:
    return [sample async for sample in stream]


# -- peers -----------------------------------------------------------------------------


def grain_samples(texts: list[Any], kind: str) -> Iterator[Sample]:
    """Yield Grain's samples; ``kind`` names its class."""
    import grain  # noqa: PLC0415  (a peer, which may be missing)

    packing = importlib.import_module("grain.experimental")
    source = grain.MapDataset.source([{"input_ids": one} for one in texts])
    options: Any = {"length_struct": {"input_ids": LENGTH}}
    if kind == "FirstFitPackIterDataset":
        options["num_packing_bins"] = 64
        source = source.map(lambda one: {"input_ids": one["input_ids"][:LENGTH]})
    yield from getattr(packing, kind)(source.to_iter_dataset(), **options)


# -- questions -------------------------------------------------------------------------


def measure_speed(rounds: int) -> Rounds:
    """Measure samples made of documents in memory, and of texts in Parquet."""
    texts = documents()
    rows: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "concat": (
            lambda: from_iterable(texts).pack(LENGTH),
            lambda: concatenated(texts),
        ),
        "concat, batches of 8 by a loader": (
            lambda: DataLoader(from_iterable(texts).pack(LENGTH), BATCH),
            lambda: batches(concatenated(texts)),
        ),
    }
    if importlib.util.find_spec("grain") is not None:
        rows["concat, and Grain's"] = (
            rows["concat"][0],
            lambda: grain_samples(texts, "ConcatThenSplitIterDataset"),
        )
        rows["best fit, and Grain's 64 bins"] = (
            lambda: from_iterable(texts).pack(LENGTH, "best_fit"),
            lambda: grain_samples(texts, "FirstFitPackIterDataset"),
        )
    with tempfile.TemporaryDirectory() as folder:
        if importlib.util.find_spec("tokenizers") is not None:
            path, tokenizer = f"{folder}/texts.parquet", written(folder)
            rows["text of Parquet, batches of 8"] = (
                lambda: DataLoader(
                    ParquetDataset(path, ["text"])
                    .tokenize(tokenizer, "text")
                    .pack(LENGTH),
                    BATCH,
                ),
                lambda: batches(concatenated(encoded(path, tokenizer))),
            )
        found: Rounds = {name: [] for name in rows}
        for _ in range(rounds):
            for name, (mine, other) in rows.items():
                figures = {"ours": speed(mine()), "other": speed(other())}
                figures["ratio"] = figures["ours"] / figures["other"]
                found[name].append(figures)
    return found


def written(folder: str) -> Any:
    """Write the standard library's text as Parquet; return a tokenizer of it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers  # noqa: PLC0415

    files = [*Path(sysconfig.get_path("stdlib")).glob("*.py")]
    texts = [one.read_text(errors="ignore") for one in files] * 2
    parquet.write_table(pa.table({"text": texts}), f"{folder}/texts.parquet")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.train_from_iterator(texts[:40], trainers.BpeTrainer(vocab_size=2_000))
    return tokenizer


def filled() -> float:
    """Return which part of best fit's samples is not padding, in percent."""
    samples = asyncio.run(listed(from_iterable(documents()).pack(LENGTH, "best_fit")))
    # Documents have no token 0.
    return 100 * float(np.mean([np.mean(one["input_ids"] > 0) for one in samples]))


def mixed(read: Callable[[Any], Any]) -> float:
    """Return the CPU time of a mixture of three, by that of them alone."""
    sources = [from_iterable(documents(seed)).pack(LENGTH) for seed in range(3)]
    alone = sum(cpu(read(one)) for one in sources)
    return cpu(read(mix(sources))) / alone


def in_batches(stream: Any) -> Any:
    return DataLoader(stream, BATCH)


def state_ms() -> float:
    """Return the time of ``state_dict``, of 24 readers of three packed sources."""
    sources = [from_iterable(documents(seed)).pack(LENGTH) for seed in range(3)]
    loader: Any = DataLoader(mix(sources).readers(24), 24)
    with loader:
        next(iter(loader))
        time.sleep(0.5)  # its window is full then
        times = []
        for _ in range(200):
            began = time.perf_counter()
            loader.state_dict()
            times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


FIRST = """
import resource, sys, time
from aioloader import DataLoader, ShuffledIndices
from aioloader.datasets import TokenDataset

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

before, began = peak(), time.perf_counter()
tokens = TokenDataset(sys.argv[1], 4096, dtype="uint16")
loader = DataLoader(tokens, 8, sampler=ShuffledIndices(len(tokens), seed=0))
next(iter(loader))
print(time.perf_counter() - began, peak() - before)
"""


def first_batch(count: int) -> tuple[float, float]:
    """Return seconds to the first batch of a file of so many tokens, and megabytes."""
    with tempfile.NamedTemporaryFile() as file:
        os.truncate(file.name, 2 * count)  # without content
        command = [sys.executable, "-c", FIRST, file.name]
        said = subprocess.run(command, check=True, capture_output=True, text=True)
        seconds, megabytes = map(float, said.stdout.split())
    return seconds, megabytes


def shuffled() -> float:
    """Return the speed of shuffled batches of a file of tokens, by numpy's."""
    with tempfile.NamedTemporaryFile() as file:
        np.random.default_rng(0).integers(1, 50_000, 50_000_000, np.uint16).tofile(file)
        file.flush()
        tokens = TokenDataset(file.name, LENGTH, dtype=np.uint16)
        order = np.random.default_rng(1).permutation(len(tokens)).tolist()

        def plain() -> Iterator[Sample]:
            mapped = np.memmap(file.name, np.uint16, "r")
            for number in order:
                part = mapped[number * LENGTH : (number + 1) * LENGTH + 1]
                part = part.astype(np.int64)
                yield {
                    "input_ids": part[:-1],
                    "labels": part[1:],
                    "position_ids": np.arange(LENGTH),
                }

        mine = speed(DataLoader(tokens, BATCH, sampler=order))
        return mine / speed(batches(plain()))


TAILS = ["drop", "wrap", "pad"]
ENDING = """
import sys, time
import torch.distributed as dist
from aioloader import DataLoader
from aioloader.datasets import TextDataset

folder, port, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)

def seconds(tail):
    lines = TextDataset(f"{folder}/*.txt").map(int).readers(3)
    batches, began = 0, 0.0
    dist.barrier()
    for _ in DataLoader(lines, 8, rank=rank, world_size=3, tail=tail):
        began = began or time.perf_counter()
        batches += 1
        time.sleep(0.002)  # a step
    return (time.perf_counter() - began) / batches

seconds("drop")
for _ in range(5):
    print(*map(seconds, ["uneven", *sys.argv[4:]]))
dist.destroy_process_group()
"""


def ending_us() -> dict[str, float]:
    """Return, by tail, how much longer a step takes if three ranks end together."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(7):
            lines = "".join(f"{n}\n" for n in range(1_500 + 500 * number))
            Path(f"{folder}/{number}.txt").write_text(lines)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", ENDING, folder, port, str(rank), *TAILS],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(3)
        ]
        said = [one.communicate()[0].split() for one in ranks]
    assert not any(one.returncode for one in ranks), "a rank has failed"
    each = np.array(said, float).reshape(3, -1, 1 + len(TAILS))  # rank, turn, tail
    more = np.median(each[..., 1:] - each[..., :1], axis=(0, 1)) * 1e6
    return dict(zip(TAILS, more.tolist(), strict=True))


def measure_costs(rounds: int) -> Rounds:
    """Measure what has a figure of its own."""
    found: Rounds = collections.defaultdict(list)
    for _ in range(rounds):
        each = [(first_batch(10**7), first_batch(10**10)) for _ in range(7)]
        ends = ending_us().items()
        ratio = statistics.median(large[0] / small[0] for small, large in each)
        for name, value in {
            "best fit, filled, %": filled(),
            "mix of three by a loader, CPU by that of them alone": mixed(in_batches),
            "the same in pulls of 64 without a loader": mixed(lambda stream: stream),
            "state_dict, 24 readers of three sources, ms": state_ms(),
            "first batch of 10^10 tokens by that of 10^7": ratio,
            "memory of 10^10 tokens, MB": max(large[1] for _, large in each),
            "shuffled batches of a file by numpy's": shuffled(),
            **{f"three ranks, tail={tail!r}, us per batch": us for tail, us in ends},
        }.items():
            found[name].append({"value": value})
    return dict(found)


QUESTIONS: dict[Question, Callable[[int], Rounds]] = {
    Question(
        name="pretraining",
        text="Documents to samples of 4,096 tokens: how fast, beside a plain loop?",
        contenders={},
        metrics=[
            Metric("ours", "million tokens/s", ",.1f"),
            Metric("other", "of the other", ",.1f"),
            Metric("ratio", "ratio", ",.2f"),
        ],
    ): measure_speed,
    Question(
        name="pretraining_costs",
        text="What do mixtures, states and files of tokens cost?",
        contenders={},
        metrics=[Metric("value", "value", ",.2f")],
    ): measure_costs,
}

if __name__ == "__main__":
    main_in_one_process(QUESTIONS)
