"""Each argument of ``DataLoader`` is the same wherever it is named."""

import inspect
import re
from typing import Literal, get_type_hints

from aioloader import DataLoader
from aioloader._loader import signature
from aioloader._loader.options import NAMES

PARAMETERS = inspect.signature(DataLoader.__init__).parameters
APART = {"self", "dataset", "batch_size", "collate_fn", "transform"}


def test_arguments_are_all_there() -> None:
    """None is unknown to type checkers, and none is theirs alone."""
    keyword_only = {
        name for name, one in PARAMETERS.items() if one.kind is one.KEYWORD_ONLY
    }
    named = get_type_hints(signature.KeywordOnly)
    assert set(named) == keyword_only - {"tail", "transform", "device"}
    assert set(get_type_hints(signature.Arguments)) == set(PARAMETERS) - APART


def test_they_have_the_same_types() -> None:
    """But those that make other batches: ``tail="pad"``, and a device's transform."""
    given = get_type_hints(signature.Arguments)
    assert given.pop("device") == signature.DeviceLike
    assert given.pop("rank") == signature.Rank
    assert given.pop("tail") == Literal["wrap", "drop", "uneven"] | None
    assert given == {name: PARAMETERS[name].annotation for name in given}


def test_each_is_an_attribute() -> None:
    """Of loaders and their options, in the same order; ``shuffle`` is used up."""
    assert list(NAMES) == [one for one in PARAMETERS if one not in {"self", "shuffle"}]


def test_each_has_words() -> None:
    """In the same order, and no other is described."""
    words = (inspect.getdoc(DataLoader) or "").partition("\nArgs:\n")[2]
    described = re.findall(
        r"^    (\w+): ", words.partition("\nRaises:")[0], re.MULTILINE
    )
    assert described == list(PARAMETERS)[1:]
