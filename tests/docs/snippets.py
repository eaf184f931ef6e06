"""The Python snippets of the pages, and a server that runs them, page by page.

A page's snippets are one program: they run in their order, in one namespace, in an
empty directory. ``await`` at the top level is allowed, as in a notebook. A comment just
before a snippet says otherwise::

    <!-- not run: the reason -->         this snippet is left out
    <!-- raises: ValueError -->          it raises that
    <!-- output varies: the reason -->   before a block of text: it is not compared

A block of ``text`` right after a snippet is what the snippet prints. The module
``pages/<page>.py`` may have ``before(page)`` and ``after(page)``, which get the page's
namespace: they make what the snippets read, and check what came of them. ``NEEDS``
names the servers.
"""

import ast
import asyncio
import builtins
import contextlib
import importlib.util
import inspect
import io
import json
import os
import re
import shutil
import sys
import tempfile
import traceback
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SETUPS = Path(__file__).parent / "pages"

_BLOCK = re.compile(
    r"(?P<comment><!-- [^\n]*? -->\n+)?"
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_COMMENT = re.compile(r"<!-- (not run|raises|output varies): (.+) -->")


@dataclass
class Snippet:
    """One block of a page.

    Attributes:
        line: Where its code begins, from 1.
        code: The code.
        skipped: Why it is not run; empty if it is.
        raises: Name of the exception that it raises, if it is to.
        output: What it prints; None if that is not told, or varies.
    """

    line: int
    code: str
    skipped: str = ""
    raises: str = ""
    output: str | None = None


def pages() -> list[str]:
    """Return the pages that have Python snippets, relative to the repository."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    named = [path.relative_to(ROOT).as_posix() for path in paths]
    return [name for name in named if snippets(name)]


def snippets(page: str) -> list[Snippet]:
    """Return the snippets of a page, in their order."""
    text = (ROOT / page).read_text()
    collected: list[Snippet] = []
    end = 0
    for block in _BLOCK.finditer(text):
        said = dict(_COMMENT.findall(block["comment"] or ""))
        indent = len(block["indent"])
        body = "".join(
            line[indent:] if line.strip() else line
            for line in block["body"].splitlines(keepends=True)
        )
        if block["language"] == "python":
            line = text.count("\n", 0, block.start("body")) + 1
            skipped, raises = said.get("not run", ""), said.get("raises", "")
            collected.append(Snippet(line, body, skipped, raises))
        elif block["language"] == "text" and collected:
            follows = not text[end : block.start()].strip()
            if follows and "output varies" not in said:
                collected[-1].output = body
        end = block.end()
    return collected


def loaded(path: Path) -> Any:
    """Return the module of a file that is in no package."""
    spec = importlib.util.spec_from_file_location(f"file_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def setup(page: str) -> Any:
    """Return the module that prepares a page; an empty one if there is none."""
    name = re.sub(r"\W", "_", page.removeprefix("docs/").removesuffix(".md")).lower()
    path = SETUPS / f"{name}.py"
    return loaded(path) if path.exists() else types.ModuleType(name)


def run_page(page: str) -> None:
    """Run a page in this process, in an empty directory."""
    prepared = setup(page)
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    names = vars(main)
    names["__builtins__"] = builtins  # as ``exec`` does; a coroutine's globals need it
    if hasattr(prepared, "before"):
        prepared.before(names)
    with asyncio.Runner() as runner:
        for snippet in snippets(page):
            if not snippet.skipped:
                _run(snippet, page, names, runner)
        if hasattr(prepared, "after"):
            prepared.after(names)


def _run(
    snippet: Snippet, page: str, names: dict[str, Any], runner: asyncio.Runner
) -> None:
    tree = ast.increment_lineno(ast.parse(snippet.code), snippet.line - 1)
    code = compile(tree, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    printed = io.StringIO()
    raised = ""
    with contextlib.redirect_stdout(printed):
        try:
            if code.co_flags & inspect.CO_COROUTINE:
                function = types.FunctionType(code, names)
                runner.run(function())
            else:
                exec(code, names)
        except Exception as error:
            raised = type(error).__name__
            if raised != snippet.raises:
                raise
    where = f"{page}:{snippet.line}"
    if raised != snippet.raises:
        raise AssertionError(f"{where} was to raise {snippet.raises}")
    if snippet.output is not None and printed.getvalue() != snippet.output:
        raise AssertionError(f"{where} printed:\n{printed.getvalue()}")


def serve() -> None:
    """Run the pages that are named on stdin, each in a fork of this process.

    torch is imported once, which takes longer than most pages do.
    """
    import aioloader.datasets  # noqa: F401, PLC0415

    for line in sys.stdin:
        task = json.loads(line)
        folder = tempfile.mkdtemp()
        log = Path(folder, "log")
        log.touch()
        pid = os.fork()
        if not pid:
            _be_page(task["page"], task["environment"], folder, log)
        _, status = os.waitpid(pid, 0)
        said = log.read_text(errors="replace")
        shutil.rmtree(folder, ignore_errors=True)
        print(json.dumps({"status": status, "said": said}), flush=True)


def _be_page(page: str, environment: dict[str, str], folder: str, log: Path) -> None:
    """Run one page, and exit; what it prints and raises goes to a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    for standard in 1, 2:
        os.dup2(descriptor, standard)
    os.environ |= environment
    work = Path(folder, "work")
    work.mkdir()
    os.chdir(work)
    status = 1
    try:
        run_page(page)
        status = 0
    except BaseException:  # noqa: BLE001  (it is the answer)
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            _run_exit_hooks()
        os._exit(status)


def _run_exit_hooks() -> None:
    import atexit  # noqa: PLC0415
    import gc  # noqa: PLC0415

    gc.collect()
    atexit._run_exitfuncs()


if __name__ == "__main__":
    serve()
