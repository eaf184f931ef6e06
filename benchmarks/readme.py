"""Write the section "Measured" of the project's README from the results.

Each row names the best setting of this package and the best of each peer, by the first
metric of its question; the chart at the top has the bars of the first row. How often a
peer is better is counted; ``results_page.py``, which calls this, names every kind.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from figures import best, glanced, is_loss

if TYPE_CHECKING:
    from figures import Result, Row

RESULTS = "https://github.com/aioloader/aioloader/blob/main/benchmarks/RESULTS.md"
ALT = re.compile(r"!\[[^]]*\](?=\(\S+/objects\.svg\))")
SECTION = re.compile(r"^## Measured\n.*?(?=^## )", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Quoted:
    """A row of the table; ``usual`` is a peer's row as people write it, and how."""

    question: str
    case: str
    words: str
    usual: tuple[str, str]


QUOTED = (
    Quoted(
        "latency",
        "",
        "2,000 objects of 100 KB, 30 ms per GET, by `ObjectDataset`",
        ("torch 32 workers", "with 32 plain workers"),
    ),
    Quoted(
        "transport",
        "38 MB",
        "batches of 38.5 MB from two workers",
        ("torch fork", "with its defaults"),
    ),
    Quoted(
        "overhead",
        "64",
        "shuffled rows in memory, batches of 64",
        ("torch", "as everyone writes it"),
    ),
    Quoted(
        "folder",
        "quiet",
        "a folder of JPEGs, decoded by two workers",
        ("torch", "with its defaults"),
    ),
)
# how a peer ran, where its name alone does not say it
HOW = {
    "torch gather 8 workers": "with an event loop in each of 8 workers",
    "torch fork file_system": "with `file_system` sharing",
    "torch tensors": "with a dataset that indexes whole batches",
}
SHORT = {"torch gather 8 workers": " with 8 async workers"}
# what the cases of a question are, in words; one without words is named
LOSSES = {
    "overhead": "rows in memory",
    "transport": "small batches, compared with torch without workers",
    "cpu": "decoding with OpenCV",
    "startup": "the start-up of workers, in scripts of short epochs",
    "memory": "the memory of an array that workers share",
    "epochs": "starting an epoch",
    "peers": "small local shards",
    "blocking": "a step that blocks its event loop",
    "tar": "splitting tars",
    "stream_parquet": "Parquet, compared with `pyarrow.dataset`",
    "sql": "small blobs from a database",
    "bounded": "the memory of a stream of tars, compared with `tarfile`",
    "shuffle": "starting an epoch of few samples",
    "service": "the latency of a service",
}


def number(row: Row, metric: dict[str, str]) -> str:
    return format(row.median(metric["key"]), metric["spec"])


def cells(quoted: Quoted, result: Result) -> list[str]:
    """Return the cells of a row: the question, this package, the peers."""
    metric, rows = result.metrics[0], result.cases[quoted.case]
    peers: dict[str, list[Row]] = {}
    for row in rows:
        if row.kind == "peer":
            peers.setdefault(row.label.split()[0], []).append(row)
    shown = {name: best(metric, found, "peer") for name, found in peers.items()}
    texts = []
    for name, row in sorted(shown.items()):
        assert row is not None
        text = " ".join([name, number(row, metric), HOW.get(row.label, "")]).strip()
        usual, how = quoted.usual
        if name == usual.split()[0] and row.label != usual:
            plain = next(one for one in rows if one.label == usual)
            text += f", and {number(plain, metric)} {how}"
        texts.append(text)
    ours = best(metric, rows, "ours")
    assert ours is not None
    unit = metric["title"].replace("us/", "\u00b5s/")
    command = f"(`python benchmarks/{result.name}.py`)"
    return [
        f"{quoted.words} {command}",
        f"{number(ours, metric)} {unit}",
        "; ".join(texts),
    ]


