"""Draw the packages of aioloader as ``tools/map.svg``, which CONTRIBUTING.md shows.

Run: ``python tools/draw_map.py``. Rows are those of the import contract in
``pyproject.toml``; a box has a package's name, the first line of its docstring, and the
names of the packages inside it.
"""

import ast
import textwrap
import tomllib
from collections.abc import Iterator
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "aioloader"
MAP = ROOT / "tools" / "map.svg"

# Pixels.
_WIDTH = 880
_LEFT = 40
_GAP = 8
_LINE = 17
_CHARACTER = 6.7
_STYLE = (
    "rect{fill:#f3f6fb;stroke:#5b7aa8}text{font:12px sans-serif;fill:#24292f}"
    ".name{font:bold 13px monospace}.inside{font:11px monospace;fill:#57606a}"
    "path{stroke:#5b7aa8;fill:none;stroke-width:1.5}"
)


def layers() -> list[list[str]]:
    """Return the rows of the import contract, from top to bottom."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = config["tool"]["importlinter"]["contracts"]
    rows = next(one["layers"] for one in contracts if one["type"] == "layers")
    return [row.split(" | ") for row in rows]


def summary(name: str) -> str:
    """Return the first line of a module's or package's docstring."""
    path = SOURCE / name / "__init__.py"
    path = path if path.exists() else SOURCE / f"{name}.py"
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return text.partition("\n")[0].replace("`", "")


def inside(name: str) -> list[str]:
    """Return the names of the packages in a package."""
    return sorted(path.parent.name for path in (SOURCE / name).glob("*/__init__.py"))


def _lines(name: str, width: float) -> list[tuple[str, str]]:
    """Return the lines of a box, each with its style."""
    room = int(width / _CHARACTER) - 3
    lines = [("name", name)]
    lines += [("", line) for line in textwrap.wrap(summary(name), room)]
    packages = " ".join(inside(name))
    return lines + [("inside", line) for line in textwrap.wrap(packages, room)]


def _box(lines: list[tuple[str, str]], left: float, top: float, size: str) -> str:
    texts = "".join(
        f'<text class="{style}" x="{left + 10:g}" y="{top + 20 + at * _LINE:g}">'
        f"{escape(text)}</text>\n"
        for at, (style, text) in enumerate(lines)
    )
    return f'<rect x="{left:g}" y="{top:g}" {size} rx="4"/>\n{texts}'


def _boxes() -> Iterator[tuple[float, str]]:
    """Yield each row: where it ends, and its boxes."""
    top: float = _GAP
    for row in layers():
        width = (_WIDTH - _LEFT - _GAP * len(row)) / len(row)
        texts = [_lines(name, width) for name in row]
        height = max(map(len, texts)) * _LINE + 14
        size = f'width="{width:g}" height="{height:g}"'
        drawn = "".join(
            _box(lines, _LEFT + at * (width + _GAP), top, size)
            for at, lines in enumerate(texts)
        )
        top += height + _GAP
        yield top, drawn


def drawing() -> str:
    """Return the picture."""
    rows = list(_boxes())
    height = rows[-1][0]
    arrow = f"M22 {_GAP + 8} V{height - _GAP - 8:g} m-5 -7 l5 7 l5 -7"
    label = '<text x="-110" y="15" transform="rotate(-90)">imports</text>'
    title = "Packages of aioloader: upper rows import lower rows"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}" '
        f'width="{_WIDTH}" role="img">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n"
        f'<rect width="100%" height="100%" style="fill:#fff;stroke:none"/>\n'
        f'<path d="{arrow}"/>\n{label}\n{"".join(drawn for _, drawn in rows)}</svg>\n'
    )


if __name__ == "__main__":
    MAP.write_text(drawing())
