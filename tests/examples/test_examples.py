"""The examples run, end to end."""

import ast
import asyncio
import importlib
import io
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx
import pytest
import torch
from PIL import Image

from aioloader.datasets import Piece, Source, Version
from datasets.pg import Server, server
from python_process import python, reserved_port
from scripts.running import KERNEL, end, start

__all__ = ["server"]


FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
# The demo writes, trains, chooses a device and draws; the other has a model.
MAX_LINES = {"train_digits": 100, "pretrain": 80, "preempt": 70, "train_tar_s3": 70}


# Imported where they are used, before what is left is counted: scikit-learn takes long.
@pytest.fixture(scope="module")
def service() -> Any:
    return importlib.import_module("service")


@pytest.fixture(scope="module")
def train_digits() -> Any:
    return importlib.import_module("train_digits")


def code_lines(source: str) -> int:
    """Count lines that are neither blank nor of a docstring."""
    numbers = {number for number, line in enumerate(source.splitlines(), 1) if line}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            numbers -= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return len(numbers)


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_tested(path: Path) -> None:
    """At most 60 lines; its docstring says how to run it, and a test does."""
    source = path.read_text(encoding="utf-8")
    assert code_lines(source) <= MAX_LINES.get(path.stem, 60)
    said = ast.get_docstring(ast.parse(source)) or ""
    assert f"examples/{path.name}" in said or "make demo" in said or "not run" in said
    tests = [*Path(__file__).parents[1].rglob("test_*.py"), *EXAMPLES]
    texts = (test.read_text(encoding="utf-8") for test in tests if test != path)
    assert any(re.search(rf"\b{path.stem}\b", text) for text in texts)


@pytest.mark.slow
async def test_a_service_classifies_a_folder(service: Any, tmp_path: Path) -> None:
    """In the order of their names; without any it answers 404."""
    digits = service.load_digits()
    pixels = torch.from_numpy(digits.images).float() / 16
    model = service.train(pixels, torch.from_numpy(digits.target))
    for number in range(100):
        picture = Image.fromarray(digits.images[number].astype("uint8"))
        picture.save(tmp_path / f"{number:02}.png")
    app = service.make_app(str(tmp_path), model)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
        answer = await client.get("/classify")
        missing = await client.get("/classify", params={"prefix": "other"})
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert [line["name"] for line in lines] == [f"{n:02}.png" for n in range(100)]
    predicted = torch.tensor([line["label"] for line in lines])
    assert predicted.equal(model(pixels[:100]).argmax(1))
    assert predicted.eq(torch.from_numpy(digits.target[:100])).sum() >= 95
    assert missing.status_code == 404


class Endless(Source):
    """Pictures of which only the first ``quick`` ever arrive."""

    def __init__(self, quick: int) -> None:
        file = io.BytesIO()
        Image.new("L", (8, 8)).save(file, "PNG")
        self.data = file.getvalue()
        self.quick = quick
        self.reading = 0
        self.waits = asyncio.Event()

    async def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        for number in range(1000):
            yield f"{number:03}.png", len(self.data)

    async def get(self, key: str, start: int, stop: int) -> Piece:
        self.reading += 1
        try:
            if int(key.removesuffix(".png")) >= self.quick:
                self.waits.set()
                await asyncio.Event().wait()
        finally:
            self.reading -= 1
        return Piece(self.data[start:stop], Version(len(self.data)))


