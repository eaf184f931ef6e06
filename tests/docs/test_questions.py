"""The questions of a new user are answered where ``docs/questions.md`` says.

A comment in each row has words that its answer contains, for which ``test_site.py``
searches the site.
"""

import re
from pathlib import Path

import pytest

from docs.test_links import ROOT, slug, targets

DOCS = ROOT / "docs"
PAGE = DOCS / "questions.md"
ROW = re.compile(
    r"^\| (.+\?) \| \[.+\]\((\S+?)\) <!-- search: (.+) --> \|$", re.MULTILINE
)
ROWS = ROW.findall(PAGE.read_text())


def section(page: str, anchor: str) -> str:
    """Return the text below a heading; of the whole page without an anchor."""
    text = (DOCS / page).read_text()
    if not anchor:
        return text
    for heading in re.finditer(r"^(#+) (.+)$", text, re.MULTILINE):
        if slug(heading[2]) == anchor:
            rest = text[heading.start() :]
            end = re.search(rf"\n#{{1,{len(heading[1])}}} ", rest)
            return rest[: end.start()] if end else rest
    raise AssertionError(f"{page} has no heading {anchor!r}")


def test_each_line_of_the_table_is_parsed() -> None:
    """All but its head."""
    lines = re.findall(r"^\|", PAGE.read_text(), re.MULTILINE)
    assert len(ROWS) == len(lines) - 2 >= 30


@pytest.mark.slow
@pytest.mark.parametrize(("question", "link", "words"), ROWS)
def test_linked_sections_answer_questions(question: str, link: str, words: str) -> None:
    """It contains the words of the search."""
    page, _, anchor = link.partition("#")
    text = section(page, anchor).lower()
    assert not [word for word in words.lower().split() if word not in text]


def pages(page: Path) -> set[Path]:
    """Return the pages to which a page links."""
    return {path for _, path, _ in targets(page) if path.suffix == ".md"}


def test_pages_are_at_most_two_hops_from_the_readme() -> None:
    """Also without the page of questions."""
    first = pages(ROOT / "README.md")
    assert PAGE in first
    second = {target for page in first - {PAGE} for target in pages(page)}
    assert not {*DOCS.rglob("*.md")} - first - second
