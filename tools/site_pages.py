"""A hook of MkDocs: links between pages are those of the repository, as on GitHub.

The benchmarks' pages and plots, which are outside of ``docs/``, become part of the
site. Links to other files outside of it lead to GitHub.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
HOME = "https://github.com/aioloader/aioloader/blob/main/"
LINK = re.compile(r"(?<=\]\()\.\./[^\s()#]+")


def on_files(files: Files, config: Any) -> Files:
    """Add the benchmarks' pages and pictures, under their paths in the repository."""
    folder = ROOT / "benchmarks"
    for path in sorted([*folder.glob("*.md"), *folder.glob("plots/*.png")]):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_others: Any) -> str:
    """Change the links that lead out of ``docs/``, or into it."""
    folder = Path(page.file.abs_src_path).parent
    here = Path(page.file.src_uri).parent

    def changed(link: re.Match[str]) -> str:
        path = Path(os.path.normpath(folder / link[0]))
        name = path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT).as_posix()
        if name in files.src_uris:
            return os.path.relpath(name, here)
        return HOME + name if path.exists() else link[0]

    return LINK.sub(changed, markdown)
