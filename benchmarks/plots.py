"""The plots of ``RESULTS.md``, drawn from the JSON files: small PNGs.

Bars of the first metric for each case; curves where the metrics, or the cases, are
points of an axis. Whiskers reach from the lowest round to the highest.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib import pyplot as plt

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from figures import Result, Row

COLOURS = {"ours": "#1f6fb4", "peer": "#9a9a9a", "limit": "#d9d9d9"}
MARKS = "osD^vP*X<>"
COLUMNS = 2


def number(text: str) -> float:
    """Return a case's number, as in ``"1e6"``, or nan."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def error(row: Row, key: str) -> tuple[float, float]:
    values, middle = row.values(key), row.median(key)
    return middle - min(values), max(values) - middle


def bars(axes: Any, rows: list[Row], metric: dict[str, Any]) -> None:
    """Draw a bar for each contender, the first one on top."""
    shown = [row for row in rows if row.values(metric["key"])][::-1]
    errors = list(zip(*(error(row, metric["key"]) for row in shown), strict=True))
    axes.barh(
        [row.label for row in shown],
        [row.median(metric["key"]) for row in shown],
        xerr=errors,
        color=[COLOURS[row.kind] for row in shown],
        error_kw={"elinewidth": 0.8},
    )
    better = "more" if metric["higher"] else "less"
    axes.set_xlabel(f"{metric['title']} ({better} is better)")
    middles = [row.median(metric["key"]) for row in shown]
    if min(middles) > 0 and max(middles) > 50 * min(middles):
        axes.set_xscale("log")


def curve(axes: Any, label: str, kind: str, points: list[tuple[float, float]]) -> None:
    number = sum(line.get_label()[0] != "_" for line in axes.get_lines())
    axes.plot(
        *zip(*sorted(points), strict=True),
        marker=MARKS[number % len(MARKS)],
        markersize=4,
        linewidth=1.6 if kind == "ours" else 1,
        linestyle={"ours": "-", "peer": "--", "limit": ":"}[kind],
        label=label,
    )


def finish_curves(axes: Any, x: str, metric: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(metric)
    axes.set_yscale("log")
    found = [value for line in axes.get_lines() for value in line.get_xdata()]
    above = [value for value in found if value > 0]
    if min(found) <= 0:
        axes.set_xscale("symlog", linthresh=min(above))
        axes.set_xlim(left=0)
    elif max(above) > 8 * min(above):
        axes.set_xscale("log")
    axes.legend(fontsize=6)


def draw_axis(result: Result) -> Any:
    """Draw a curve for each contender along the points of the axis."""
    figure, axes = plt.subplots(figsize=(5.2, 3.4))
    for rows in result.cases.values():
        for row in rows:
            keys = [
                metric["key"] for metric in result.metrics if row.values(metric["key"])
            ]
            points = [(float(key), row.median(key)) for key in keys]
            curve(axes, row.label, row.kind, points)
    finish_curves(axes, result.axis, "samples/s")
    return figure


def draw_numbers(result: Result) -> Any:
    """Draw a curve for each label, where the cases are numbers."""
    figure, axes = plt.subplots(figsize=(5.2, 3.4))
    metric = result.metrics[0]
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for case, rows in result.cases.items():
        for row in rows:
            point = number(case), row.median(metric["key"])
            found.setdefault((row.label, row.kind), []).append(point)
    for (label, kind), points in found.items():
        curve(axes, label, kind, points)
    finish_curves(axes, "samples", metric["title"])
    return figure


def draw_cases(result: Result) -> Any:
    """Draw bars, a panel for each case."""
    cases, metric = result.cases, result.metrics[0]
    columns = min(COLUMNS, len(cases))
    lines = math.ceil(len(cases) / columns)
    tallest = max(len(rows) for rows in cases.values())
    size = 4.6 * columns, lines * (0.8 + 0.2 * tallest)
    figure, panels = plt.subplots(lines, columns, figsize=size, squeeze=False)
    for panel, (case, rows) in zip(panels.flat, cases.items(), strict=False):
        bars(panel, rows, metric)
        panel.set_title(case)
    for panel in list(panels.flat)[len(cases) :]:
        panel.axis("off")
    return figure


def draw(result: Result) -> Any:
    if result.axis:
        return draw_axis(result)
    numbers = [number(case) for case in result.cases]
    if len(numbers) > 2 and not any(map(math.isnan, numbers)):
        return draw_numbers(result)
    return draw_cases(result)


def draw_all(results: list[Result], folder: Path) -> None:
    """Draw a PNG for each question, and remove those of former questions."""
    mpl.use("Agg")
    plt.rcParams.update({"font.size": 7, "axes.titlesize": 8})
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.png"):
        old.unlink()
    for result in results:
        figure = draw(result)
        figure.tight_layout()
        figure.savefig(
            folder / f"{result.name}.png",
            dpi=90,
            bbox_inches="tight",  # long names of contenders
            metadata={"Software": None},
        )
        plt.close(figure)
