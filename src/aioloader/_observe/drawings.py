"""Drawings of a report page, as inline SVG: pipeline, shares of time, timeline, waits.

Lengths are pixels of a drawing 920 wide, which the page scales. Colours are classes of
the page's style sheet, one for each stage.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import pairwise
from typing import Any

from aioloader._observe.records import Record, Setting
from aioloader._observe.stages import is_coupled, is_made, on_one_clock
from aioloader._observe.words import seconds_text

_WIDTH = 920
_LEFT = 170
_RIGHT = 90
_ROOM = _WIDTH - _LEFT - _RIGHT
# Lines of a timeline, and bars of waits.
_ROWS = 40
_BARS = 230
_MAKING = ("read", "transform", "collate")


def draw_pipeline(
    stages: Sequence[Any], slowest: str, setting: Setting
) -> Iterator[str]:
    """Draw stages from top to bottom, as wide as the time that each batch takes there.

    Stages that the same lanes do one after the other are on one line.

    Args:
        stages: ``stats.stages``.
        slowest: The stage named by the verdict; it is marked.
        setting: The loader's setting, which determines which stages share lanes.
    """
    lines = _sharing_lanes(stages, setting)
    widest = max(sum(map(_per_batch, line)) for line in lines) or 1.0
    yield _svg(len(lines) * 56 + 6, "Pipeline: time for a batch, by stage")
    for at, line in enumerate(lines):
        top, seconds = at * 56 + 4, sum(map(_per_batch, line))
        width = _ROOM * seconds / widest
        left = _LEFT + (_ROOM - width) / 2
        middle = _LEFT + _ROOM / 2
        if at:
            arrow = f"M{middle} {top - 21} V{top - 4} m-4 -5 l4 5 l4 -5"
            yield f'<path class="flow" d="{arrow}"/>'
        lanes = f"{line[0].lanes} at a time" if line[0].lanes > 1 else "one at a time"
        yield _text(0, top + 13, " + ".join(one.name for one in line))
        yield _text(0, top + 28, lanes, "muted")
        is_slowest = slowest in [one.name for one in line]
        for one in line:
            part = _ROOM * _per_batch(one) / widest
            title = f"{one.name}: {seconds_text(_per_batch(one))} a batch"
            yield _box(left, top, part, 30, one.name, title)
            left += part
        if is_slowest:
            edge = f'x="{left - width:.2f}" y="{top - 1}" width="{max(width, 3):.2f}"'
            yield f'<rect class="frame" {edge} height="32" rx="3"/>'
        kind = "end marked" if is_slowest else "end"
        yield _text(_WIDTH, top + 19, seconds_text(seconds), kind)
    yield "</svg>"


def _sharing_lanes(stages: Sequence[Any], setting: Setting) -> list[list[Any]]:
    shared = set() if setting.transforms_async else {("transform", "collate")}
    if is_coupled(setting):
        shared.add(("read", "transform"))
    lines: list[list[Any]] = []
    for one in stages:
        before = lines[-1][-1].name if lines else ""
        if (before, one.name) in shared:
            lines[-1].append(one)
        else:
            lines.append([one])
    return lines


def _per_batch(stage: Any) -> float:
    seconds = float(stage.busy)
    return seconds / max(1, int(stage.items) * int(stage.lanes))


def draw_shares(stages: Sequence[Any]) -> Iterator[str]:
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
    below = len(stages) * 28 + 20
    yield from _legend(
        [
            ("busy: the stage's colour", stages[0].name),
            ("blocked", "blocked"),
            ("starved", "idle"),
        ],
        below,
    )
    yield "</svg>"


def draw_timeline(records: Sequence[Record], setting: Setting) -> Iterator[str]:
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
    yield from _legend(
        [
            *((name, name) for name in _MAKING),
            ("waiting", "idle"),
            ("ready", "blocked"),
            ("step", "consumer"),
        ],
        height - 8,
    )
    yield "</svg>"


def draw_waits(records: Sequence[Record]) -> Iterator[str]:
    """Draw how long the consumer waited for each batch."""
    waits = [one.taken - one.asked for one in records]
    each = math.ceil(len(waits) / _BARS)
    bars = [waits[at : at + each] for at in range(0, len(waits), each)]
    most, width = max(waits) or 1.0, _ROOM / len(bars)
    yield _svg(168, "Wait for each batch")
    for share in (0.0, 0.5, 1.0):
        top = 8 + 120 * (1 - share)
        line = f'x1="{_LEFT}" x2="{_LEFT + _ROOM}" y1="{top}" y2="{top}"'
        yield f'<line class="line" {line}/>'
        label = seconds_text(most * share) if share else "0"
        yield _text(_LEFT - 8, top + 4, label, "end muted")
    for at, bar in enumerate(bars):
        number, wait = records[at * each].number, max(bar)
        high = 120 * wait / most
        title = f"batch {number}: {seconds_text(wait)}"
        if len(bar) > 1:
            title = f"batches {number} to {records[at * each + len(bar) - 1].number}: "
            title += f"at most {seconds_text(wait)}"
        left, wide = _LEFT + at * width, max(width - 1, 0.6)
        yield _box(left, 128 - high, min(wide, 24), high, "wait", title)
    yield _text(_LEFT, 148, f"batch {records[0].number}", "muted")
    yield _text(_LEFT + _ROOM, 148, f"batch {records[-1].number}", "end muted")
    yield "</svg>"


# -- parts --------------------------------------------------------------------------


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


def _axis(seconds: float, bottom: float) -> Iterator[str]:
    """Draw lines at some round times, over the height of a drawing."""
    step = 10 ** math.floor(math.log10(seconds))
    while seconds / step < 4:
        step /= 2
    for at in range(int(seconds / step) + 1):
        left = _LEFT + _ROOM * at * step / seconds
        line = f'x1="{left:.2f}" x2="{left:.2f}" y1="0" y2="{bottom}"'
        yield f'<line class="line" {line}/>'
        label = seconds_text(at * step) if at else "0"
        yield _text(left, bottom + 14, label, "middle muted")


def _legend(entries: Iterable[tuple[str, str]], bottom: float) -> Iterator[str]:
    left = float(_LEFT)
    for name, kind in entries:
        yield _box(left, bottom - 9, 10, 10, kind, name)
        yield _text(left + 15, bottom, name, "muted")
        left += 15 + 7 * len(name) + 20
