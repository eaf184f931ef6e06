"""``aioloader bench``: the user's loader against torch's with the same arguments.

Both iterate alternately, round after round, in this process; figures are medians, and
ratios are taken within a round.
"""

import argparse
import gc
import importlib
import inspect
import operator
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch.utils.data

from aioloader._cli.torch_twin import Twin, twin_of
from aioloader._cli.usage import UsageError, UserCodeError
from aioloader._loader.loader import DataLoader
from aioloader._observe.words import seconds_text, table

_END = object()


class Figures(NamedTuple):
    """The figures of one loader in one round.

    Attributes:
        first: Seconds from ``iter`` to the first batch.
        batches: Batches per second, from the first batch to the last.
        samples: Samples per second.
        waits: Share of that time in which the consumer waited, from 0 to 1.
    """

    first: float
    batches: float
    samples: float
    waits: float


def run(options: argparse.Namespace) -> None:
    """Run both loaders; print the table and the verdict.

    Raises:
        UsageError: If the arguments name no loader, or it gives no batch.
        UserCodeError: If the user's code raises.
    """
    page: Path | None = options.page
    if page is not None and not page.parent.is_dir():
        raise UsageError(f"there is no directory {str(page.parent)!r} for the page")
    loader = find_loader(options.loader)
    twin = twin_of(loader)
    with ExitStack() as stack, _users(f"{options.loader} raised"):
        stack.enter_context(loader)
        stack.callback(twin.close)
        ours, theirs = _measure(loader, twin, options)
        report = loader.report()
        if page is not None:
            loader.report_html(page)
    lines = [f"{options.loader}: {loader!r}", "", *_table(ours, theirs)]
    lines += ["", *twin.notes] if twin.notes else []
    sys.stdout.write("\n".join([*lines, "", str(report), ""]))
    if page is not None:
        sys.stdout.write(f"Page: {page}\n")


def find_loader(name: str) -> DataLoader[Any]:
    """Return the loader that ``module:name`` names, or returns when called.

    Raises:
        UsageError: If there is none.
        UserCodeError: If the user's code raises.
    """
    module_name, colon, path = name.partition(":")
    if not (module_name and colon and path):
        raise UsageError(f"name the loader like train:loader, got {name!r}")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    with _users(f"importing {module_name} raised"):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # the user's module imports it
            raise UsageError(
                f"there is no module {error.name!r} in {Path.cwd()} or where Python "
                "looks for modules"
            ) from error
    try:
        found = operator.attrgetter(path)(module)
    except AttributeError as error:
        raise UsageError(f"module {module_name!r} has no {path!r}") from error
    if callable(found) and not isinstance(found, torch.utils.data.DataLoader):
        with _users(f"{name}() raised"):
            found = found()
        name = f"the result of {name}()"
    if inspect.iscoroutine(found):
        found.close()
        raise UsageError(f"{name} is a coroutine: make the loader in a plain function")
    if not isinstance(found, DataLoader):
        whose = type(found).__module__.partition(".")[0]
        raise UsageError(
            f"{name} is a {type(found).__name__} of {whose}, and no "
            "aioloader.DataLoader"
        )
    return found


@contextmanager
def _users(what: str) -> Iterator[None]:
    """Mark errors raised by the user's code."""
    try:
        yield
    except (UsageError, UserCodeError):
        raise
    except Exception as error:
        raise UserCodeError(f"{what} {type(error).__name__}: {error}") from error


def _measure(
    loader: DataLoader[Any], twin: Twin, options: argparse.Namespace
) -> tuple[list[Figures], list[Figures]]:
    """Return the figures of our rounds, and of torch's; none if torch cannot run it."""
    ours: list[Figures] = []
    theirs: list[Figures] = []
    size = loader.batch_size
    for number in range(options.rounds):
        turns: list[tuple[list[Figures], Callable[[], Any]]] = [
            (ours, lambda: closing(iter(loader)))
        ]
        if twin.loader is not None:
            turns.append((theirs, twin.iterating))
        for figures, iterating in turns if number % 2 == 0 else reversed(turns):
            gc.collect()  # else a full collection would hit only one of them
            figures.append(_one_round(iterating, size, options))
    return ours, theirs


def _one_round(
    iterating: Callable[[], Any], size: int | None, options: argparse.Namespace
) -> Figures:
    """Iterate until there are enough batches, or the time is up.

    Raises:
        UsageError: If there is no batch.
    """
    clock, step = time.perf_counter, options.step / 1e3
    began = clock()
    with iterating() as iterator:
        if next(iterator, _END) is _END:
            raise UsageError(f"{options.loader} gives no batch: it is empty")
        first = latest = clock()
        count, samples, waited = 0, 0, 0.0
        while count + 1 < options.batches and latest - first < options.seconds:
            time.sleep(step)
            asked = clock()
            batch = next(iterator, _END)
            if batch is _END:
                break
            latest = clock()
            waited += latest - asked
            count += 1
            samples += _samples(batch, size)
    seconds = latest - first
    if not seconds:  # only one batch
        return Figures(first - began, 0.0, 0.0, 0.0)
    return Figures(first - began, count / seconds, samples / seconds, waited / seconds)


def _samples(batch: Any, size: int | None) -> int:
    """Return the number of samples in a batch: the length of its first part."""
    if size is None and not isinstance(batch, (torch.Tensor, Mapping, Sequence)):
        return 1
    while isinstance(batch, (Mapping, tuple, list)) and len(batch):
        part = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
        if not isinstance(part, (torch.Tensor, Mapping, tuple, list)):
            break
        batch = part
    try:
        return len(batch)
    except TypeError:
        return size or 1


def _table(ours: Sequence[Figures], theirs: Sequence[Figures]) -> list[str]:
    """Return a line per figure; a ratio above 1 is better than torch."""
    titles: list[tuple[str, str, Callable[[float], str], bool]] = [
        ("samples", "samples/s", lambda value: f"{value:,.4g}", True),
        ("batches", "batches/s", lambda value: f"{value:,.4g}", True),
        ("first", "time to first batch", seconds_text, False),
        ("waits", "wait share", lambda value: f"{value:.1%}", False),
    ]
    rows = []
    for name, title, text, is_more_better in titles:
        mine = [getattr(one, name) for one in ours]
        row = [title, text(median(mine))]
        if theirs:
            other = [getattr(one, name) for one in theirs]
            better = (mine, other) if is_more_better else (other, mine)
            ratios = [a / b for a, b in zip(*better, strict=True) if b]
            row += [text(median(other)), f"{median(ratios):.2f}" if ratios else "-"]
        rows.append(row)
    heads = ["", "aioloader", "torch", "ratio"] if theirs else ["", "aioloader"]
    return table(heads, rows)