@pytest.mark.slow
@pytest.mark.parametrize("client", ["waits for a batch", "reads none", "of ASGI 2.4"])
async def test_a_disconnect_ends_a_services_reads(client: str, service: Any) -> None:
    """Wherever the response is; nothing of its loader is left."""
    store = Endless(32 if client == "waits for a batch" else 1000)
    app = service.make_app(store, torch.nn.Flatten())
    requested = iter([{"type": "http.request", "body": b"", "more_body": False}])
    answered, left = asyncio.Event(), asyncio.Event()

    async def receive() -> Any:
        for message in requested:
            return message
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message.get("body"):
            answered.set()
            if client != "waits for a batch":
                await (left if client == "of ASGI 2.4" else asyncio.Event()).wait()
                raise OSError

    version = "2.4" if client == "of ASGI 2.4" else "2.3"
    path = {"path": "/classify", "query_string": b"", "headers": []}
    scope = {"type": "http", "method": "GET", "asgi": {"spec_version": version}, **path}
    before = asyncio.all_tasks()
    request = asyncio.ensure_future(app(scope, receive, send))
    await answered.wait()
    if client == "waits for a batch":
        await store.waits.wait()
    left.set()
    await asyncio.gather(request, return_exceptions=True)  # ASGI 2.4: Starlette raises
    assert store.reading == 0
    assert asyncio.all_tasks() == before


