"""Links and pictures of the pages resolve on GitHub and in the sdist.

``test_site.py`` follows those of the built site.
"""

import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs import words

ROOT = Path(__file__).parents[2]
GLOBS = (*words.PAGES, "benchmarks/*.md")
PAGES = sorted(path for glob in GLOBS for path in ROOT.glob(glob))
# Addresses of files of this repository. The README's are absolute, for PyPI shows it.
HOME = re.compile(
    r"https://(?:github\.com/aioloader/aioloader/(?:blob|tree)"
    r"|raw\.githubusercontent\.com/aioloader/aioloader)/main/"
)
_CODE = re.compile(r"(?ms)^ *```.*?^ *```$|(`+)(?!`)(?:(?!\n\n).)*?(?<!`)\1(?!`)")
_LINK = re.compile(
    r'\]\(([^\s()]+)|(?:href|src)="([^"]+)"|^\[.+?\]: (\S+)', re.MULTILINE
)


def targets(page: Path) -> Iterator[tuple[str, Path, str]]:
    """Yield the links of a page into the repository, with the file and the anchor."""
    for groups in _LINK.findall(_CODE.sub("", page.read_text())):
        link = "".join(groups)
        at_home = HOME.sub(f"{ROOT}/", link)
        if not re.match(r"\w+:", at_home):
            name, _, anchor = at_home.partition("#")
            path = page.parent / name if name else page
            yield link, Path(path).resolve(), anchor


def slug(heading: str) -> str:
    """Return the anchor that GitHub makes of a heading."""
    shown = re.sub(r"<.+?>", "", re.sub(r"\[(.+?)\]\(.+?\)", r"\1", heading))
    return re.sub(r"[^\w -]", "", shown).lower().replace(" ", "-")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page on GitHub: of its headings, and its own."""
    text = re.sub(r"(?ms)^ *```.*?^ *```$", "", page.read_text())
    names = set(re.findall(r'<a (?:id|name)="(.+?)"', text))
    for heading in re.findall(r"^#+ (.+?) *$", text, re.MULTILINE):
        kept = slug(heading)
        count = sum(re.fullmatch(rf"{kept}(-\d+)?", name) is not None for name in names)
        names.add(f"{kept}-{count}" if kept in names else kept)
    return names


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_links_resolve_on_github(page: Path) -> None:
    """Files by their paths, headings by their anchors; no syntax of the site alone."""
    dead = [
        link
        for link, path, anchor in targets(page)
        if not path.exists()
        or (anchor and path.suffix == ".md" and anchor not in anchors(path))
    ]
    assert not dead
    assert not re.search(r"^(:::|!!!|\?\?\?|===) ", page.read_text(), re.MULTILINE)


def test_links_of_the_readme_are_absolute() -> None:
    """PyPI shows it without the repository."""
    links = [link for link, *_ in targets(ROOT / "README.md")]
    assert len(links) >= 10
    assert not [link for link in links if not HOME.match(link)]


@pytest.mark.slow
def test_links_resolve_in_the_sdist(tmp_path: Path) -> None:
    """The built sdist has the pages and every file that they link to."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d"]
    subprocess.run([*build, tmp_path], cwd=ROOT, check=True, capture_output=True)
    [sdist] = tmp_path.iterdir()
    with tarfile.open(sdist) as archive:
        names = [ROOT / name.partition("/")[2] for name in archive.getnames()]
    packed = {ROOT, *names, *(parent for name in names for parent in name.parents)}
    wanted = {path for page in PAGES for _, path, _ in targets(page)} | {*PAGES}
    assert len(wanted) > 80
    assert not sorted(map(str, wanted - packed))
