"""The repository holds what is written by hand, small figures, and nothing else."""

import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LARGEST = 200_000  # bytes of a file; plots are the largest


def _committed() -> list[Path]:
    """Files that git follows, as paths from the root."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout: git cannot say what is committed")
    done = subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return [Path(name) for name in done.stdout.split("\0") if name]


def test_no_committed_file_is_large() -> None:
    """Data is generated, or comes in packages."""
    here = [path for path in _committed() if (ROOT / path).is_file()]
    sizes = {path: (ROOT / path).stat().st_size for path in here}
    assert {path: size for path, size in sizes.items() if size > LARGEST} == {}


def test_the_sdist_has_exactly_the_committed_root_entries() -> None:
    """Files that a run leaves at the root are neither committed nor shipped."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    sdist = settings["tool"]["hatch"]["build"]["targets"]["sdist"]
    shipped = set(sdist["only-include"])
    assert {path.parts[0] for path in _committed()} - {".ci"} == shipped
