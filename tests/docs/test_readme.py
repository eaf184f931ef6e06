"""What the README and the guide claim was measured."""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
TEXT = (ROOT / "README.md").read_text()
RESULTS = (BENCHMARKS / "RESULTS.md").read_text()
FIGURES = re.findall(
    r"^\| (.+) \(`python benchmarks/(\w+)\.py`\) \| (.+) \|$", TEXT, re.MULTILINE
)


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The benchmarks' scripts import each other by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in ("figures", "readme", "run"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("question", "benchmark", "cells"), FIGURES)
def test_a_readme_row_has_the_best_measured_figures(
    question: str, benchmark: str, cells: str
) -> None:
    """Ours and the best peer's, as "At a glance" in the results has them for a case."""
    best = [
        (re.escape(ours), re.escape(peer))
        for ours, peer in re.findall(
            rf"^\| \[{benchmark}\]\S*.*? \| \S+ \| [^|]*: ([\d,.]+)[^|]*"
            r"\| [^|]*: ([\d,.]+)[^|]* \|",
            RESULTS,
            re.MULTILINE,
        )
    ]
    assert any(
        re.match(rf"{ours} \S+ \|.*\w+ {peer}(?![\d,.]*\d)", cells)
        for ours, peer in best
    ), f"{question}: {cells}; the results have {best}"


IDEAS = re.split(r"\n\n|\n(?=- )", (ROOT / "docs" / "ideas.md").read_text())


@pytest.mark.parametrize("text", [text for text in IDEAS if "`benchmarks/" in text])
def test_figures_of_the_guide_are_in_the_results(text: str) -> None:
    """Those with a point or a comma, at the precision shown."""
    [name] = re.findall(r"`benchmarks/(\w+)\.py`", text)
    sections = re.findall(
        rf"\n## {name}(?:_sweep)?\n(.*?)(?=\n## )", RESULTS, re.DOTALL
    )
    shown = {
        float(figure.replace(",", ""))
        for figure in re.findall(r"[\d,.]*\d", "".join(sections))
    }
    quoted = re.findall(r"(?<![\w.,])\d[\d,]*(?:,\d{3}|\.\d+)(?![\w,])", text)
    assert shown
    for figure in quoted:
        digits = len(figure.partition(".")[2])
        known = {round(value, digits) for value in shown}
        assert float(figure.replace(",", "")) in known, f"{figure} is not in {name}"


def test_cases_in_which_a_peer_is_better_are_counted() -> None:
    """In bold in the results, and as many in the README."""
    glance = RESULTS.split("## At a glance\n", 1)[1].split("\n## ", 1)[0]
    bold = re.findall(r"^\| .*\| \*\*[\d.]+\*\* \| [^|]* \|$", glance, re.MULTILINE)
    rows = re.findall(r"^\| \[.*\|$", glance, re.MULTILINE)
    assert f"{len(rows)} cases, worse in {len(bold)} (in bold)" in glance
    assert f"in {len(bold)} of {len(rows)} cases" in " ".join(TEXT.split())


def test_cases_in_which_a_peer_is_better_are_named() -> None:
    """By the words of `readme.LOSSES`, or by the benchmark's name."""
    losses = set(re.findall(r"^\| \[(\w+)\].*\| \*\*", RESULTS, re.MULTILINE))
    readme = importlib.import_module("readme")
    assert losses
    assert not [name for name in losses if readme.LOSSES.get(name, name) not in RESULTS]


def test_readme_and_guide_quote_the_same_object_reads() -> None:
    assert "6,478" in TEXT
    assert "aioloader reads 6,478" in " ".join(IDEAS).replace("\n", " ")


def test_two_figures_of_a_peer_name_their_settings() -> None:
    for _, _, cells in FIGURES:
        for pair in re.findall(r"torch [\d.,]+(.*), and [\d.,]+ (\w+)", cells):
            assert all(pair), cells


def test_the_readmes_section_of_results_is_current() -> None:
    """``python benchmarks/results_page.py`` writes it."""
    results = importlib.import_module("figures").read_all(BENCHMARKS / "results")
    readme = importlib.import_module("readme")
    assert readme.updated(TEXT, results) == TEXT
    assert (ROOT / "docs" / "objects.svg").read_text() == readme.chart(results)


def test_figures_of_the_readme_are_medians_of_five() -> None:
    """``make bench`` measures these questions five times."""
    run, readme = importlib.import_module("run"), importlib.import_module("readme")
    assert [run.ROUNDS[quoted.question] for quoted in readme.QUOTED] == [5] * 4
    assert len(FIGURES) == 4