@pytest.mark.slow
def test_training_reaches_its_accuracy(
    train_digits: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo learns, says what share of the time it waited, and draws its losses."""
    url, path = (tmp_path / "digits").as_uri(), tmp_path / "loss.svg"
    (tmp_path / "digits").mkdir()
    assert asyncio.run(train_digits.train(url, 6, path)) >= 0.95
    *lines, shares, confidence, drawn = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:6]] == [
        ["epoch", str(n)] for n in range(6)
    ]
    assert re.search(r"samples/s  waited for data [\d.]+% of the time", lines[5])
    assert lines[6].endswith("of the time.")
    assert shares.startswith("Accelerator utilisation: ")
    assert re.match(r"Measured over the latest 2\d batches", confidence)
    assert drawn == f"the loss curve: {path}"
    (line,) = ElementTree.parse(path).iterfind("{*}polyline")
    heights = [float(point.split(",")[1]) for point in line.attrib["points"].split()]
    assert len(heights) == 6 * 23  # one for each step
    assert min(heights) == 0  # the largest loss, at the top
    assert sum(heights[-23:]) > sum(heights[:23]) + 23 * 100


@pytest.mark.slow
def test_the_demo_says_that_it_falls_back_to_the_cpu(
    train_digits: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_digits.choose_device("cpu") == "cpu"
    device = train_digits.choose_device("xpu:0")
    assert device == ("xpu:0" if torch.xpu.is_available() else "cpu")
    said = "no xpu device here: training on the CPU instead of 'xpu:0'\n"
    assert capsys.readouterr().out == ("" if torch.xpu.is_available() else said)


# On loopback only.
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
RANKS = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def ran(name: str, *options: str, by: Sequence[str] = ()) -> list[str]:
    """Run an example as a user does; return what it printed."""
    env = {**os.environ, **(RANKS if by else {})}
    done = python(*by, FOLDER / name, *options, check=True, timeout=140, env=env)
    assert "HTTP/1.1" not in done.stderr  # a stand-in's server logs no requests
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["stream_tar", "stream_parquet", "stream_sql", "image_folder", "pack_pictures"],
)
def test_examples_of_streams_learn_from_all_samples(name: str) -> None:
    """From a bucket that moto serves, from files, from SQLite."""
    lines = ran(f"{name}.py", "--epochs", "4")
    if name == "pack_pictures":
        assert lines.pop(0) == "1,797 samples in 8 shards: shard-{000000..000007}.tar"
    assert len(lines) == 4
    assert all("1797" in line for line in lines)
    assert float(lines[-1].split()[-1]) > 0.85


@pytest.mark.slow
def test_tars_in_a_bucket_are_shuffled_exactly() -> None:
    """Each sample once, by single requests, by blocks, and resumed in mid-epoch."""
    lines = ran("indexed_tars.py")
    pattern = r"(.+): 1797, each once: True, accuracy ([\d.]+)"
    matches = [match for line in lines if (match := re.fullmatch(pattern, line))]
    names = ["all shuffled", "by blocks", "resumed after 10 batches"]
    assert [match[1] for match in matches] == names
    assert float(matches[-1][2]) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zarr_arrays", "lance_rows"])
def test_zarr_and_lance_are_read_as_datasets(name: str) -> None:
    """Each in a process of its own: Lance starts threads, and zarr a loop."""
    module = "lance" if name == "lance_rows" else "zarr"
    if importlib.util.find_spec(module) is None:  # not imported: it warns at forks
        pytest.skip(f"{module} is not installed")
    assert "which add up to 32,640" in ran(f"{name}.py")[0]


@pytest.mark.slow
def test_a_service_streams_rows_beside_other_requests(server: Server) -> None:
    lines = ran("service_rows.py", server.url())
    assert re.fullmatch(r"mean 250.05; answered \d+ other requests meanwhile", lines[0])


@pytest.mark.slow
@pytest.mark.one_loop
async def test_rows_of_postgresql_become_features(server: Server) -> None:
    """Arrays, JSONB and vectors, as they were written; resumed in the middle."""
    example = importlib.import_module("postgres_features")
    lines = await asyncio.to_thread(ran, "postgres_features.py", server.url())
    shapes = "'prices': (64, 7), 'stars': (64,), 'tags': (64, 3), 'embedding': (64, 8)"
    assert lines == [f"{{'id': (64,), {shapes}}}", "5000 rows, 5000 of them different"]
    async with example.make_loader(server.url()) as loader:
        async for batch in loader:
            ids = batch["id"]
            days = torch.arange(1, 8)
            prices = (ids[:, None] + days) * (days <= 1 + ids[:, None] % 7)
            assert batch["prices"].equal(prices.float())
            assert batch["stars"].equal((ids % 5).double())
            assert batch["tags"].equal(
                torch.tensor([1.0, 1.0, 0.0]).expand(len(ids), 3)
            )
            assert batch["embedding"].equal(ids[:, None].expand(len(ids), 8).float())


@pytest.mark.slow
def test_figures_are_logged_beside_the_loss() -> None:
    """Every eighth step; no progress bar where there is no terminal."""
    number = r"[\d.e+-]+"
    figures = "".join(
        f", loader/{name} {number}"
        for name in ("wait_share", "batches_per_second", "in_flight")
    )
    for step, line in zip(range(0, 32, 8), ran("log_figures.py"), strict=True):
        assert re.fullmatch(f"step {step}: loss {number}{figures}", line)


@pytest.mark.slow
def test_a_killed_training_resumes_to_the_same_losses() -> None:
    """Killed by SIGKILL in its second epoch."""
    (line,) = ran("resume.py")
    match = re.fullmatch(r"87 (\d+) 87 losses saved; the same: True", line)
    assert match is not None
    assert 41 <= int(match[1]) < 87


@pytest.mark.slow
def test_packed_text_resumes_to_the_same_losses() -> None:
    """In mid-epoch, from the last checkpoint; the losses fall."""
    lines = ran("pack_text.py")
    losses = [float(line.split()[-1]) for line in lines if line.startswith("step")]
    assert losses[7] < losses[0]
    assert losses == [*losses[:8], *losses[:8]]
    resumed = [*lines[:3], "resumed after step 30", *lines[3:8]]
    assert lines[8:] == [*resumed, "the same losses after the stop: True"]


@pytest.mark.slow
def test_two_ranks_see_every_scan_once_an_epoch() -> None:
    lines = ran("ddp.py", by=TORCHRUN)
    assert [line.partition(",")[0] for line in lines] == [
        f"epoch {epoch}: 1797 scans once" for epoch in range(4)
    ]
    assert all("on 2 ranks" in line for line in lines)
    assert float(lines[-1].split()[-1]) < float(lines[0].split()[-1]) / 2


@pytest.mark.slow
def test_shards_on_s3_train_a_resnet() -> None:
    """Epochs end after 24 steps, though one rank has more; resumed at step 30."""
    lines = ran("train_tar_s3.py")
    matches = [re.fullmatch(r"step (\d+): loss ([\d.]+)", line) for line in lines]
    steps, losses = zip(*(match.groups() for match in matches if match), strict=True)
    assert [*map(int, steps)] == [20, 30, 40, 60]
    assert float(losses[3]) < float(losses[2]) < float(losses[1]) < float(losses[0])


@pytest.mark.slow
def test_a_terminated_training_resumes_on_fewer_ranks() -> None:
    """By SIGTERM on two ranks; each sample is trained on once in each epoch."""
    *lines, last = ran("preempt.py")
    matches = [re.fullmatch(r"step (\d+) on (\d) ranks", line) for line in lines]
    steps = [(int(match[1]), match[2]) for match in matches if match]
    assert len(steps) == len(lines)
    on_two, on_one = ([n for n, ranks in steps if ranks == by] for by in "21")
    assert on_two[1] == 40 < on_two[-1] < on_one[0]
    assert last == "3 epochs: 5,391 samples, 5,391 different"


def trained(path: Path, ranks: int, last: int = 0) -> list[int]:
    """Run all ranks, and kill them after step ``last``, if given; return the steps."""
    master = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(ranks)}
    steps = []
    with reserved_port() as port, ExitStack() as stack:
        master["MASTER_PORT"] = str(port)
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, str(FOLDER / "pretrain.py"), str(path)],
                    env=os.environ | master | {"RANK": str(rank)},
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in range(ranks)
        ]
        for line in processes[0].stdout or ():
            match = re.match(r"step (\d+):", line)
            steps += [int(match[1])] if match else []
            if last and steps[-1:] == [last]:
                for process in processes:
                    process.kill()
    assert last or not any(process.returncode for process in processes)
    return steps


def losses(path: Path) -> list[float]:
    *_, losses = torch.load(path)
    return [*losses]


@pytest.mark.slow
def test_a_run_killed_on_two_ranks_resumes_on_one(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole.pt", tmp_path / "killed.pt"
    steps = importlib.import_module("pretrain").STEPS
    assert trained(whole, 2) == [*range(1, steps + 1)]
    last = random.Random(0).randrange(3, steps - 3)
    trained(killed, 2, last)
    done = len(losses(killed))
    assert last <= done < steps
    assert trained(killed, 1) == [*range(done + 1, steps + 1)]
    assert losses(killed) == losses(whole)
    assert losses(whole)[-1] < losses(whole)[0]


THREADS = """
import threading
print([thread.name for thread in threading.enumerate() if "aioloader" in thread.name])
"""


def code_cells() -> dict[str, dict[str, object]]:
    """Return the notebook's cells of code by their ids."""
    cells = json.loads((FOLDER / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    return {cell["id"]: cell for cell in cells if cell["cell_type"] == "code"}


def test_the_notebook_is_committed_without_outputs() -> None:
    """A diff shows changes of the code only."""
    for cell in code_cells().values():
        assert cell["outputs"] == []
        assert cell["execution_count"] is None


@pytest.mark.slow
def test_the_cells_of_the_notebook_run(tmp_path: Path) -> None:
    """In order; two of them again, as the notebook says; nothing is left."""
    sources = []
    for name, cell in code_cells().items():
        source = "".join(cell["source"])  # type: ignore[arg-type]
        sources += [source] * (2 if name in {"train", "break"} else 1)
    script = tmp_path / "cells.py"
    script.write_text("\n# %%\n".join([*sources, THREADS]), encoding="utf-8")
    ran = end(start(script, KERNEL), tmp_path)
    assert "Traceback" not in ran.errors, ran.errors
    lines = ran.output.splitlines()
    sample, first, second, *report, left, again, closed, threads = lines
    assert sample == "a sample: (64,) 0"
    accuracies = [
        float(re.fullmatch(rf"epoch {number}: accuracy ([\d.]+)", line)[1])  # type: ignore[index]
        for number, line in enumerate((first, second))
    ]
    assert accuracies[0] < accuracies[1]
    assert accuracies[1] > 0.8
    assert ran.errors.count("train: 100%") >= 2
    assert "of the time" in report[0]
    assert report[-1].startswith("Measured over the latest ")
    assert left == "epoch 2: left after a batch of 64"
    assert again == "epoch 3: left after a batch of 64"
    assert closed == "DataLoader(Scans, batch_size=64, num_workers=0, epoch=4, open=0)"
    assert threads == "[]"
    assert (ran.status, ran.left) == (0, [])
