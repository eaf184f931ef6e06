"""The questions of a new user are answered where ``docs/questions.md`` says."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
ROW = re.compile(r"^\| (\d+) \| (.+) \| \[.+\]\((\S+?)\) \| (.+) \|$", re.MULTILINE)
ROWS = ROW.findall((DOCS / "questions.md").read_text())


def slug(heading: str) -> str:
    """Return the anchor of a heading, as MkDocs makes it."""
    kept = re.sub(r"[^\w\s-]", "", heading).strip().lower()
    return re.sub(r"[-\s]+", "-", kept)


def section(page: str, anchor: str) -> str:
    """Return the text below a heading; of the whole page without an anchor."""
    text = (DOCS / page).read_text()
    if not anchor:
        return text
    for found in re.finditer(r"^(#+) (.+)$", text, re.MULTILINE):
        if slug(found[2]) == anchor:
            rest = text[found.start() :]
            end = re.search(rf"\n#{{1,{len(found[1])}}} ", rest)
            return rest[: end.start()] if end else rest
    raise AssertionError(f"{page} has no heading {anchor!r}")


def test_all_rows_are_read() -> None:
    """The table has as many rows as its last number says."""
    lines = (DOCS / "questions.md").read_text().splitlines()
    last = max(int(line.split("|")[1]) for line in lines if re.match(r"\| \d", line))
    assert [int(number) for number, *_ in ROWS] == list(range(1, last + 1))
    assert last >= 25


@pytest.mark.parametrize(("number", "question", "link", "words"), ROWS)
def test_a_question_is_answered(
    number: str, question: str, link: str, words: str
) -> None:
    """The section has the words of the search."""
    page, _, anchor = link.partition("#")
    text = section(page, anchor).lower()
    assert not [word for word in words.lower().split() if word not in text]
