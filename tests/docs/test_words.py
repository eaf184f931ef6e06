"""Pages and source avoid the words of ``words.toml``."""

import pytest

from docs import words


@pytest.mark.slow
@pytest.mark.parametrize("files", words.PAGES + words.SOURCES)
def test_no_text_has_a_word_to_avoid(files: str) -> None:
    """The message names file, line and phrase, and says what to write instead."""
    hits = "\n".join(map(str, words.hits(files)))
    assert not hits, f"words to avoid (tests/docs/words.toml):\n{hits}"


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
def test_phrases_are_found_across_line_ends(text: str, phrase: str | None) -> None:
    """In upper case too; not in code."""
    hits = list(words.hits_in(text, "page.md"))
    assert [hit.phrase for hit in hits] == ([phrase] if phrase else [])


def test_only_text_of_python_files_is_checked() -> None:
    """Comments, docstrings and messages, across line ends.

    Not names, strings of one word, values, arguments, code; jargon only in public text.
    """
    source = (
        '"""It goes\non."""\n'
        "beside = anew\n"
        "# it lets\n# go of it\n"
        'error = f"begun " f"with {name}"\n'
        'pair("goes", "on")\n'
    )
    hits = words.hits_in(words.prose(source), "a.py")
    assert {(hit.place, hit.phrase) for hit in hits} == {
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
        hits = words.hits_in(words.prose(source), f"src/aioloader/{name}")
        assert [hit.phrase for hit in hits] == ["figures", "lanes"][:phrases]


def test_every_word_to_avoid_has_a_replacement() -> None:
    """No word is listed twice."""
    rows = words.words()
    assert len({row.avoid for row in rows}) == len(rows) > 20
    assert all(row.instead for row in rows)
