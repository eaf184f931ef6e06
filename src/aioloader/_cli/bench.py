"""``aioloader bench``: compare the user's loader with torch's, with equal arguments.

Both loaders run in this process, in alternating rounds. Results are medians over the
rounds. Ratios compare the two rounds of a pair. Notes list the features that torch
lacks, which are left out or replaced.
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
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import torch.utils.data

from aioloader._base.formatting import seconds_text, table
from aioloader._loader.loader import DataLoader
from aioloader._loader.options import argument
from aioloader._loader.torch_compat import TORCH_LOADER
from aioloader.protocols import (
    HasLifespan,
    Kind,
    is_async_function,
    kind_of,
    reads_async,
)

_END = object()
# Results of one loader in one round, by name (``_one_round``).
Figures: TypeAlias = dict[str, float]
_SAME = [
    *("dataset", "collate_fn", "pin_memory", "worker_init_fn", "generator"),
    *("persistent_workers", "in_order"),
]
# Effect on torch's rounds of each argument that torch lacks.
_WITHOUT = {
    "workers": "its workers are processes",
    "fetch": "its workers read the samples",
    "device": "its batches stay in CPU memory",
    "on_error": "it ends with the first sample that fails",
    "retry": "it ends with the first sample that fails",
    "prefetch_bytes": "it holds as many bytes as its batches have",
    "rank": "it delivers the samples of all ranks",
    "rng": "its random numbers are others",
    "timeout": "without workers it has none",
    "prefetch_factor": "without workers it makes no batch ahead",
}


class UserCodeError(Exception):
    """An error of the user's code; ``__cause__`` is the original."""


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
        loader.report()  # starts the search for what blocks the loop
        for _ in range(options.rounds):
            for source, figures in turns:
                gc.collect()  # else only one loader might pay for a full collection
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
    """Return the loader at ``module:name``, which may be a function that makes it."""
    module_name, colon, path = name.partition(":")
    if not (module_name and colon and path):
        raise ArgumentTypeError(f"name the loader like train:loader, got {name!r}")
    loader = find_object(module_name, path)
    if callable(loader) and not isinstance(loader, torch.utils.data.DataLoader):
        with users(f"{name}() raised"):
            loader = loader()
        name = f"the result of {name}()"
    if inspect.iscoroutine(loader):
        loader.close()
        raise ArgumentTypeError(
            f"{name} is a coroutine: make the loader in a plain function"
        )
    if not isinstance(loader, DataLoader):
        kind, whose = type(loader).__name__, type(loader).__module__.partition(".")[0]
        raise ArgumentTypeError(
            f"{name} is a {kind} of {whose}, and no aioloader.DataLoader"
        )
    return loader


def find_object(module_name: str, path: str) -> Any:
    """Return an attribute of a module; ``path`` may be dotted."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    with users(f"importing {module_name} raised"):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # an import in the user's module failed
            raise ArgumentTypeError(
                f"there is no module {error.name!r} in {Path.cwd()} or where Python "
                "looks for modules"
            ) from error
    try:
        return operator.attrgetter(path)(module)
    except AttributeError as error:
        raise ArgumentTypeError(f"module {module_name!r} has no {path!r}") from error


@contextmanager
def users(call: str) -> Iterator[None]:
    """Turn errors in the block, which runs user code, into ``UserCodeError``."""
    try:
        yield
    except ArgumentTypeError:
        raise
    except Exception as error:
        raise UserCodeError(f"{call} {type(error).__name__}: {error}") from error


def _one_round(source: Any, options: Namespace) -> Figures:
    """Iterate up to the limit of batches or seconds; return the round's results."""
    clock, step = time.perf_counter, options.step / 1e3
    began = clock()
    iterator = iter(source)
    # Torch's iterator cannot be closed; its workers end when it is deleted.
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
    seconds = latest - first or math.nan  # NaN: one batch has no rate
    return {
        "batches": count / seconds,
        "first": first - began,
        # Oversleeping counts as waiting, because the loader's busy threads cause it.
        "waits": max(0.0, 1 - count * step / seconds),
    }


