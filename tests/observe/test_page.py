"""The report page: well-formed, self-contained, true to the records; in a browser."""

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from aioloader import DataLoader
from aioloader._base.records import NOT_MADE, BatchRecord, BatchTimes, RecordedSettings
from aioloader._observe.page import report_html
from aioloader._observe.verdict import Advice, HeadRoom, Report
from observe.showing import SETTINGS, WORKERS, Figures, Stage

CHROMIUM = shutil.which("chromium")
STAGES = (
    Stage("read", 2, 50, busy=30.0, starved=50.0, blocked=20.0, p50=0.6, p99=0.9),
    Stage("transform", 2, 50, busy=50.0, starved=30.0, blocked=20.0, p50=1.0),
    Stage("collate", 2, 50, busy=10.0, starved=90.0, p50=0.2),
    Stage("transport", 1, 50, busy=0.0, starved=50.0, p50=0.0002),
    Stage("consumer", 1, 50, busy=20.0, starved=30.0, p50=0.4),
)


VERDICT = Report(
    "Your transform is the bottleneck: it <waits> & waits.",
    "transform",
    Advice("num_workers", 2, 4, 50.0, "it <helps>"),
    wait_share=0.6,
    head_room=(HeadRoom(1, 0.4), HeadRoom(2, 0.2), HeadRoom(4, 0.1)),
    batches=50,
    remarks=("2 samples failed.",),
)


def records(count: int, *, is_made: bool = True) -> list[BatchRecord]:
    """Return batches, one a second: read in 0.6 s, transformed in 1, collated in .2."""
    batches = []
    for number in range(count):
        t = float(number)
        made: BatchTimes = (t, t + 0.6, t + 0.6, t + 1.6, t + 1.8, 0.0, 0.0, 0.0)
        made = made if is_made else NOT_MADE
        batches.append(BatchRecord(number, t + 1.4, t + 2.0, number % 2, 4, made))
    return batches


def written(
    path: Path,
    taken: Sequence[BatchRecord],
    setting: RecordedSettings = WORKERS,
    stages: Sequence[Stage] = STAGES,
) -> str:
    """Write a page and return it."""
    stats: Any = Figures(
        3, len(taken), 30.0, failures=2, recent=len(taken), seconds=50.0, samples=200
    )
    shown = {"stages": tuple(stages) if taken else (), "_records": taken}
    stats = SimpleNamespace(**vars(stats) | shown, _setting=setting)
    report_html(path, stats, VERDICT)
    return path.read_text(encoding="utf-8")


def parsed(text: str) -> ET.Element:
    """Return the page, which has to be well-formed."""
    doctype, _, rest = text.partition("\n")
    assert doctype == "<!DOCTYPE html>"
    return ET.fromstring(rest)


class References(HTMLParser):
    """The addresses that a page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the addresses of a tag."""
        self.tags.add(tag)
        names = {"href", "src", "srcset", "data", "action", "xlink:href"}
        self.addresses += [str(value) for name, value in attrs if name in names]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.place + s.worker_kind)
@pytest.mark.parametrize("count", [0, 1, 2, 1024])
def test_every_page_is_well_formed_and_self_contained(
    tmp_path: Path, setting: RecordedSettings, count: int
) -> None:
    """It has all its parts."""
    text = written(tmp_path / "page.html", records(count), setting)
    root = parsed(text)
    references = References()
    references.feed(text)
    assert references.addresses == ["data:,"]
    assert not {"script", "iframe", "object", "img"} & references.tags
    assert "http" not in text.replace("http-equiv", "")
    assert "url(" not in text
    assert "@import" not in text
    assert len(root.findall(".//figure")) == (3 if count else 0)
    assert {"NaN", "nan", "inf"}.isdisjoint(re.findall(r"[\w.]+", text))


def test_page_and_trace_have_the_number_of_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioloader._base.machine.cores", lambda: 12)
    page, trace = tmp_path / "page.html", tmp_path / "run.json"
    for ahead in (None, 2):
        with DataLoader(range(8), 2, prefetch_factor=ahead) as loader:
            with loader.trace(trace):
                list(loader)
            loader.report_html(page)
        (epoch,) = json.loads(trace.read_text())["otherData"]["epochs"]
        assert epoch["cores"] == 12
        assert "<td>cores</td><td>12</td>" in page.read_text()


def test_the_page_has_verdict_figures_and_stages(tmp_path: Path) -> None:
    root = parsed(written(tmp_path / "page.html", records(50)))
    assert root.findtext(".//h1") == VERDICT.headline
    assert root.findtext("head/title") == VERDICT.headline
    said = ["".join(node.itertext()) for node in root.findall(".//p")]
    assert {str(VERDICT.advice), "2 samples failed."} < {*said}
    assert "Measured over the latest 50 batches." in said
    tiles = ["".join(node.itertext()) for node in root.findall(".//li")]
    assert tiles[:3] == [
        "60% of the time waiting",
        "1 batches per second",
        "4 samples per second",
    ]
    table = root.findall(".//table")[0]
    rows = [[cell.text or "" for cell in row] for row in table.iter("tr")]
    assert rows[1] == ["read", "2", "30%", "50%", "20%", "600 ms", "0 s", "900 ms"]
    assert [row[0] for row in rows[1:]] == [*(stage.name for stage in STAGES), "wait"]
    assert rows[-1][5:] == ["600 ms"] * 3


def test_a_page_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("before")
    broken: Any = SimpleNamespace(**vars(Figures()), headline="x")
    with pytest.raises(AttributeError):
        report_html(path, broken, broken)
    assert path.read_text() == "before"
    written(path, records(3))
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_shows_the_page_without_errors(tmp_path: Path) -> None:
    """In light and dark; a page that loads a file has an error."""
    page, broken = tmp_path / "page.html", tmp_path / "broken.html"
    text = written(page, records(200))
    pictures = []
    for scheme in ("light", "dark"):
        errors, picture = rendered(page, scheme)
        assert errors == []
        pictures.append(picture)
    assert len(set(pictures)) == 2
    broken.write_text(text.replace("<main>", '<main><img src="http://127.0.0.1:1/x"/>'))
    errors, _ = rendered(broken, "light")
    assert any("Content Security Policy" in error for error in errors)


def rendered(page: Path, scheme: str) -> tuple[list[str], bytes]:
    """Return the errors in the browser's console, and a screenshot."""
    assert CHROMIUM is not None
    picture = page.with_suffix(".png")
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        *("--disable-background-networking", "--enable-logging=stderr"),
        f"--blink-settings=preferredColorScheme={int(scheme == 'light')}",
        *(f"--user-data-dir={page.parent / 'profile'}", "--window-size=1100,2700"),
        *(f"--screenshot={picture}", page.as_uri()),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60
    )
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return said, picture.read_bytes()
