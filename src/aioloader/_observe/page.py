"""A report as one HTML page: verdict, pipeline, timeline, waits, percentiles.

The page is self-contained: styles and drawings are inline, and a policy in it forbids
requests. It is also well-formed XML. Colours follow the reader's scheme.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from aioloader._observe.drawings import (
    draw_pipeline,
    draw_shares,
    draw_timeline,
    draw_waits,
)
from aioloader._observe.records import Record, Setting
from aioloader._observe.stages import percentiles
from aioloader._observe.stats import HEADS, stage_rows
from aioloader._observe.trace import replacing
from aioloader._observe.words import seconds_text

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


def report_html(
    path: str | os.PathLike[str],
    stats: Any,
    report: Any,
    records: Sequence[Record],
    setting: Setting,
) -> None:
    """Write the report as a page; an existing file is replaced once it is complete."""
    text = "\n".join(page(stats, report, records, setting))
    with replacing(Path(path)) as partial:
        partial.write_text(text, encoding="utf-8")


def page(
    stats: Any, report: Any, records: Sequence[Record], setting: Setting
) -> Iterator[str]:
    """Yield the page, piece by piece."""
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"/>'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
    yield '<meta name="color-scheme" content="light dark"/>'
    yield '<link rel="icon" href="data:,"/>'
    yield f"<title>{escape(report.headline)}</title>"
    yield f"<style>{_STYLE}</style>\n</head>\n<body>\n<main>"
    yield from _verdict(stats, report)
    if stats.stages and records:
        yield from _figures(stats, report, records, setting)
    else:
        yield "<p>No batch was recorded yet.</p>"
    yield from _how_it_was_set_up(setting)
    yield "</main>\n</body>\n</html>\n"


def _verdict(stats: Any, report: Any) -> Iterator[str]:
    yield f'<p class="muted">aioloader: epoch {stats.epoch}</p>'
    yield f"<h1>{escape(report.headline)}</h1>"
    confidence = f"Confidence: {report.confidence}."
    for line in (report.advice, report.limit, *report.remarks, confidence):
        if line:
            yield f"<p>{escape(str(line))}</p>"
    yield '<ul class="tiles">'
    for value, what in _tiles(stats, report):
        yield f"<li><b>{escape(value)}</b> {escape(what)}</li>"
    yield "</ul>"


def _tiles(stats: Any, report: Any) -> Iterator[tuple[str, str]]:
    yield f"{report.wait_share:.0%}", "of the time waiting"
    if stats.seconds:
        yield f"{stats.recent / stats.seconds:,.4g}", "batches per second"
        yield f"{stats.samples / stats.seconds:,.4g}", "samples per second"
    for speed, used in report.head_room:
        yield f"{used:.0%}", f"accelerator busy, steps at {speed}x speed"
    for name, what in (
        ("failures", "failed samples"),
        ("worker_deaths", "worker deaths"),
        ("worker_restarts", "worker restarts"),
    ):
        if getattr(stats, name):
            yield f"{getattr(stats, name):,}", what


def _figures(
    stats: Any, report: Any, records: Sequence[Record], setting: Setting
) -> Iterator[str]:
    recent = f"the latest {len(records):,} batches"
    yield from _figure(
        "Pipeline",
        "Seconds that each step takes per batch, divided by the lanes that run it "
        "concurrently. The widest sets the pace if enough batches are in flight.",
        draw_pipeline(stats.stages, report.stage, setting),
    )
    yield from _figure(
        "How stages spend their time",
        "Busy; starved: without work to do; blocked: with work that cannot be handed "
        "on.",
        draw_shares(stats.stages),
    )
    yield from _figure(
        "Timeline",
        "Where each of the last batches was. The first line is the consumer.",
        draw_timeline(records, setting),
    )
    name = "making" if setting.place == "inline" else "waiting"
    yield from _figure(
        "Waits",
        f"Seconds of {name} for each of {recent}: the longest, where several share a "
        "bar.",
        draw_waits(records),
    )
    yield "<h2>Percentiles</h2>"
    yield f'<p class="muted">Of {recent}; times are for one batch.</p>'
    yield '<div class="wide">'
    waits = percentiles([one.taken - one.asked for one in records])
    wait = ("wait", "", "", "", "", *map(seconds_text, waits))
    yield from _table(HEADS, [*stage_rows(stats.stages), wait])
    yield "</div>"


def _figure(name: str, caption: str, drawing: Iterable[str]) -> Iterator[str]:
    yield f"<h2>{name}</h2>\n<figure>\n<figcaption>{caption}</figcaption>"
    yield from drawing
    yield "</figure>"


def _how_it_was_set_up(setting: Setting) -> Iterator[str]:
    yield '<h2>Setting</h2>\n<div class="wide">'
    values = asdict(setting).items()
    rows = [(name.replace("_", " "), str(value)) for name, value in values]
    yield from _table(("argument", "value"), rows)
    yield "</div>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield "<table>\n<thead>"
    yield "<tr>" + "".join(f'<th scope="col">{escape(one)}</th>' for one in heads)
    yield "</tr>\n</thead>\n<tbody>"
    for row in rows:
        yield "<tr>" + "".join(f"<td>{escape(one)}</td>" for one in row) + "</tr>"
    yield "</tbody>\n</table>"
