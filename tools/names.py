"""Count names that need a second reading: vague, ambiguous, or hiding a class.

``make check`` runs it, and it fails above the limits: bindings called ``one``,
``found`` and the like; classes and type aliases of modules that share one name but not
one meaning; aliases of Any. ``--list`` prints each place.
"""

import argparse
import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

VAGUE = {"one", "found", "at", "what", "other", "others", "some"}
LIMITS = {"vague bindings": 100, "names with several meanings": 10, "aliases of Any": 0}
ANY = {"Any", "typing.Any"}


def bindings(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield each name that is bound, also as an argument or an attribute."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                yield name, node.lineno
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node.lineno
            case ast.arg(arg=name):
                yield name, node.lineno
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                yield name, node.lineno


def types(tree: ast.Module) -> Iterator[tuple[str, str, int]]:
    """Yield the classes and the type aliases of a module: name, meaning, line.

    A class means itself. Aliases with equal values mean the same.
    """
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name):
                yield name.lstrip("_"), "class", node.lineno
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                name = name.lstrip("_")
                if name[:1].isupper() and not name.isupper():
                    yield name, ast.unparse(value).strip("'\""), node.lineno


def count(root: Path) -> dict[str, list[str]]:
    """Return the places of each kind below ``root``."""
    counted: dict[str, list[str]] = {kind: [] for kind in LIMITS}
    meanings: dict[str, dict[tuple[str, str], str]] = defaultdict(dict)
    for path in sorted(root.rglob("*.py")):
        tree = ast.parse(path.read_text())
        counted["vague bindings"] += [
            f"{path}:{line}: {name}"
            for name, line in bindings(tree)
            if name.strip("_") in VAGUE
        ]
        for name, value, line in types(tree):
            is_class = value == "class"
            meanings[name][value, str(path) if is_class else ""] = f"{path}:{line}"
            if value in ANY:
                counted["aliases of Any"].append(f"{path}:{line}: {name}")
    counted["names with several meanings"] = [
        f"{name}: {', '.join(places.values())}"
        for name, places in sorted(meanings.items())
        if len(places) > 1
    ]
    return counted


def main() -> int:
    """Print the counts; return 1 if one is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print each place")
    is_listed = parser.parse_args().list
    status = 0
    for kind, places in count(Path(__file__).parent.parent / "src").items():
        print(f"{kind}: {len(places)}, at most {LIMITS[kind]}")
        status |= len(places) > LIMITS[kind]
        if is_listed:
            print(*(f"  {place}" for place in places), sep="\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
