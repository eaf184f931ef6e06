"""A report as one HTML page: verdict, pipeline, timeline, waits, percentiles.

The page is self-contained: styles and diagrams (inline SVG) are in it, and a policy
forbids requests. It is also well-formed XML. Colours follow the reader's scheme.
"""

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from aioloader._observe.records import Record, Setting
from aioloader._observe.stages import is_made, on_one_clock, percentiles
from aioloader._observe.stats import HEADS, stage_rows
from aioloader._observe.trace import replacing
from aioloader._observe.words import seconds_text

# Lengths in pixels of a diagram, which the page scales.
_WIDTH = 920
_LEFT = 170
_RIGHT = 90
_ROOM = _WIDTH - _LEFT - _RIGHT
# Lines of a timeline, and bars of waits.
_ROWS = 40
_BARS = 230
_STYLE = """
:root { color-scheme: light dark; --page: #fcfcfb; --ink: #1a1a19; --muted: #6b6a66;
  --line: #e1e0dc; --card: #f4f3f0; --mark: #b3261e;
  --read: #2a78d6; --transform: #d9591f; --collate: #14916b; --transport: #b88600;
  --consumer: #7a68c4; --idle: #dddcd7; --blocked: #a9a8a3; }
@media (prefers-color-scheme: dark) { :root { --page: #1a1a19; --ink: #f0efec;
  --muted: #a3a29d; --line: #383835; --card: #252523; --mark: #ff8a80;
  --read: #3987e5; --transform: #e0703a; --collate: #23a880; --transport: #c9970f;
  --consumer: #9a8adf; --idle: #3d3d3a; --blocked: #6e6d69; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 64rem;
  background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.3; margin: .25rem 0 .75rem; }
h2 { font-size: 1.05rem; margin: 2.5rem 0 .25rem; }
p { margin: .25rem 0; max-width: 46rem; }
.muted, figcaption { color: var(--muted); }
figure { margin: .75rem 0 0; overflow-x: auto; }
figcaption { font-size: .85rem; }
svg { display: block; margin-top: .75rem; width: 100%; min-width: 40rem; height: auto; }
svg text { fill: var(--ink); font: 12px system-ui, -apple-system, sans-serif; }
svg .muted { fill: var(--muted); }
svg .end { text-anchor: end; }
svg .middle { text-anchor: middle; }
svg .marked { fill: var(--mark); font-weight: 600; }
svg .line { stroke: var(--line); }
svg .flow { stroke: var(--muted); fill: none; }
svg .frame { stroke: var(--mark); fill: none; stroke-width: 2; }
.read { fill: var(--read); } .transform { fill: var(--transform); }
.collate { fill: var(--collate); } .transport { fill: var(--transport); }
.consumer { fill: var(--consumer); } .idle { fill: var(--idle); }
.blocked { fill: var(--blocked); } .wait { fill: var(--muted); }
.tiles { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1.25rem 0 0; padding: 0;
  list-style: none; }
.tiles li { background: var(--card); border-radius: .5rem; padding: .6rem .9rem;
  min-width: 8.5rem; }
.tiles b { display: block; font-size: 1.25rem; font-weight: 600; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .9rem .3rem 0; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th { color: var(--muted); font-weight: 500; }
th:first-child, td:first-child { text-align: left; }
.wide { overflow-x: auto; }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


# Counts that are left out if they are 0.
_COUNTS = {
    "failures": "failed samples",
    "worker_deaths": "worker deaths",
    "worker_restarts": "worker restarts",
}


def report_html(
    path: str | os.PathLike[str],
    stats: Any,
    report: Any,
    records: Sequence[Record],
    setting: Setting,
) -> None:
    """Write the report as a page; an existing file is replaced once it is complete."""
    text = "\n".join(_page(stats, report, records, setting))
    with replacing(Path(path)) as partial:
        partial.write_text(text, encoding="utf-8")


def _page(
    stats: Any, report: Any, records: Sequence[Record], setting: Setting
) -> Iterator[str]:
    headline = escape(report.headline)
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"/>'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
    yield '<meta name="color-scheme" content="light dark"/>'
    yield '<link rel="icon" href="data:,"/>'
    yield f"<title>{headline}</title>"
    yield f"<style>{_STYLE}</style>\n</head>\n<body>\n<main>"
    yield f'<p class="muted">aioloader: epoch {stats.epoch}</p>'
    yield f"<h1>{headline}</h1>"
    measured = f"{report.confidence.capitalize()}."
    lines = (report.advice, report.limit, *report.remarks, measured)
    yield from (f"<p>{escape(str(line))}</p>" for line in lines if line)
    yield '<ul class="tiles">'
    for value, what in _tiles(stats, report):
        yield f"<li><b>{escape(value)}</b> {escape(what)}</li>"
    yield "</ul>"
    if stats.stages and records:
        yield from _figures(stats, report, records, setting)
    else:
        yield "<p>No batch was recorded yet.</p>"
    yield "<h2>Setting</h2>"
    settings = asdict(setting).items()
    rows = [(name.replace("_", " "), str(value)) for name, value in settings]
    yield from _table(("argument", "value"), rows)
    yield "</main>\n</body>\n</html>\n"


def _tiles(stats: Any, report: Any) -> Iterator[tuple[str, str]]:
    yield f"{report.wait_share:.0%}", "of the time waiting"
    if stats.seconds:
        yield f"{stats.recent / stats.seconds:,.4g}", "batches per second"
        yield f"{stats.samples / stats.seconds:,.4g}", "samples per second"
    for speed, used in report.head_room:
        yield f"{used:.0%}", f"accelerator busy, steps at {speed}x speed"
    for name, what in _COUNTS.items():
        if count := getattr(stats, name):
            yield f"{count:,}", what


def _figures(
    stats: Any, report: Any, records: Sequence[Record], setting: Setting
) -> Iterator[str]:
    yield from _figure(
        "Pipeline",
        "Seconds that each step takes per batch, divided by the slots that run it "
        "concurrently. The widest sets the pace if enough batches are in flight.",
        _pipeline(stats.stages, report.stage, setting),
    )
    caption = "Busy; starved: without work to do; blocked: with work that cannot be "
    caption += "handed on."
    drawing = _shares(stats.stages)
    yield from _figure("How stages spend their time", caption, drawing)
    caption = "Where each of the last batches was. The first line is the consumer."
    yield from _figure("Timeline", caption, _timeline(records, setting))
    recent = f"the latest {len(records):,} batches"
    caption = f"Seconds of {'making' if setting.place == 'inline' else 'waiting'} for "
    caption += f"each of {recent}: the longest, where several share a bar."
    yield from _figure("Waits", caption, _waits(records))
    yield "<h2>Percentiles</h2>"
    yield f'<p class="muted">Of {recent}; times are for one batch.</p>'
    waits = percentiles([one.taken - one.asked for one in records])
    wait = ("wait", "", "", "", "", *map(seconds_text, waits))
    yield from _table(HEADS, [*stage_rows(stats.stages), wait])


def _figure(name: str, caption: str, drawing: Iterable[str]) -> Iterator[str]:
    yield f"<h2>{name}</h2>\n<figure>\n<figcaption>{caption}</figcaption>"
    yield from drawing
    yield "</figure>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield '<div class="wide">\n<table>\n<thead>'
    yield "<tr>" + "".join(f'<th scope="col">{escape(one)}</th>' for one in heads)
    yield "</tr>\n</thead>\n<tbody>"
    for row in rows:
        yield "<tr>" + "".join(f"<td>{escape(one)}</td>" for one in row) + "</tr>"
    yield "</tbody>\n</table>\n</div>"


# -- diagrams ------------------------------------------------------------------------


def _pipeline(stages: Sequence[Any], slowest: str, setting: Setting) -> Iterator[str]:
    """Draw stages from top to bottom, as wide as the time that each batch takes there.

    Stages that the same slots do one after the other are on one line. The ``slowest``,
    named by the verdict, is marked.
    """
    lines = _sharing_lanes(stages, setting)
    widest = max(sum(map(_per_batch, line)) for line in lines) or 1.0
    yield _svg(len(lines) * 56 + 6, "Pipeline: time for a batch, by stage")
    for at, line in enumerate(lines):
        names, lanes = [one.name for one in line], line[0].lanes
        top, seconds = at * 56 + 4, sum(map(_per_batch, line))
        width, middle = _ROOM * seconds / widest, _LEFT + _ROOM / 2
        left = _LEFT + (_ROOM - width) / 2
        if at:
            arrow = f"M{middle} {top - 21} V{top - 4} m-4 -5 l4 5 l4 -5"
            yield f'<path class="flow" d="{arrow}"/>'
        yield _text(0, top + 13, " + ".join(names))
        together = f"{lanes} at a time" if lanes > 1 else "one at a time"
        yield _text(0, top + 28, together, "muted")
        part = left
        for one in line:
            took = _per_batch(one)
            title = f"{one.name}: {seconds_text(took)} a batch"
            yield _box(part, top, _ROOM * took / widest, 30, one.name, title)
            part += _ROOM * took / widest
        if slowest in names:
            edge = f'x="{left:.2f}" y="{top - 1}" width="{max(width, 3):.2f}"'
            yield f'<rect class="frame" {edge} height="32" rx="3"/>'
        kind = "end marked" if slowest in names else "end"
        yield _text(_WIDTH, top + 19, seconds_text(seconds), kind)
    yield "</svg>"


def _sharing_lanes(stages: Sequence[Any], setting: Setting) -> list[list[Any]]:
    shared = set() if setting.transforms_async else {("transform", "collate")}
    if setting.is_coupled:
        shared.add(("read", "transform"))
    lines: list[list[Any]] = []
    for one in stages:
        if lines and (lines[-1][-1].name, one.name) in shared:
            lines[-1].append(one)
        else:
            lines.append([one])
    return lines


def _per_batch(stage: Any) -> float:
    return float(stage.busy) / max(1, int(stage.items) * int(stage.lanes))


def _shares(stages: Sequence[Any]) -> Iterator[str]:
    """Draw for each stage which share of its time it is busy, starved, blocked."""
    yield _svg(len(stages) * 28 + 30, "Shares of time: busy, starved, blocked")
    for at, one in enumerate(stages):
        top, left = at * 28 + 2, float(_LEFT)
        yield _text(0, top + 14, one.name)
        kinds = {"busy": one.name, "blocked": "blocked", "starved": "idle"}
        for name, kind in kinds.items():
            share = one.shares[name]
            title = f"{one.name}: {share:.0%} {name}"
            yield _box(left, top, _ROOM * share, 20, kind, title)
            left += _ROOM * share
        yield _text(_WIDTH, top + 14, f"{one.utilisation:.0%} busy", "end")
    busy = {"busy: the stage's colour": stages[0].name}
    legend = busy | {"blocked": "blocked", "starved": "idle"}
    yield from _legend(legend, len(stages) * 28 + 20)
    yield "</svg>"


def _timeline(records: Sequence[Record], setting: Setting) -> Iterator[str]:
    """Draw when each of the last batches was in which stage."""
    last = on_one_clock(records[-_ROWS:], setting)
    begin = min(one.made[0] if is_made(one) else one.asked for one in last)
    begin = min(begin, last[0].asked)
    end = max(one.taken for one in last)
    seconds = end - begin or 1.0

    def box(top: float, name: str, kind: str, began: float, ended: float) -> str:
        left = _LEFT + _ROOM * (began - begin) / seconds
        width = _ROOM * (ended - began) / seconds
        return _box(left, top, width, 9, kind, f"{name}: {seconds_text(ended - began)}")

    height = len(last) * 12 + 62
    yield _svg(height, "Timeline of the last batches")
    yield from _axis(seconds, height - 46)
    yield _text(0, 11, "consumer")
    waits = "making" if setting.place == "inline" else "waiting"
    for one in last:
        yield box(2, f"{waits} for batch {one.number}", "idle", one.asked, one.taken)
    for one, after in pairwise(last):
        if after.asked > one.taken:
            what = f"step after batch {one.number}"
            yield box(2, what, "consumer", one.taken, after.asked)
    for at, one in enumerate(last):
        top = at * 12 + 16
        lane = f", worker {one.lane}" if setting.workers else ""
        if not at or one is last[-1] or at % 5 == 0:
            yield _text(0, top + 9, f"batch {one.number}{lane}", "muted")
        if is_made(one):
            names = ("read", "waits for a worker", "transform", "collate", "is ready")
            kinds = ("read", "idle", "transform", "collate", "blocked")
            spans = pairwise((*one.made[:5], one.taken))
            for name, kind, (began, ended) in zip(names, kinds, spans, strict=True):
                if ended > began:
                    yield box(top, f"batch {one.number} {name}", kind, began, ended)
    legend = {name: name for name in ("read", "transform", "collate")}
    legend |= {"waiting": "idle", "ready": "blocked", "step": "consumer"}
    yield from _legend(legend, height - 8)
    yield "</svg>"


def _waits(records: Sequence[Record]) -> Iterator[str]:
    """Draw how long the consumer waited for each batch."""
    waits = [one.taken - one.asked for one in records]
    each = math.ceil(len(waits) / _BARS)
    bars = [waits[at : at + each] for at in range(0, len(waits), each)]
    most, width = max(waits) or 1.0, _ROOM / len(bars)
    yield _svg(168, "Wait for each batch")
    for share in (0.0, 0.5, 1.0):
        top = 8 + 120 * (1 - share)
        yield _line(_LEFT, _LEFT + _ROOM, top, top)
        label = seconds_text(most * share) if share else "0"
        yield _text(_LEFT - 8, top + 4, label, "end muted")
    for at, bar in enumerate(bars):
        number, wait = records[at * each].number, max(bar)
        high = 120 * wait / most
        title = f"batch {number}: {seconds_text(wait)}"
        if len(bar) > 1:
            last = records[at * each + len(bar) - 1].number
            title = f"batches {number} to {last}: at most {seconds_text(wait)}"
        left, wide = _LEFT + at * width, max(width - 1, 0.6)
        yield _box(left, 128 - high, min(wide, 24), high, "wait", title)
    yield _text(_LEFT, 148, f"batch {records[0].number}", "muted")
    yield _text(_LEFT + _ROOM, 148, f"batch {records[-1].number}", "end muted")
    yield "</svg>"


def _svg(height: float, label: str) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{label}">'


def _text(left: float, top: float, text: str, kind: str = "") -> str:
    kind = f' class="{kind}"' if kind else ""
    return f'<text x="{left:.1f}" y="{top:.1f}"{kind}>{escape(text)}</text>'


def _box(
    left: float, top: float, width: float, height: float, kind: str, title: str
) -> str:
    where = f'x="{left:.2f}" y="{top:.2f}" width="{width:.2f}" height="{height:.2f}"'
    return f'<rect class="{escape(kind)}" {where}><title>{escape(title)}</title></rect>'


def _line(x1: float, x2: float, y1: float, y2: float) -> str:
    where = f'x1="{x1:.2f}" x2="{x2:.2f}" y1="{y1:.2f}" y2="{y2:.2f}"'
    return f'<line class="line" {where}/>'


def _axis(seconds: float, bottom: float) -> Iterator[str]:
    """Draw lines at some round times, over the height of a diagram."""
    step = 10 ** math.floor(math.log10(seconds))
    while seconds / step < 4:
        step /= 2
    for at in range(int(seconds / step) + 1):
        left = _LEFT + _ROOM * at * step / seconds
        yield _line(left, left, 0, bottom)
        label = seconds_text(at * step) if at else "0"
        yield _text(left, bottom + 14, label, "middle muted")


def _legend(entries: dict[str, str], bottom: float) -> Iterator[str]:
    left = float(_LEFT)
    for name, kind in entries.items():
        yield _box(left, bottom - 9, 10, 10, kind, name)
        yield _text(left + 15, bottom, name, "muted")
        left += 15 + 7 * len(name) + 20
