"""What do statistics cost that are always on, and what does a trace cost?

Statistics cannot be switched off, so the loader is compared with a copy that has them
removed from its source: clocks read nothing, and nothing is recorded or weighed. Both
take turns in one process, an epoch each; the figures are medians of the differences
between neighbours. So are those of a trace of batches that take 1 ms.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import inspect
import statistics
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import TensorDataset

from aioloader import DataLoader
from aioloader._loader import runtime, sources
from aioloader._pipeline.ahead_feed import AheadFeed
from aioloader._pipeline.batch_maker import BatchMaker
from aioloader._pipeline.inline import GatherFeed, InlineFeed
from aioloader._pipeline.pipeline import Pipeline
from aioloader._pipeline.plain import PlainFeed
from harness import Contender, Figures, Limit, Metric, Options, Question, main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BATCHES = 400
_CLOCKS = {"perf_counter", "processor_time", "thread_time"}
# Functions that record something about a batch, or read a clock for that.
_OBSERVING: dict[type, tuple[str, ...]] = {
    PlainFeed: ("next", "_deliver"),
    InlineFeed: ("next", "_deliver"),
    GatherFeed: ("next", "_deliver"),
    AheadFeed: ("_take", "_deliver"),
    Pipeline: ("_make_batch",),
    BatchMaker: ("read", "apply", "collate"),
}


class Unobserved(ast.NodeTransformer):
    """Removes clocks and records from a function."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Replace clock reads."""
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        name = node.func.id if isinstance(node.func, ast.Name) else name
        return ast.Constant(0.0) if name in _CLOCKS else self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        """Drop recording calls."""
        is_record = "_records" in ast.unparse(node)
        return None if is_record else self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST | None:
        """Drop weighing calls."""
        is_weighing = "is_clocked" in ast.unparse(node.test)
        if is_weighing:
            return None
        visited = self.generic_visit(node)
        assert isinstance(visited, ast.If)
        return visited if visited.body else None

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        """Replace occasional clock reads."""
        is_clock = "CLOCKED" in ast.unparse(node.test)
        return ast.Constant(0.0) if is_clock else self.generic_visit(node)


def unobserved(cls: type) -> type:
    """Return a class without the clocks and records of another."""
    methods: dict[str, Any] = {}
    for name in _OBSERVING[cls]:
        source = textwrap.dedent(inspect.getsource(getattr(cls, name)))
        tree = ast.fix_missing_locations(Unobserved().visit(ast.parse(source)))
        namespace = vars(sys.modules[cls.__module__])
        exec(compile(tree, "unobserved", "exec"), namespace, methods)
    return type(cls.__name__, (cls,), methods)


CLASSES = {cls: unobserved(cls) for cls in _OBSERVING}


@contextlib.contextmanager
def without_statistics() -> Iterator[None]:
    """Start iterations without them."""
    places = [
        (module, cls)
        for module in (runtime, sources)
        for cls in CLASSES
        if vars(module).get(cls.__name__) is cls
    ]
    for module, cls in places:
        setattr(module, cls.__name__, CLASSES[cls])
    try:
        yield
    finally:
        for module, cls in places:
            setattr(module, cls.__name__, cls)


def compute(sample: Any) -> Any:
    """Take a quarter of a millisecond."""
    end = time.perf_counter() + 0.00025
    while time.perf_counter() < end:
        pass
    return sample


def same(sample: Any) -> Any:
    return sample


def loader_of(kind: str) -> DataLoader[Any]:
    """Return a loader of 400 batches."""
    numbers = list(range(4 * BATCHES))
    if kind == "tensors":
        return DataLoader(TensorDataset(torch.arange(4 * BATCHES)), 4)
    if kind == "transform":
        return DataLoader(numbers, 4, transform=same)
    if kind == "1 ms":
        return DataLoader(numbers, 4, transform=compute)
    if kind == "1 ms ahead":
        return DataLoader(numbers, 4, transform=compute, prefetch_factor=2)
    return DataLoader(numbers, 4)


def epoch(loader: DataLoader[Any]) -> float:
    """Return the seconds of an epoch."""
    started = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - started


def compared(
    kind: str, rounds: int, other: Callable[[DataLoader[Any]], Any]
) -> Figures:
    """Return the cost of an epoch as it is, and within ``other``."""
    with loader_of(kind) as loader:
        epoch(loader)
        gc.collect()
        gc.disable()
        plain, differences = [], []
        for number in range(rounds):
            seconds = {}
            for is_other in (number % 2 == 0, number % 2 == 1):
                if is_other:
                    with other(loader):
                        seconds[True] = epoch(loader)
                else:
                    seconds[False] = epoch(loader)
            plain.append(seconds[False])
            differences.append(seconds[True] - seconds[False])
    per_batch = statistics.median(plain) / BATCHES
    more = statistics.median(differences) / BATCHES
    return {"us": per_batch * 1e6, "more_us": more * 1e6, "share": more / per_batch}


def statistics_of(kind: str) -> Callable[[Options], Figures]:
    """Return a function that measures the cost of statistics in a kind of loader."""

    def run(options: Options) -> Figures:
        rounds = (4 if options.quick else 12) if "ms" in kind else 100
        found = compared(kind, rounds, lambda _loader: without_statistics())
        without = found["us"] + found["more_us"]
        cost = -found["more_us"]
        return {"us": without, "more_us": cost, "share": cost / without}

    return run


def trace_of(kind: str) -> Callable[[Options], Figures]:
    """Return a function that measures the cost of a trace."""

    def run(options: Options) -> Figures:
        rounds = (4 if options.quick else 12) if "ms" in kind else 60
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run.json"

            @contextlib.contextmanager
            def traced(loader: DataLoader[Any]) -> Iterator[None]:
                trace = loader.trace(path)
                trace._start()  # noqa: SLF001  (the file is written after the block)
                yield
                trace._stop()  # noqa: SLF001

            return compared(kind, rounds, traced)

    return run


KINDS = ("plain", "tensors", "transform", "1 ms", "1 ms ahead")
FAST = [f"statistics: {kind}" for kind in KINDS if "ms" not in kind]
SLOW = [f"statistics: {kind}" for kind in KINDS if "ms" in kind]
TRACED = [f"trace: {kind}" for kind in KINDS if "ms" in kind]

QUESTION = Question(
    name="observing",
    text="What do statistics and traces cost, per batch of four samples?",
    contenders={
        f"{what}: {kind}": Contender(cost(kind), f"{what}: {kind}")
        for what, cost in (("statistics", statistics_of), ("trace", trace_of))
        for kind in KINDS
    },
    metrics=[
        Metric("more_us", "us more", ",.2f", higher=False),
        Metric("us", "us without", ",.2f", higher=False),
        Metric("share", "share", ".2%", higher=False),
    ],
    limits=[
        *(Limit(name, "more_us", 0.5) for name in FAST),
        *(Limit(name, "share", 0.01) for name in SLOW),
        *(Limit(name, "share", 0.03) for name in TRACED),
    ],
    rounds=3,
)

if __name__ == "__main__":
    main(QUESTION)
