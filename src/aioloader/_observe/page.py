"""A report as one HTML page: verdict, pipeline, timeline, waits, percentiles.

The page contains its styles, shows diagrams as rows of coloured boxes, and has a policy
that forbids requests. It is well-formed XML, with a light and a dark colour scheme.
"""

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from aioloader._base.formatting import seconds_text
from aioloader._base.records import BatchRecord, RecordedSettings
from aioloader._observe.stages import is_made, percentiles
from aioloader._observe.stats import HEADS, stage_rows
from aioloader._observe.trace import replacing

# Limits on the batches in the timeline, and on the bars in the diagram of waits.
_TIMELINE_ROWS = 40
_MAX_BARS = 230
_STYLE = """
:root { color-scheme: light dark; --page: #fcfcfb; --ink: #1a1a19; --muted: #6b6a66;
  --line: #e1e0dc; --card: #f4f3f0; --mark: #b3261e;
  --read: #2a78d6; --transform: #d9591f; --collate: #14916b; --transport: #b88600;
  --consumer: #7a68c4; --sampler: #c2528b; --idle: #dddcd7; --blocked: #a9a8a3; }
@media (prefers-color-scheme: dark) { :root { --page: #1a1a19; --ink: #f0efec;
  --muted: #a3a29d; --line: #383835; --card: #252523; --mark: #ff8a80;
  --read: #3987e5; --transform: #e0703a; --collate: #23a880; --transport: #c9970f;
  --consumer: #9a8adf; --sampler: #d873a4; --idle: #3d3d3a; --blocked: #6e6d69; } }
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
.row { display: grid; grid-template-columns: 10rem minmax(28rem, 1fr) 5rem;
  column-gap: .75rem; align-items: center; margin-top: .3rem; font-size: .8rem;
  line-height: 1.2; white-space: nowrap; }
.row b { text-align: right; font-weight: 400; }
.marked b { color: var(--mark); font-weight: 600; }
.marked .bar { outline: 2px solid var(--mark); }
.thin .row { height: .75rem; margin: 0; }
.bar { position: relative; height: 1.4em; }
.thin .bar { height: .55rem; }
.bar i { position: absolute; height: 100%; }
.waits { display: flex; align-items: flex-end; gap: 1px; height: 8rem;
  margin-top: .75rem; border-bottom: 1px solid var(--line); }
.waits i { flex: 1 1 0; max-width: 1.5rem; }
.legend i { display: inline-block; width: .7em; height: .7em; margin-right: .3em; }
.legend span { margin-right: 1.25em; }
.read { background: var(--read); } .transform { background: var(--transform); }
.collate { background: var(--collate); } .transport { background: var(--transport); }
.consumer { background: var(--consumer); } .sampler { background: var(--sampler); }
.idle { background: var(--idle); }
.blocked { background: var(--blocked); } .wait { background: var(--muted); }
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


def report_html(path: str | os.PathLike[str], stats: Any, report: Any) -> None:
    """Write a report as a page, which replaces an existing file only when complete."""
    text = "\n".join(_page(stats, report))
    with replacing(Path(path)) as partial:
        partial.write_text(text, encoding="utf-8")


def _page(stats: Any, report: Any) -> Iterator[str]:
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
    for value, label in _tiles(stats, report):
        yield f"<li><b>{escape(value)}</b> {escape(label)}</li>"
    yield "</ul>"
    if stats.stages:
        yield from _figures(stats, report)
    else:
        yield "<p>No batch was recorded yet.</p>"
    yield "<h2>Setting</h2>"
    settings = asdict(stats._setting).items()  # noqa: SLF001
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


def _figures(stats: Any, report: Any) -> Iterator[str]:
    records, setting = stats._records, stats._setting  # noqa: SLF001
    caption = "How the slots of each stage spend their time: busy; starved: without "
    caption += "work to do; blocked: with work that cannot be handed on. On the right: "
    caption += "busy seconds of a slot per batch; those of one worker add up."
    drawing = _pipeline(stats.stages, report.stage)
    yield from _figure("Pipeline", caption, drawing)
    caption = "Where each of the last batches was. The first line is the consumer."
    yield from _figure("Timeline", caption, _timeline(records, setting))
    recent = f"the latest {len(records):,} batches"
    caption = f"Seconds of {'making' if setting.place == 'inline' else 'waiting'} for "
    caption += f"each of {recent}: the longest, where several share a bar."
    yield from _figure("Waits", caption, _waits(records))
    yield "<h2>Percentiles</h2>"
    yield f'<p class="muted">Of {recent}; times are for one batch.</p>'
    waits = percentiles([record.taken - record.asked for record in records])
    wait = ("wait", "", "", "", "", *map(seconds_text, waits))
    yield from _table(HEADS, [*stage_rows(stats.stages), wait])


def _figure(name: str, caption: str, drawing: Iterable[str]) -> Iterator[str]:
    yield f"<h2>{name}</h2>\n<figure>\n<figcaption>{caption}</figcaption>"
    yield from drawing
    yield "</figure>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield '<div class="wide">\n<table>\n<thead>'
    yield "<tr>" + "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
    yield "</tr>\n</thead>\n<tbody>"
    for row in rows:
        yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
    yield "</tbody>\n</table>\n</div>"


def _row(label: str, boxes: Iterable[str], value: str = "", kind: str = "row") -> str:
    """Return one row of a diagram as HTML, with its label, boxes and value."""
    words = f"<span>{escape(label)}</span>", f"<b>{escape(value)}</b>"
    bar = f'<div class="bar">{"".join(boxes)}</div>'
    return f'<div class="{kind}">{words[0]}{bar}{words[1]}</div>'


def _box(kind: str, title: str, begin: float, width: float) -> str:
    """Return a box as HTML; ``begin`` and ``width`` are shares of its row's width."""
    where = f"left:{begin:.3%};width:{width:.3%}"
    return f'<i class="{escape(kind)}" style="{where}" title="{escape(title)}"></i>'


