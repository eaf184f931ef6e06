"""The shared harness: fresh processes, interleaved rounds, medians, a table, JSON.

A script states a ``Question`` and calls ``main``. Without ``--contender`` it runs each
contender in a fresh process per round, all of round 1 before round 2; with it, it is
that process and prints one JSON object. Ratios are taken within a round, where both
sides met the same machine, and only then reduced to a median.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from environment import compile_package, describe
from meter import MachineMeter, peak_megabytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

RESULTS = Path(__file__).parent / "results"
Figures = dict[str, float]
Rounds = dict[str, list[Figures]]


@dataclass(frozen=True)
class Options:
    """Options for a contender's process."""

    quick: bool = False
    url: str = ""


@dataclass(frozen=True)
class Contender:
    """One way to do the job; ``run`` returns its figures by metric name.

    ``against`` names the contender its ratio is relative to. One with ``extra`` runs
    only on request (``--all`` or by name): a setting that was tried and is not the
    best.
    """

    run: Callable[[Options], Figures]
    against: str
    extra: bool = False
    max_rounds: int = 100


@dataclass(frozen=True)
class Metric:
    """A column of the table; ``higher`` says which direction is better."""

    key: str
    title: str
    spec: str = ",.0f"
    higher: bool = True


@dataclass(frozen=True)
class Target:
    """A promised ratio: how many times better than the best of ``rivals``."""

    contender: str
    rivals: Sequence[str]
    at_least: float
    metric: int = 0


@dataclass(frozen=True)
class Limit:
    """A promised figure: the median of ``key`` is not above ``at_most``."""

    contender: str
    key: str
    at_most: float


@dataclass(frozen=True, eq=False)
class Question:
    """One benchmark; the first metric is the one that ratios are taken of.

    With an ``axis`` the metrics are points on it, and their keys are numbers. A
    contender is given ``seconds`` for a round.
    """

    name: str
    text: str
    contenders: Mapping[str, Contender]
    metrics: Sequence[Metric]
    targets: Sequence[Target] = ()
    limits: Sequence[Limit] = ()
    rounds: int = 5
    axis: str = ""
    seconds: float = 300.0
    serve: Callable[[], AbstractContextManager[str]] = field(
        default=lambda: contextlib.nullcontext("")
    )


def ratios(metric: Metric, ours: list[Figures], theirs: list[Figures]) -> list[float]:
    """Return how many times better ``ours`` is, by round."""
    pairs = [(a[metric.key], b[metric.key]) for a, b in zip(ours, theirs, strict=False)]
    return [a / b if metric.higher else b / a for a, b in pairs]


def spread(values: Sequence[float]) -> float:
    """Return half the interquartile range, as a share of the median."""
    if len(values) < 2 or not (middle := statistics.median(values)):
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2 / abs(middle)


def table(question: Question, rounds: Rounds) -> str:
    """Format one line per contender, medians with their spread."""
    first = question.metrics[0]
    head = [question.name, *(m.title for m in question.metrics), "ratio", "to"]
    lines = [head]
    for name, figures in rounds.items():
        cells = [name]
        for metric in question.metrics:
            values = [f[metric.key] for f in figures]
            middle = format(statistics.median(values), metric.spec)
            cells.append(f"{middle} ±{spread(values):.0%}")
        contender = question.contenders.get(name)
        against = contender.against if contender else ""
        if against in rounds and against != name:
            ratio = statistics.median(ratios(first, figures, rounds[against]))
            cells += [f"{ratio:.2f}", against]
        lines.append(cells)
    return render(lines)


