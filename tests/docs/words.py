"""The words to avoid (``words.toml``), and where the project's text has them.

``python tests/docs/words.py`` prints every place; arguments are patterns of files. A
phrase is found across line ends. In Python files only comments and strings count, but
not names in them: a string of one word, the values of an f-string, an entry of ``Args``
or ``Attributes``. Nor do the headings of ``docs/fix-it``, which quote messages of the
source, nor, for some words, code in Markdown and between backquotes. Jargon of the
source counts where users read; the reference quotes docstrings.
"""

import functools
import io
import re
import sys
import token
import tokenize
import tomllib
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("words.toml")
PAGES = ("*.md", "docs/**/*.md", ".github/**/*.md", ".github/**/*.yml")
SOURCES = ("src/aioloader/**/*.py", "examples/**/*.py")
# Where jargon of the source counts too.
PUBLIC = re.compile(
    r"README|CHANGELOG|SECURITY|docs/(?!reference/)|examples/"
    r"|src/aioloader/((datasets/)?[a-z]\w*\.py|_cli/|_loader/(arguments|loader)"
    r"|_observe/(metrics|page|stats|verdict)|_device/naming)"
)
# On Python 3.12 and later, the text of an f-string is a token of its own.
_QUOTED = re.compile(r"^### `.*$", re.MULTILINE)
_CODE = re.compile(r"(?ms)^ *```.*?^ *```$|(`+)(?!`).*?(?<!`)\1(?!`)")
_MARKS = re.compile(r"^\w*[\"']+|[\"']+$|^#|\\n")
_NAMES = re.compile(r"(?m)^\w*([\"']+)\w+\1$|^ +\w+:(?=\s)")
_VALUES = re.compile(r"\{[^{}]*\}")
_TEXT = {token.STRING, token.COMMENT}
# Since Python 3.12 an f-string is several tokens, between these.
_BEGIN, _END = getattr(token, "FSTRING_START", -1), getattr(token, "FSTRING_END", -1)


class Word(NamedTuple):
    """One entry of the list.

    Attributes:
        avoid: A regular expression for whole words; a space matches any white space.
        instead: What to write.
        may_be_code: Whether code may have it.
        is_public: Whether it is avoided only where users read.
    """

    avoid: str
    instead: str
    may_be_code: bool
    is_public: bool


class Hit(NamedTuple):
    """An occurrence of a phrase of the list."""

    place: str
    phrase: str
    instead: str

    def __str__(self) -> str:
        return f"{self.place}: {self.phrase!r}: write {self.instead}"


@functools.cache
def words() -> list[Word]:
    """Return the list."""
    rows = tomllib.loads(LIST.read_text())
    kinds = {"words": (False, False), "prose": (True, False), "public": (True, True)}
    return [
        Word(avoid, instead, *kind)
        for name, kind in kinds.items()
        for avoid, instead in rows[name]
    ]


def pattern(word: Word) -> re.Pattern[str]:
    """Return the compiled expression of a word."""
    return re.compile(rf"\b(?:{word.avoid})\b".replace(" ", r"\s+"), re.IGNORECASE)


def prose(source: str) -> str:
    """Return a Python file with its code masked, so that offsets stay as they are."""
    starts = [0, *accumulate(map(len, source.splitlines(keepends=True)))]
    masked = list(re.sub(r"\S", "|", source))
    begins = []
    for lexeme in tokenize.generate_tokens(io.StringIO(source).readline):
        if lexeme.type in {*_TEXT, _BEGIN}:
            begins.append(starts[lexeme.start[0] - 1] + lexeme.start[1])
        if lexeme.type in {*_TEXT, _END}:
            begin = begins.pop()
            end = starts[lexeme.end[0] - 1] + lexeme.end[1]
            text = _NAMES.sub(_blanks, source[begin:end])
            if re.match("r?f", text, re.IGNORECASE):
                text = _VALUES.sub(_blanks, text)
            masked[begin:end] = _MARKS.sub(_blanks, text)
    return "".join(masked)


def _blanks(marks: re.Match[str]) -> str:
    return re.sub(r"\S", " ", marks[0])


def hits_in(text: str, name: str) -> Iterator[Hit]:
    """Yield the hits of one text, word by word."""
    without_code = _CODE.sub(_blanks, text)
    is_public = bool(PUBLIC.match(name))
    for word in words():
        if word.is_public and not is_public:
            continue
        for match in pattern(word).finditer(without_code if word.may_be_code else text):
            line = text.count("\n", 0, match.start()) + 1
            phrase = " ".join(match[0].split())
            yield Hit(f"{name}:{line}", phrase, word.instead)


def hits(*patterns: str) -> list[Hit]:
    """Return the hits of all files that match."""
    all_hits: list[Hit] = []
    for path in sorted({path for glob in patterns for path in ROOT.glob(glob)}):
        text = path.read_text()
        text = prose(text) if path.suffix == ".py" else _QUOTED.sub(_blanks, text)
        all_hits += hits_in(text, path.relative_to(ROOT).as_posix())
    return all_hits


if __name__ == "__main__":
    sys.exit("\n".join(map(str, hits(*(sys.argv[1:] or PAGES + SOURCES)))) or 0)
