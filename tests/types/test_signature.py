"""The overloads of ``DataLoader`` take what the constructor takes."""

import inspect
from typing import Literal, get_type_hints

from aioloader import DataLoader
from aioloader._loader import signature

PARAMETERS = inspect.signature(DataLoader.__init__).parameters
APART = {"self", "dataset", "batch_size", "collate_fn"}


def test_arguments_are_all_there() -> None:
    """None is unknown to type checkers, and none is theirs alone."""
    keyword_only = {
        name for name, one in PARAMETERS.items() if one.kind is one.KEYWORD_ONLY
    }
    named = get_type_hints(signature.KeywordOnly)
    assert set(named) == keyword_only - {"tail", "transform", "device_transform"}
    assert set(get_type_hints(signature.WithTransform)) == set(PARAMETERS) - APART


def test_they_have_the_same_types() -> None:
    """But those that make other batches: ``tail="pad"``, and ``device_transform``."""
    given = get_type_hints(signature.WithTransform)
    assert given.pop("device_transform") is type(None)
    assert given.pop("tail") == Literal["wrap", "drop", "uneven"] | None
    assert given == {name: PARAMETERS[name].annotation for name in given}