def _table(
    ours: Sequence[Figures], theirs: Sequence[Figures], size: float
) -> list[str]:
    """Return the results as a table's lines; ``size``: samples per batch.

    A ratio above 1 means better than torch. ``theirs`` is empty if torch cannot run.
    """
    titles: list[tuple[str, str, Callable[[float], str]]] = [
        ("samples/s", "batches", lambda rate: f"{rate * size:,.4g}"),
        ("batches/s", "batches", "{:,.4g}".format),
        ("time to first batch", "first", seconds_text),
        ("wait share", "waits", "{:.1%}".format),
    ]
    rows = []
    for title, name, text in titles:
        mine = [figures[name] for figures in ours]
        row = [title, _median(mine, text)]
        if theirs:
            torchs = [figures[name] for figures in theirs]
            better = (mine, torchs) if name == "batches" else (torchs, mine)
            ratios = [a / b for a, b in zip(*better, strict=True) if b]
            row += [_median(torchs, text), _median(ratios, "{:.2f}".format)]
        rows.append(row)
    heads = ["", "aioloader", "torch", "ratio"] if theirs else ["", "aioloader"]
    return table(heads, rows)


def _median(results: Sequence[float], text: Callable[[float], str]) -> str:
    """Return the median of the finite results as text; "-" if there are none."""
    known = [*filter(math.isfinite, results)]
    return text(median(known)) if known else "-"


def twin_of(
    loader: DataLoader[Any],
) -> tuple["torch.utils.data.DataLoader[Any] | None", list[str]]:
    """Return a torch loader that makes the same batches, and notes on differences.

    The loader is None if torch cannot make these batches.
    """
    if reason := _obstacle(loader):
        return None, [f"Not compared with torch's DataLoader: {reason}."]
    arguments, left_out = _arguments(loader)
    notes = [
        f"Not in torch's DataLoader: {name}={_shown(argument(loader, name))}; "
        f"{_WITHOUT[name]}."
        for name in left_out
    ]
    if (transform := argument(loader, "transform")) is not None:
        is_batched = loader.batch_sampler is not None or loader.batch_size is not None
        given = transform, loader.collate_fn, is_batched
        arguments["collate_fn"] = partial(_collate_transformed, *given)
        words = "transform; its collate_fn applies it to each sample."
        notes.append(f"Not in torch's DataLoader: {words}")
    return TORCH_LOADER(**arguments), notes


def _obstacle(loader: DataLoader[Any]) -> str:
    """Return why torch's loader cannot make these batches; "" if it can."""
    dataset = loader.dataset
    name = type(dataset).__name__
    if kind_of(dataset) is Kind.ASYNC_ITERABLE:
        return f"{name} is an async iterable, which torch cannot read"
    if reads_async(dataset):
        return f"{name} is read by coroutines, which torch cannot run"
    for function in ("transform", "collate_fn"):
        if is_async_function(argument(loader, function)):
            return f"{function} is async, and torch cannot run it"
    has_lifespan = argument(loader, "lifespan") is not None
    if has_lifespan or isinstance(dataset, HasLifespan):
        return f"{name} has a lifespan, which torch does not enter"
    return ""


def _arguments(loader: DataLoader[Any]) -> tuple[dict[str, Any], list[str]]:
    """Return arguments for torch's loader, and names of those that torch lacks."""
    arguments = {name: getattr(loader, name) for name in _SAME} | _sampling(loader)
    arguments["num_workers"] = int(loader.num_workers)
    parameters = inspect.signature(DataLoader.__init__).parameters
    left_out = []
    for name in _WITHOUT:
        value = argument(loader, name)
        if value == parameters[name].default:
            continue
        if loader.num_workers and name in {"timeout", "prefetch_factor"}:
            arguments[name] = value
        else:
            left_out.append(name)
    if loader.pin_memory_device:
        arguments["pin_memory_device"] = loader.pin_memory_device
    context = loader.multiprocessing_context
    if context is not None and argument(loader, "workers") == "process":
        arguments["multiprocessing_context"] = context
    return arguments, left_out


def _sampling(loader: DataLoader[Any]) -> dict[str, Any]:
    if kind_of(loader.dataset) is not Kind.MAP:
        return {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if loader.batch_size is None and loader.batch_sampler is not None:
        return {"batch_sampler": loader.batch_sampler}
    return {
        "batch_size": loader.batch_size,
        "sampler": loader.sampler,
        "drop_last": loader.drop_last,
    }


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, (str, int, float)) else type(value).__name__


def _collate_transformed(
    transform: Callable[[Any], Any],
    collate: Callable[[Any], Any],
    is_batched: bool,  # noqa: FBT001  (bound by a partial)
    samples: Any,
) -> Any:
    """Transform, then collate; at module level, because torch's workers pickle it."""
    return collate([*map(transform, samples)] if is_batched else transform(samples))
