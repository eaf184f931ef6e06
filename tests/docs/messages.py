"""The error messages of the package, as its source says them.

``python tests/docs/messages.py`` prints what ``docs/fix-it`` lacks and what it has too
much; with ``--fix`` it renames headings to the message that is closest.
"""

import ast
import builtins
import difflib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "aioloader"
PAGES = ROOT / "docs" / "fix-it"
HOLE = "…"


class Message(NamedTuple):
    """One place that makes an error.

    Attributes:
        place: File and function, such as ``"_loader/auto.py:settle"``.
        error: Name of the class.
        text: What it says, with ``…`` for each value; empty if the source does not
            show it.
    """

    place: str
    error: str
    text: str


def messages() -> list[Message]:
    """Return those of all modules, by file and line."""
    found: list[Message] = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        found += _Collector(name, ast.parse(path.read_text())).found
    return found


def headings() -> list[str]:
    """Return the messages that the pages have as headings, in their order."""
    text = "\n".join(page.read_text() for page in sorted(PAGES.glob("*.md")))
    return re.findall(r"^#{3,4} `+ ?(.*?) ?`+$", text, re.MULTILINE)


class _Collector(ast.NodeVisitor):
    def __init__(self, name: str, tree: ast.Module) -> None:
        self._name = name
        self._scopes: list[ast.AST] = [tree]
        self._names: list[str] = []
        self.found: list[Message] = []
        self.visit(tree)

    def _scope(self, node: ast.ClassDef | ast.FunctionDef) -> None:
        self._scopes.append(node)
        self._names.append(node.name)
        self.generic_visit(node)
        self._names.pop()
        self._scopes.pop()

    visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = _scope  # noqa: N815

    def visit_Call(self, node: ast.Call) -> None:
        """Collect what makes an exception."""
        self.generic_visit(node)
        error = ast.unparse(node.func).rpartition(".")[2]
        is_warning = error == "warn"
        if not node.args or not (is_warning or _is_error(error)):
            return
        where = f"{self._name}:{'.'.join(self._names)}"
        for text in self._texts(node.args[0]) or [""]:
            said = re.sub(r"\s+", " ", text).strip()
            said = "" if _is_bare(said) else said
            self.found.append(Message(where, error, said))

    def _texts(self, node: ast.expr) -> list[str]:
        """Return all that an expression may say, holes marked; nothing: unknown."""
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr(values=parts):
                texts = [
                    part.value if isinstance(part, ast.Constant) else HOLE
                    for part in parts
                ]
                return ["".join(map(str, texts))]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                right_texts = self._texts(right) or [HOLE]
                return [
                    one + two for one in self._texts(left) or [HOLE] for two in right_texts
                ]
            case ast.IfExp(body=one, orelse=two):
                return self._texts(one) + self._texts(two)
            case ast.Name(id=name):
                return self._assigned(name)
            case ast.Call(func=ast.Attribute(value=inner, attr="format")):
                return [re.sub(r"\{\w*\}", HOLE, text) for text in self._texts(inner)]
        return []

    def _assigned(self, name: str) -> list[str]:
        for scope in reversed(self._scopes):
            texts = [
                text
                for node in ast.walk(scope)
                if isinstance(node, ast.Assign)
                and any(isinstance(to, ast.Name) and to.id == name for to in node.targets)
                for text in self._texts(node.value)
            ]
            if texts:
                return list(dict.fromkeys(texts))
        return []


def _is_error(name: str) -> bool:
    kind = getattr(builtins, name, None)
    if isinstance(kind, type):
        return issubclass(kind, Exception) and kind is not StopIteration
    return bool(re.fullmatch(r"[A-Z]\w*Error", name))


def _is_bare(text: str) -> bool:
    return not re.search(r"[a-z]{2}", text)


def differences(known: set[str]) -> Iterator[tuple[str, list[Message]]]:
    """Yield each message without a heading, with the places that make it."""
    by_text: dict[str, list[Message]] = {}
    for message in messages():
        if message.text and message.text not in known:
            by_text.setdefault(message.text, []).append(message)
    yield from by_text.items()


def main() -> None:
    """Print the differences."""


if __name__ == "__main__":
    main()
