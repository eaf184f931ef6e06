"""The examples in the docstrings run."""

import doctest

import pytest

from aioloader.datasets import decoders, files, named, objects, writers


@pytest.mark.parametrize("module", [decoders, files, named, objects, writers])
def test_example(module: object) -> None:
    result = doctest.testmod(module)  # type: ignore[arg-type]
    assert result.attempted
    assert not result.failed
