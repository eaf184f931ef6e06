"""Quick tests on other versions of Python: ``nox``, or ``nox -s tests-3.13``.

Versions that are not installed are skipped. On 3.14t, free-threaded, modules that have
not declared that they need no GIL do not turn it on.
"""

import nox

nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = False

QUICK = ["tests/unit", "tests/core"]


@nox.session(python=["3.11", "3.12", "3.13", "3.14", "3.14t"])
def tests(session: nox.Session) -> None:
    """Run the tests of single parts and of the core."""
    if str(session.python).endswith("t"):
        session.env["PYTHON_GIL"] = "0"
    session.install("--upgrade", "pip>=25.1")
    session.install("-c", "constraints.txt", "torch")
    session.install("-c", "constraints.txt", ".[objects]", "--group", "quick")
    session.run("pytest", "-m", "not slow and not fuzz", *(session.posargs or QUICK))
