"""A hook of MkDocs: the site has the benchmarks' pages, which lie outside of docs/."""

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