def render(lines: list[list[str]]) -> str:
    """Align the cells of every column, the first to the left."""
    columns = max(map(len, lines))
    full = [line + [""] * (columns - len(line)) for line in lines]
    widths = [max(map(len, column)) for column in zip(*full, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if 0 < at < columns - 1 else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in full
    )


def verdicts(question: Question, rounds: Rounds) -> list[dict[str, object]]:
    """Compare each target with the measurement, against the best rival."""
    found: list[dict[str, object]] = []
    for target in question.targets:
        metric = question.metrics[target.metric]
        rivals = [name for name in target.rivals if name in rounds]
        if target.contender not in rounds or not rivals:
            continue
        ours = rounds[target.contender]
        measured, best = min(
            (statistics.median(ratios(metric, ours, rounds[rival])), rival)
            for rival in rivals
        )
        text = (
            f"{target.contender} is {measured:.2f} x {best} in {metric.key}, "
            f"promised {target.at_least}"
        )
        met = measured >= target.at_least
        found.append({"text": text, "measured": measured, "met": met})
    return found


def limits(question: Question, rounds: Rounds) -> list[dict[str, object]]:
    """Compare each promised figure with the measurement."""
    found: list[dict[str, object]] = []
    for limit in question.limits:
        if limit.contender in rounds:
            value = statistics.median(f[limit.key] for f in rounds[limit.contender])
            text = (
                f"{limit.contender} has {value:.2f} in {limit.key}, "
                f"promised at most {limit.at_most}"
            )
            met = value <= limit.at_most
            found.append({"text": text, "measured": value, "met": met})
    return found


def run_fresh(
    script: Path, name: str, options: Options, seconds: float = 300.0
) -> Figures:
    """Run one contender in a separate process and read its figures."""
    command = [sys.executable, str(script), "--contender", name, "--url", options.url]
    machine = MachineMeter()
    done = subprocess.run(
        [*command, *(["--quick"] if options.quick else [])],
        stdout=subprocess.PIPE,
        text=True,
        timeout=seconds,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"contender {name!r} ended with {done.returncode}")
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures | {"others": machine.others(figures.pop("uncharged", 0.0))}


def measure(
    question: Question, script: Path, chosen: Sequence[str], args: argparse.Namespace
) -> Rounds:
    """Run all chosen contenders, round after round.

    If there is one round, all run once before, briefly: the first ones would read
    files from the disk that the others find in memory.
    """
    rounds: Rounds = {name: [] for name in chosen}
    with question.serve() as url:
        for name in chosen if args.rounds == 1 and not args.quick else ():
            show(f"warm-up: {name}")
            run_fresh(script, name, Options(quick=True, url=url), question.seconds)
        options = Options(quick=args.quick, url=url)
        for number in range(args.rounds):
            for name in chosen:
                if number < question.contenders[name].max_rounds:
                    show(f"round {number + 1}: {name}")
                    seconds = question.seconds
                    rounds[name].append(run_fresh(script, name, options, seconds))
    show("")
    return rounds


def show(progress: str) -> None:
    """Show the current run on a terminal."""
    if sys.stderr.isatty():
        print(f"\r{progress:<60}", end="\r", file=sys.stderr)


def medians(figures: list[Figures]) -> Figures:
    """Return the median of every figure that all rounds have."""
    common = set.intersection(*(set(one) for one in figures))
    return {
        key: statistics.median(one[key] for one in figures)
        for key in figures[0]
        if key in common
    }


def report(question: Question, rounds: Rounds, seconds: float) -> dict[str, object]:
    """Print the table and the targets; return the contents of the JSON file."""
    print(f"\n{question.text}\n\n{table(question, rounds)}")
    others = [f["others"] for figures in rounds.values() for f in figures]
    print(f"other processes used {statistics.median(others):.2f} cores meanwhile")
    found = verdicts(question, rounds) + limits(question, rounds)
    show_verdicts(found)
    return record(question, rounds, seconds) | {"targets": found}


def show_verdicts(found: list[dict[str, object]]) -> None:
    """Print whether each promise was kept."""
    for verdict in found:
        print(f"{'met' if verdict['met'] else 'MISSED'}: {verdict['text']}", flush=True)


def record(question: Question, rounds: Rounds, seconds: float) -> dict[str, object]:
    """Return the contents of a question's JSON file."""
    return {
        "question": question.name,
        "text": question.text,
        "environment": describe(),
        "seconds": seconds,
        "axis": question.axis,
        "metrics": [asdict(metric) for metric in question.metrics],
        "medians": {name: medians(figures) for name, figures in rounds.items()},
        "rounds": rounds,
    }


def write(name: str, kept: Mapping[str, object]) -> None:
    """Write the JSON file of a question."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")


def keep(question: Question, rounds: Rounds, seconds: float, **more: object) -> None:
    """Store the rounds of a script that measures without ``main``."""
    write(question.name, record(question, rounds, seconds) | more)


def in_one_process(
    questions: Mapping[Question, Callable[[int], Rounds]],
    rounds: int,
    *,
    is_quick: bool,
) -> None:
    """Answer questions whose contenders take turns here; store and print results."""
    for question, measure_rounds in questions.items():
        started = time.perf_counter()
        found = measure_rounds(1 if is_quick else rounds)
        print(f"\n{question.text}\n\n{table(question, found)}", flush=True)
        targets = verdicts(question, found) + limits(question, found)
        show_verdicts(targets)
        if not is_quick:
            keep(question, found, time.perf_counter() - started, targets=targets)


def main_in_one_process(questions: Mapping[Question, Callable[[int], Rounds]]) -> None:
    """Run the ``main`` of a script whose contenders take turns in one process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--all", action="store_true", help="no more than without")
    parser.add_argument("--only", default="*", help="patterns of questions, by comma")
    args = parser.parse_args()
    chosen = {
        question: way
        for question, way in questions.items()
        if any(fnmatch.fnmatchcase(question.name, p) for p in args.only.split(","))
    }
    in_one_process(chosen, args.rounds, is_quick=args.quick)


def parse(question: Question) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=question.text)
    parser.add_argument("--contender", help="be this contender and print its figures")
    parser.add_argument("--only", default="", help="patterns of names, by comma")
    parser.add_argument("--all", action="store_true", help="also the settings rejected")
    parser.add_argument("--rounds", type=int, help=f"default {question.rounds}")
    parser.add_argument("--quick", action="store_true", help="one small round")
    parser.add_argument("--start", default="", help="of transport.py: start method")
    parser.add_argument("--url", default="", help="the object server of the parent")
    args = parser.parse_args()
    args.rounds = args.rounds or (1 if args.quick else question.rounds)
    return args


def choose(question: Question, args: argparse.Namespace) -> list[str]:
    """Return the names of the contenders of this run."""
    if args.only:
        patterns = args.only.split(",")
        return [
            name
            for name in question.contenders
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        ]
    return [n for n, one in question.contenders.items() if args.all or not one.extra]


def main(question: Question) -> None:
    """Answer the question, or run one of its contenders."""
    args = parse(question)
    if args.contender:
        run = question.contenders[args.contender].run
        figures = run(Options(quick=args.quick, url=args.url))
        print(json.dumps(figures | peak_megabytes()), flush=True)
        return
    chosen = choose(question, args)
    if not chosen:
        return
    compile_package()
    started = time.perf_counter()
    rounds = measure(question, Path(sys.argv[0]), chosen, args)
    kept = report(question, rounds, time.perf_counter() - started)
    if not args.quick and not args.only:
        write(question.name + ("-all" if args.all else ""), kept)
