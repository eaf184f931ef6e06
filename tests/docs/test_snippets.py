"""The snippets of the pages and the README run, against servers on loopback."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from datasets.conftest import s3_port
from datasets.pg import Server, server
from docs import snippets

__all__ = ["s3_port", "server"]

# Slow pages, which start a cluster: `make fuzz` runs them. The example of Ray, and its
# tests, always run.
SLOW = {"docs/guides/ray.md"}
PAGES = [
    pytest.param(page, marks=[pytest.mark.fuzz] if page in SLOW else [], id=page)
    for page in snippets.pages()
]


# Module scope, as for the environment: servers that start are no leak of a test.
@pytest.fixture(scope="module", params=PAGES)
def page(request: pytest.FixtureRequest) -> str:
    """Return each page."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def environment(page: str, request: pytest.FixtureRequest) -> dict[str, str]:
    """Start the servers that a page needs; return their environment variables."""
    needs = getattr(snippets.setup(page), "NEEDS", ())
    variables = {"OMP_NUM_THREADS": "1"}
    if "s3" in needs:
        port = request.getfixturevalue("s3_port")
        variables |= {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": "key",
        }
    if "postgresql" in needs:
        database: Server = request.getfixturevalue("server")
        variables["DATABASE_URL"] = database.url()
    return variables


@pytest.fixture(scope="module")
def runner() -> Iterator[subprocess.Popen[str]]:
    """Start the process that forks a child for each page."""
    with subprocess.Popen(
        [sys.executable, str(Path(snippets.__file__))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.mark.slow
def test_the_snippets_of_a_page_run(
    page: str, environment: dict[str, str], runner: subprocess.Popen[str]
) -> None:
    """In their order, as one program."""
    assert runner.stdin is not None
    assert runner.stdout is not None
    task = {"page": page, "environment": environment}
    print(json.dumps(task), file=runner.stdin, flush=True)
    answer = json.loads(runner.stdout.readline())
    assert answer["status"] == 0, answer["said"]


@pytest.mark.slow
def test_skipped_snippets_have_a_reason() -> None:
    """Of at least two words."""
    left_out = [
        (page, snippet.line, snippet.skipped)
        for page in snippets.pages()
        for snippet in snippets.snippets(page)
        if snippet.skipped
    ]
    assert all(len(reason.split()) > 1 for _, _, reason in left_out), left_out
