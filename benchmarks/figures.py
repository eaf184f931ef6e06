"""The contents of the JSON files in ``results/``, for the page and the plots.

A contender's name is ``case: label``; the label shows whose it is: a peer's, a limit
that no loader can exceed, or this package's. Standard library only.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# the order of the page; questions not listed here come last
ORDER = [
    "overhead",
    "transport",
    "cpu",
    "skew",
    "startup",
    "memory",
    "epochs",
    "peers",
    "peers_sweep",
    "latency",
    "blocking",
    "objects",
    "tar",
    "indexed_remote",
    "indexed_local",
    "indexed_reads",
    "indexed_opening",
    "streams",
    "stream_steps",
    "stream_blocking",
    "pretraining",
    "pretraining_costs",
    "stream_parquet",
    "stream_sql",
    "sql",
    "parquet",
    "bounded",
    "shuffle",
    "shuffle_quality",
    "resume",
    "service",
    "heartbeat",
    "crowd",
    "requests",
    "fork_threads",
    "autotune",
    "crossover_bytes",
    "crossover_cost",
    "crossover_latency",
    "growth_workers",
    "growth_waiters",
    "growth_concurrency",
    "device",
]
PEERS = re.compile(
    "torch|SPDL|WebDataset|webdataset|LitData|[Mm]osaic|Grain|tf.data|Ray|asyncpg"
    "|sqlite3|tarfile|pyarrow|its threads|wids|ArrayRecord|Hugging Face|Lance"
)
# settings tried, a round each: the best ones are compared in "peers"
SWEEPS = {"peers_sweep"}
LIMITS = re.compile("limit|bare|readinto|by hand|no loader|the bytes|orjson|nothing")


@dataclass(frozen=True)
class Row:
    """A contender: its medians by metric, and all rounds of each."""

    label: str
    rounds: list[dict[str, float]]

    @property
    def kind(self) -> str:
        """``"peer"``, ``"limit"`` or ``"ours"``."""
        if PEERS.match(self.label):
            return "peer"
        return "limit" if LIMITS.match(self.label) else "ours"

    def values(self, key: str) -> list[float]:
        """Return the figure of every round that has it."""
        return [one[key] for one in self.rounds if one.get(key) is not None]

    def median(self, key: str) -> float:
        """Return the median of the rounds, or nan; of yes and no, the share of yes."""
        values = self.values(key) or [math.nan]
        is_share = all(isinstance(one, bool) for one in values)
        return statistics.fmean(values) if is_share else statistics.median(values)


@dataclass(frozen=True)
class Result:
    """One JSON file: a question, its contenders by case, and the environment."""

    kept: dict[str, Any]
    cases: dict[str, list[Row]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The question's name."""
        return str(self.kept["question"])

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The columns; ratios are taken of the first one."""
        return list(self.kept["metrics"])

    @property
    def environment(self) -> dict[str, Any]:
        """Hardware, versions, commit, date, command."""
        return dict(self.kept["environment"])

    @property
    def axis(self) -> str:
        """The axis of the metrics, if they are points of one."""
        return str(self.kept.get("axis", ""))

    @property
    def rounds(self) -> int:
        """The largest number of rounds of any contender."""
        return max(len(one) for one in self.kept["rounds"].values())

    @cached_property
    def others(self) -> float | None:
        """The cores that other processes used, if that was measured."""
        rounds = self.kept["rounds"].values()
        found = [f["others"] for one in rounds for f in one if "others" in f]
        return statistics.median(found) if found else None


def plain_rounds(kept: dict[str, Any], name: str) -> dict[str, Any]:
    """Convert a file of another shape to the common one: table of runs, numbers."""
    rounds = next(
        table
        for table in kept.values()
        if isinstance(table, dict) and all(isinstance(x, list) for x in table.values())
    )
    numbers = {
        key: {
            "key": key,
            "title": key.replace("_", " "),
            "spec": ",.3g",
            "higher": True,
        }
        for runs in rounds.values()
        for run in runs
        for key, value in run.items()
        if isinstance(value, int | float)
    }
    metrics = list(numbers.values())
    return (
        {"question": name, "text": ""} | kept | {"rounds": rounds, "metrics": metrics}
    )


def read(path: Path) -> Result:
    """Read one file."""
    kept = json.loads(path.read_text())
    result = Result(kept if "rounds" in kept else plain_rounds(kept, path.stem))
    for name, rounds in result.kept["rounds"].items():
        case, colon, label = name.partition(": ")
        row = Row(label if colon else name, rounds)
        result.cases.setdefault(case if colon else "", []).append(row)
    return result


def read_all(folder: Path) -> list[Result]:
    """Read all files except those of rejected settings, in the order of the page."""
    paths = [p for p in folder.glob("*.json") if not p.stem.endswith("-all")]
    found = [read(path) for path in sorted(paths)]
    places = {name: place for place, name in enumerate(ORDER)}
    return sorted(found, key=lambda one: places.get(one.name, len(places)))


def times_as_good(metric: dict[str, Any], ours: Row, theirs: Row) -> float:
    """Return how many times better ours is: the median of the ratios of the rounds."""
    pairs = zip(ours.values(metric["key"]), theirs.values(metric["key"]), strict=False)
    ratios = [over(*(pair if metric["higher"] else pair[::-1])) for pair in pairs]
    return statistics.median(ratios) if ratios else math.nan


def over(a: float, b: float) -> float:
    """Divide; anything over nothing is infinite, and nothing over nothing nan."""
    return a / b if b else (math.inf if a else math.nan)


def is_loss(ratio: float) -> bool:
    """Return whether aioloader is the worse one: shown in bold, and counted."""
    return ratio < 1


@dataclass(frozen=True)
class Glanced:
    """A case of a question: the best of ours, the best peer, and their ratio."""

    result: Result
    case: str
    ours: Row
    peer: Row
    ratio: float


def glanced(results: list[Result]) -> Iterator[Glanced]:
    """Yield every case that has a peer, by the first metric of its question."""
    for result in results:
        metric = result.metrics[0]
        for case, rows in result.cases.items():
            ours, peer = best(metric, rows, "ours"), best(metric, rows, "peer")
            if ours and peer and not result.axis and result.name not in SWEEPS:
                ratio = times_as_good(metric, ours, peer)
                yield Glanced(result, case, ours, peer, ratio)


def best(metric: dict[str, Any], rows: list[Row], kind: str) -> Row | None:
    """Return the best contender of a kind by the median of a metric."""
    chosen = [
        row
        for row in rows
        if row.kind == kind and not math.isnan(row.median(metric["key"]))
    ]
    pick = max if metric["higher"] else min
    return pick(chosen, key=lambda row: row.median(metric["key"]), default=None)


def crossings(points: list[float], ratios: list[float]) -> list[float]:
    """Return where a ratio passes 1, between points: straight lines in logarithms."""
    found = []
    pairs = list(zip(points, ratios, strict=True))
    for (x0, r0), (x1, r1) in pairwise(pairs):
        if (r0 < 1) == (r1 < 1):
            continue
        share = math.log(r0) / (math.log(r0) - math.log(r1))
        if x0 > 0:
            found.append(math.exp(math.log(x0) + share * math.log(x1 / x0)))
        else:
            found.append(x0 + share * (x1 - x0))
    return found