def _legend(entries: dict[str, str]) -> str:
    shown = (
        f'<span><i class="{kind}"></i>{name}</span>' for name, kind in entries.items()
    )
    return f'<p class="muted legend">{"".join(shown)}</p>'


def _pipeline(stages: Sequence[Any], slowest: str) -> Iterator[str]:
    """Draw each stage's shares of busy, starved and blocked time.

    ``slowest``: the stage that the verdict names, which is marked.
    """
    for stage in stages:
        boxes, begin = list[str](), 0.0
        kinds = {"busy": stage.name, "blocked": "blocked", "starved": "idle"}
        for name, kind in kinds.items():
            share = stage.shares[name]
            boxes.append(_box(kind, f"{stage.name}: {share:.0%} {name}", begin, share))
            begin += share
        took = seconds_text(stage.busy / max(1, stage.items * stage.lanes))
        lanes = f" (x {stage.lanes})" if stage.lanes > 1 else ""
        kind = "row marked" if stage.name == slowest else "row"
        yield _row(stage.name + lanes, boxes, took, kind)
    busy = {"busy: the stage's colour": stages[0].name}
    yield _legend(busy | {"blocked": "blocked", "starved": "idle"})


def _timeline(
    records: Sequence[BatchRecord], setting: RecordedSettings
) -> Iterator[str]:
    """Draw a row for the consumer and one for each of the last batches, over time."""
    last = records[-_TIMELINE_ROWS:]
    begin = min(record.made[0] if is_made(record) else record.asked for record in last)
    begin = min(begin, last[0].asked)
    seconds = max(record.taken for record in last) - begin or 1.0

    def box(name: str, kind: str, began: float, ended: float) -> str:
        took = ended - began
        title = f"{name}: {seconds_text(took)}"
        return _box(kind, title, (began - begin) / seconds, took / seconds)

    waits = "making" if setting.place == "inline" else "waiting"
    boxes = [
        box(f"{waits} for batch {record.number}", "idle", record.asked, record.taken)
        for record in last
    ]
    boxes += [
        box(f"step after batch {record.number}", "consumer", record.taken, after.asked)
        for record, after in pairwise(last)
        if after.asked > record.taken
    ]
    yield '<div class="thin">'
    yield _row("consumer", boxes, seconds_text(seconds))
    names = ("read", "waits for a worker", "transform", "collate", "is ready")
    kinds = ("read", "idle", "transform", "collate", "blocked")
    for place, record in enumerate(last):
        lane = f", worker {record.worker}" if setting.workers else ""
        is_named = not place or record is last[-1] or place % 5 == 0
        spans = pairwise((*record.made[:5], record.taken)) if is_made(record) else ()
        boxes = [
            box(f"batch {record.number} {name}", kind, began, ended)
            for name, kind, (began, ended) in zip(names, kinds, spans, strict=False)
            if ended > began
        ]
        yield _row(f"batch {record.number}{lane}" if is_named else "", boxes)
    yield "</div>"
    legend = {name: name for name in ("read", "transform", "collate")}
    yield _legend(legend | {"waiting": "idle", "ready": "blocked", "step": "consumer"})


def _waits(records: Sequence[BatchRecord]) -> Iterator[str]:
    """Draw a bar for each batch's wait; if there are many, one bar for several."""
    waits = [record.taken - record.asked for record in records]
    each = math.ceil(len(waits) / _MAX_BARS)
    most = max(waits) or 1.0
    yield '<div class="waits">'
    for start in range(0, len(waits), each):
        shown, wait = records[start : start + each], max(waits[start : start + each])
        title = f"batch {shown[0].number}: {seconds_text(wait)}"
        if len(shown) > 1:
            first, last = shown[0].number, shown[-1].number
            title = f"batches {first} to {last}: at most {seconds_text(wait)}"
        high = f"height:{wait / most:.3%}"
        yield f'<i class="wait" style="{high}" title="{title}"></i>'
    yield "</div>"
    yield f'<p class="muted">The longest is {seconds_text(max(waits))}.</p>'
