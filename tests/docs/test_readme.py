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
def test_a_row_has_the_best_of_ours_and_of_the_peers(
    question: str, benchmark: str, cells: str
) -> None:
    """As the results name them, at a glance, for one of that benchmark's cases."""
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


@pytest.mark.parametrize("text", [one for one in IDEAS if "`benchmarks/" in one])
def test_figures_of_the_guide_are_those_of_the_results(text: str) -> None:
    """Those with a point or a comma, at the precision shown."""
    [name] = re.findall(r"`benchmarks/(\w+)\.py`", text)
    sections = re.findall(
        rf"\n## {name}(?:_sweep)?\n(.*?)(?=\n## )", RESULTS, re.DOTALL
    )
    shown = {
        float(one.replace(",", ""))
        for one in re.findall(r"[\d,.]*\d", "".join(sections))
    }
    quoted = re.findall(r"(?<![\w.,])\d[\d,]*(?:,\d{3}|\.\d+)(?![\w,])", text)
    assert shown
    for one in quoted:
        digits = len(one.partition(".")[2])
        known = {round(figure, digits) for figure in shown}
        assert float(one.replace(",", "")) in known, f"{one} is not in {name}"


def test_losses_are_counted_as_they_are_shown() -> None:
    """In bold, and as many in the README."""
    glance = RESULTS.split("## At a glance\n", 1)[1].split("\n## ", 1)[0]
    bold = re.findall(r"^\| .*\| \*\*[\d.]+\*\* \| [^|]* \|$", glance, re.MULTILINE)
    rows = re.findall(r"^\| \[.*\|$", glance, re.MULTILINE)
    assert f"{len(rows)} cases, worse in {len(bold)} (in bold)" in glance
    assert f"in {len(bold)} of {len(rows)} cases" in " ".join(TEXT.split())


def test_losses_are_named() -> None:
    """Each kind in which a peer is better, by words of its own or by its name."""
    losses = set(re.findall(r"^\| \[(\w+)\].*\| \*\*", RESULTS, re.MULTILINE))
    readme = importlib.import_module("readme")
    assert losses
    assert not [one for one in losses if readme.LOSSES.get(one, one) not in RESULTS]


def test_one_figure_for_the_reads_of_objects() -> None:
    """The README, its picture and the guide name the same."""
    assert "6,478" in TEXT
    assert "aioloader reads 6,478" in " ".join(IDEAS).replace("\n", " ")


def test_figures_of_peers_say_what_they_are() -> None:
    """Two of one peer in a cell: each with the setting that it is of."""
    for _, _, cells in FIGURES:
        for pair in re.findall(r"torch [\d.,]+(.*), and [\d.,]+ (\w+)", cells):
            assert all(pair), cells


def test_the_section_is_that_of_the_results() -> None:
    """``python benchmarks/results_page.py`` writes it."""
    results = importlib.import_module("figures").read_all(BENCHMARKS / "results")
    readme = importlib.import_module("readme")
    assert readme.updated(TEXT, results) == TEXT
    assert (ROOT / "docs" / "objects.svg").read_text() == readme.chart(results)


def test_figures_of_the_readme_are_medians_of_five_rounds() -> None:
    """``make bench`` measures these questions as often as the others may wait for."""
    run, readme = importlib.import_module("run"), importlib.import_module("readme")
    assert [run.ROUNDS[quoted.question] for quoted in readme.QUOTED] == [5] * 4
    assert len(FIGURES) == 4
