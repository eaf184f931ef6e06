"""Print the lowest version that pyproject.toml allows of each direct dependency.

The output is a constraints file for pip: every ``>=`` of the project, its extras and
its test groups as ``==``, the highest where a package is named twice. torch alone stays
at the version of constraints.txt: others load no faster with an old one, and it is
large.
"""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
GROUPS = ("quick", "test", "examples")
_BOUND = re.compile(r"([A-Za-z0-9_.-]+)(?:\[[^]]*\])?>=([0-9.]+)")


def bounds(project: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name and lowest version of every direct dependency."""
    parts = [project["project"]["dependencies"]]
    parts += project["project"]["optional-dependencies"].values()
    parts += [project["dependency-groups"][name] for name in GROUPS]
    entries = (entry for part in parts for entry in part)
    for requirement in (entry for entry in entries if isinstance(entry, str)):
        found = _BOUND.match(requirement)
        if found is None:
            raise SystemExit(f"pyproject.toml: {requirement!r} has no lower bound")
        yield found[1].lower().replace("_", "-"), found[2]


def lowest(project: dict[str, Any]) -> dict[str, str]:
    """Return the version to test, by name."""
    pins: dict[str, str] = {}
    for name, version in bounds(project):
        pins[name] = max(pins.get(name, "0"), version, key=_as_numbers)
    del pins["torch"]
    return pins


def _as_numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


if __name__ == "__main__":
    pinned = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    print(*(line for line in pinned if line.startswith("torch==")), sep="\n")
    for name, version in lowest(
        tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    ).items():
        print(f"{name}=={version}")
