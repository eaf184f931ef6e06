"""Pages and source avoid the words of ``words.toml``."""

import pytest

from docs import words


@pytest.mark.slow
@pytest.mark.parametrize("files", words.PAGES + words.SOURCES)
def test_words_to_avoid_are_avoided(files: str) -> None:
    """The message names file, line and phrase, and says what to write instead."""
    found = "\n".join(map(str, words.hits(files)))
    assert not found, f"words to avoid (tests/docs/words.toml):\n{found}"


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("It goes\non there.", "goes on"),
        ("Whoever reads", "Whoever"),
        ("after batch 7", None),
        ("what is left behind", None),
        ("Code: `on_the_spot`", None),
    ],
)
def test_a_phrase_is_found_in_a_page(text: str, phrase: str | None) -> None:
    """Across a line end, in upper case, as whole words."""
    found = list(words.hits_in(text, "page.md"))
    assert [hit.phrase for hit in found] == ([phrase] if phrase else [])


def test_source_counts_where_it_is_text() -> None:
    """Comments, docstrings and messages, each over its line ends; names do not.

    Nor do a string of one word, a value, an argument, code; jargon inside the package.
    """
    source = (
        '"""It goes\non."""\n'
        "beside = anew\n"
        "# it lets\n# go of it\n"
        'error = f"begun " f"with {name}"\n'
        'pair("goes", "on")\n'
    )
    found = words.hits_in(words.prose(source), "a.py")
    assert {(hit.place, hit.phrase) for hit in found} == {
        ("a.py:1", "goes on"),
        ("a.py:4", "lets go"),
        ("a.py:6", "begun with"),
    }
    source = (
        '"""Draw.\n\n    tail: ``tail`` decides.\n    """\n'
        'heads = ("lanes", "figures")\n'
        'error = f"{tail} and {lane}, by tail=1"\n'
        "# The lanes of figures.\n"
    )
    for name, phrases in ("_pipeline/a.py", 1), ("datasets/a.py", 2):
        found = words.hits_in(words.prose(source), f"src/aioloader/{name}")
        assert [hit.phrase for hit in found] == ["figures", "lanes"][:phrases]


def test_every_row_has_advice() -> None:
    """No row is listed twice, and each names what to write."""
    rows = words.words()
    assert len({row.avoid for row in rows}) == len(rows) > 20
    assert all(row.instead for row in rows)
