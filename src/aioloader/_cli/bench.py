"""``aioloader bench``: the user's loader against torch's with the same arguments.

Both iterate alternately, round after round, in this process; results are medians, and
ratios are taken within a round.
"""

import gc
import importlib
import inspect
import math
import operator
import sys
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import torch.utils.data

from aioloader._base.words import seconds_text, table
from aioloader._cli.torch_twin import twin_of
from aioloader._loader.loader import DataLoader

_END = object()
# Of one loader in one round, by the names in ``_table``.
Figures: TypeAlias = dict[str, float]


class UserCodeError(Exception):
    """The user's code raised an error, which is the cause."""


def run(options: Namespace) -> None:
    page: Path | None = options.page
    if page is not None and not page.parent.is_dir():
        folder = str(page.parent)
        raise ArgumentTypeError(
            f"there is no directory {folder!r} for the page: make it"
        )
    loader = _find_loader(options.loader)
    twin, notes = twin_of(loader)
    ours, theirs = list[Figures](), list[Figures]()
    turns: list[tuple[Any, list[Figures]]] = [(loader, ours)]
    if twin is not None:
        turns.append((twin, theirs))
    with users(f"{options.loader} raised"), loader:
        loader.report()  # so that it is looked for what blocks an event loop
        for _ in range(options.rounds):
            for source, figures in turns:
                gc.collect()  # else a full collection would hit only one of them
                figures.append(_one_round(source, options))
            turns.reverse()
        report, stats = loader.report(), loader.stats()
    size = stats.samples / max(1, stats.recent)
    lines = [f"{options.loader}: {loader!r}", "", *_table(ours, theirs, size)]
    lines += ["", *notes] if notes else []
    lines += ["", str(report)]
    sys.stdout.write("\n".join([*lines, ""]))
    if page is not None:
        loader.report_html(page)
        sys.stdout.write(f"Page: {page}\n")


def _find_loader(name: str) -> DataLoader[Any]:
    """Return the loader that ``module:name`` names, or returns when called."""
    module_name, colon, path = name.partition(":")
    if not (module_name and colon and path):
        raise ArgumentTypeError(f"name the loader like train:loader, got {name!r}")
    found = find_object(module_name, path)
    if callable(found) and not isinstance(found, torch.utils.data.DataLoader):
        with users(f"{name}() raised"):
            found = found()
        name = f"the result of {name}()"
    if inspect.iscoroutine(found):
        found.close()
        raise ArgumentTypeError(
            f"{name} is a coroutine: make the loader in a plain function"
        )
    if not isinstance(found, DataLoader):
        kind, whose = type(found).__name__, type(found).__module__.partition(".")[0]
        raise ArgumentTypeError(
            f"{name} is a {kind} of {whose}, and no aioloader.DataLoader"
        )
    return found


def find_object(module_name: str, path: str) -> Any:
    """Return what a module has by a name, which may be dotted."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    with users(f"importing {module_name} raised"):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # the user's module imports it
            raise ArgumentTypeError(
                f"there is no module {error.name!r} in {Path.cwd()} or where Python "
                "looks for modules"
            ) from error
    try:
        return operator.attrgetter(path)(module)
    except AttributeError as error:
        raise ArgumentTypeError(f"module {module_name!r} has no {path!r}") from error


@contextmanager
def users(what: str) -> Iterator[None]:
    """Mark errors raised by the user's code."""
    try:
        yield
    except ArgumentTypeError:
        raise
    except Exception as error:
        raise UserCodeError(f"{what} {type(error).__name__}: {error}") from error


def _one_round(source: Any, options: Namespace) -> Figures:
    """Iterate until there are enough batches, or the time is up."""
    clock, step = time.perf_counter, options.step / 1e3
    began = clock()
    iterator = iter(source)
    # The workers of torch's end with it, unless they persist.
    with closing(iterator) if isinstance(source, DataLoader) else nullcontext():
        if next(iterator, _END) is _END:
            raise ArgumentTypeError(f"{options.loader} gives no batch; give it samples")
        first = latest = clock()
        count = 0
        while count + 1 < options.batches and latest - first < options.seconds:
            time.sleep(step)
            if next(iterator, _END) is _END:
                break
            latest = clock()
            count += 1
    seconds = latest - first or math.nan  # of one batch, unknown
    return {
        "batches": count / seconds,
        "first": first - began,
        # A step that ends late, because the loader's threads compute, waits too.
        "waits": max(0.0, 1 - count * step / seconds),
    }


def _table(
    ours: Sequence[Figures], theirs: Sequence[Figures], size: float
) -> list[str]:
    """Return a line per result, for ``size`` samples per batch.

    A ratio above 1 is better than torch, of which there is none if it cannot run this.
    """
    titles: list[tuple[str, str, Callable[[float], str]]] = [
        ("samples/s", "batches", lambda rate: f"{rate * size:,.4g}"),
        ("batches/s", "batches", "{:,.4g}".format),
        ("time to first batch", "first", seconds_text),
        ("wait share", "waits", "{:.1%}".format),
    ]
    rows = []
    for title, name, text in titles:
        mine = [one[name] for one in ours]
        row = [title, _median(mine, text)]
        if theirs:
            other = [one[name] for one in theirs]
            better = (mine, other) if name == "batches" else (other, mine)
            ratios = [a / b for a, b in zip(*better, strict=True) if b]
            row += [_median(other, text), _median(ratios, "{:.2f}".format)]
        rows.append(row)
    heads = ["", "aioloader", "torch", "ratio"] if theirs else ["", "aioloader"]
    return table(heads, rows)


def _median(results: Sequence[float], text: Callable[[float], str]) -> str:
    """Return the median of the known results as a text; "-" if there are none."""
    known = [one for one in results if math.isfinite(one)]
    return text(median(known)) if known else "-"
