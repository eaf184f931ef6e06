"""A hook of MkDocs: adds the benchmarks' pages, which are outside of ``docs/``.

``<!-- plot: latency -->`` in a page becomes the plot of that benchmark, if it is there.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# Until the benchmarks have written theirs.
NO_RESULTS = "# Results\n\n`make bench` measures, and `benchmarks/results/` keeps it.\n"


def on_files(files: Files, config: Any) -> Files:
    """Add the benchmarks' pages and pictures, under their paths in the repository."""
    folder = ROOT / "benchmarks"
    for path in sorted([*folder.glob("*.md"), *folder.glob("plots/*.png")]):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    if "benchmarks/RESULTS.md" not in files.src_uris:
        files.append(
            File.generated(config, "benchmarks/RESULTS.md", content=NO_RESULTS)
        )
    return files


def on_page_markdown(markdown: str, page: Any, **_others: Any) -> str:
    """Insert the benchmarks' plots at their comments."""
    up = "../" * page.file.src_uri.count("/")

    def shown(place: re.Match[str]) -> str:
        name = place[1]
        if not (ROOT / "benchmarks" / "plots" / f"{name}.png").exists():
            return ""
        return f"![benchmarks/{name}.py]({up}benchmarks/plots/{name}.png)"

    return re.sub(r"<!-- plot: (\w+) -->", shown, markdown)