CHART = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {height}" \
width="640" height="{height}" role="img" aria-labelledby="title">
  <title id="title">{title}</title>
  <style>
    svg {{ --ink: #1f2933; --other: #9aa7b4; --ours: #3367d6 }}
    @media (prefers-color-scheme: dark) {{
      svg {{ --ink: #e6ebf0; --other: #5c6a78; --ours: #7fa6ff }}
    }}
    text {{ font: 13px system-ui, sans-serif; fill: var(--ink) }}
    .ours {{ fill: var(--ours) }}
    .other {{ fill: var(--other) }}
  </style>
{bars}
</svg>
"""


def bars(results: list[Result]) -> dict[str, float]:
    """Return the values of the chart: the best of each, and torch as usual."""
    quoted = QUOTED[0]
    result = next(one for one in results if one.name == quoted.question)
    metric, rows = result.metrics[0], result.cases[quoted.case]
    found: dict[str, float] = {}
    for name, kind in (("aioloader", "ours"), ("SPDL", "peer"), ("torch", "peer")):
        chosen = [one for one in rows if kind == "ours" or one.label.startswith(name)]
        row = best(metric, chosen, kind)
        assert row is not None
        how = "" if kind == "ours" else SHORT.get(row.label, "")
        found[name + how] = row.median(metric["key"])
    usual, how = quoted.usual
    plain = next(one for one in rows if one.label == usual)
    return {**found, f"torch {how}": plain.median(metric["key"])}


def title(results: list[Result]) -> str:
    """Return the chart in words."""
    values = ", ".join(f"{name} {value:,.0f}" for name, value in bars(results).items())
    return f"2,000 objects of 100 KB, 30 ms per GET, in objects per second: {values}"


def chart(results: list[Result]) -> str:
    """Return the picture of the bars, to one linear scale from 0."""
    values, lines = bars(results), []
    for at, (name, value) in enumerate(values.items()):
        width, y = 340 * value / max(values.values()), 8 + 30 * at
        kind = "other" if at else "ours"
        lines += [
            f'  <text x="192" y="{y + 15}" text-anchor="end">{name}</text>',
            f'  <rect class="{kind}" x="200" y="{y}" width="{width:.1f}" height="22"/>',
            f'  <text x="{206 + width:.1f}" y="{y + 15}">{value:,.0f}/s</text>',
        ]
    height = 14 + 30 * len(values)
    return CHART.format(height=height, title=title(results), bars="\n".join(lines))


def rounds(chosen: list[Result]) -> str:
    """Say how many rounds the figures are medians of."""
    fewest = min(
        len(row.rounds)
        for quoted, result in zip(QUOTED, chosen, strict=True)
        for row in result.cases[quoted.case]
    )
    return (
        f"medians of {fewest} interleaved rounds"
        if fewest > 1
        else "a single round each"
    )


def losses(results: list[Result]) -> str:
    """Count the cases in which a peer is better, and name the largest gap."""
    cases = list(glanced(results))
    count = sum(is_loss(one.ratio) for one in cases)
    largest = named_losses(results).partition("; ")[0]
    return (
        f"Compared with the best peer, aioloader is slower or takes more memory in "
        f"{count} of {len(cases)} cases; the largest gap is in {largest}."
    )


def named_losses(results: list[Result]) -> str:
    """Name the kinds of cases in which a peer is better, each with its lowest ratio."""
    lowest: dict[str, float] = {}
    for case in glanced(results):
        if is_loss(case.ratio):
            words = LOSSES.get(case.result.name, f"`{case.result.name}`")
            lowest[words] = min(case.ratio, lowest.get(words, 1.0))
    return "; ".join(
        f"{words} ({lowest[words]:.2f})"
        for words in sorted(lowest, key=lowest.__getitem__)
    )


def section(results: list[Result]) -> str:
    """Return the section, its heading included."""
    by_name = {one.name: one for one in results}
    chosen = [by_name[quoted.question] for quoted in QUOTED]
    lines = [
        "## Measured",
        "",
        f"Two shared cores; the best setting found for each loader; {rounds(chosen)}.",
        "",
        "| question | aioloader | peers |",
        "|---|---|---|",
    ]
    for quoted, result in zip(QUOTED, chosen, strict=True):
        lines.append("| " + " | ".join(cells(quoted, result)) + " |")
    lines += [
        "",
        *textwrap.wrap(losses(results), 120),
        f"[All results]({RESULTS}) list every one, with commands and dates.",
        "",
        "",
    ]
    return "\n".join(lines)


def updated(text: str, results: list[Result]) -> str:
    """Return the README with what the results say: the section, and the chart."""
    text = ALT.sub(lambda _: f"![{title(results)}]", text, count=1)
    return SECTION.sub(lambda _: section(results), text, count=1)
