"""Build the package and check it as a user gets it: ``make package``.

The sdist is unpacked, and its tests of single parts run there with the Python that runs
this script; the wheel is built from the sdist and installed into a new environment, in
which the README's example runs.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
MAX_WHEEL = 700_000  # bytes: sources only
# What a contributor needs besides the sources.
IN_SDIST = ("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md")
IN_SDIST += ("constraints.txt", "noxfile.py", "pyproject.toml", "src", "tests")
IN_SDIST += ("benchmarks", "examples", "tools")
EXAMPLE = """
import pathlib, re, sys

page = pathlib.Path(sys.argv[1]).read_text()
code = re.search("```python\\n(.*?)```", page, re.DOTALL)[1]
exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
"""


def run(*command: object, cwd: Path = ROOT, **environment: str) -> str:
    """Run a command, and print its output if it fails."""
    done = subprocess.run(
        list(map(str, command)),
        check=False,
        cwd=cwd,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stdout}")
    return done.stdout.strip()


def environment(path: Path, *arguments: object) -> Path:
    """Make an environment, install into it; return its Python."""
    run(sys.executable, "-m", "venv", path)
    python = path / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--upgrade", "pip>=25.1")
    constraints = ROOT / "constraints.txt"
    run(python, "-m", "pip", "install", "--quiet", "-c", constraints, *arguments)
    return python


def check_wheel(wheel: Path) -> None:
    """Check its size, and that it has types and only the package."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    roots = {name.split("/")[0].split("-")[0] for name in names}
    assert roots == {"aioloader"}, roots
    assert "aioloader/py.typed" in names
    size = wheel.stat().st_size
    assert size <= MAX_WHEEL, f"{size} bytes"
    print(f"{wheel.name}: {size / 1000:.0f} KB of {MAX_WHEEL / 1000:.0f} KB")


def check_sdist(sdist: Path, folder: Path) -> None:
    """Check that it is complete, by running its tests."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (root,) = folder.iterdir()
    missing = [name for name in IN_SDIST if not (root / name).exists()]
    assert not missing, missing
    options = ["-q", "-p", "no:cacheprovider", "tests/unit"]
    said = run(
        sys.executable, "-m", "pytest", *options, cwd=root, PYTHONPATH=f"{root}/src"
    )
    print(f"{sdist.name}: {sdist.stat().st_size / 1000:.0f} KB; {_last(said)}")


def check_installed(wheel: Path, folder: Path) -> None:
    """Install the wheel alone, and run the README's example with it."""
    python = environment(folder / "user", f"{wheel}[pictures]")
    code = "import aioloader; print(aioloader.__version__)"
    version = run(python, "-c", code, cwd=folder)
    assert version == wheel.name.split("-")[1], version
    run(python, "-c", EXAMPLE, ROOT / "README.md", cwd=folder)
    print(f"aioloader {version} installed: the README's example runs")


def _last(said: str) -> str:
    return said.splitlines()[-1]


def main() -> None:
    """Build and check."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())
        tools = environment(folder / "tools", *project["dependency-groups"]["package"])
        run(tools, "-m", "build", "--outdir", folder / "dist", ROOT)
        (sdist,) = (folder / "dist").glob("*.tar.gz")
        (wheel,) = (folder / "dist").glob("*.whl")
        print(run(tools, "-m", "twine", "check", "--strict", sdist, wheel))
        check_wheel(wheel)
        check_sdist(sdist, folder / "unpacked")
        check_installed(wheel, folder)


if __name__ == "__main__":
    main()
