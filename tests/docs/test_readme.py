"""The README reads well anywhere: links lead into this tree, figures are measured."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
HOME = re.compile(
    r"https://(?:github\.com/aioloader/aioloader/(?:blob|tree)"
    r"|raw\.githubusercontent\.com/aioloader/aioloader)/main/(\S+)"
)
LINKS = re.findall(r"\]\((\S+?)\)", TEXT)
FIGURES = re.findall(
    r"^\| (.+) \(`python benchmarks/(\w+)\.py`\) \| (.+) \|$", TEXT, re.MULTILINE
)


@pytest.mark.parametrize("link", [*dict.fromkeys(LINKS)])
def test_links_are_absolute_and_live(link: str) -> None:
    """PyPI shows the README without the repository."""
    found = HOME.fullmatch(link)
    assert found, f"{link} is not an absolute link into the repository"
    assert (ROOT / found[1]).exists()


@pytest.mark.parametrize(("question", "benchmark", "cells"), FIGURES)
def test_figures_are_those_of_the_results(
    question: str, benchmark: str, cells: str
) -> None:
    """Each number of a row is in that benchmark's section, at the precision shown."""
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    section = results.split(f"\n## {benchmark}\n", 1)[1].split("\n## ", 1)[0]
    shown = {float(text.replace(",", "")) for text in re.findall(r"[\d,.]*\d", section)}
    quoted = re.findall(
        r"(?<![\w_])[\d,.]*\d(?![\w_])", re.sub(r"`.+?`|\d+ plain", "", cells)
    )
    assert quoted, question
    for text in quoted:
        number = float(text.replace(",", ""))
        digits = len(text.partition(".")[2])
        assert number in {round(one, digits) for one in shown}, f"{question}: {text}"


def test_losses_are_counted() -> None:
    """As many as the results count."""
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    counted = re.search(r"in \d+ of (\d+) cases, worse in (\d+)", results)
    assert counted
    cases, losses = counted.groups()
    assert f"slower than a peer in {losses} of {cases} cases" in TEXT
    assert len(FIGURES) == 3
