"""The arguments of ``DataLoader`` are the same in all places that list them."""

import inspect
import re
from typing import Literal, get_type_hints

from aioloader import DataLoader
from aioloader._loader import signature
from aioloader._loader.options import NAMES

PARAMETERS = inspect.signature(DataLoader.__init__).parameters
APART = {"self", "dataset", "batch_size", "collate_fn", "transform"}


def test_overloads_have_all_arguments() -> None:
    """Type checkers know all arguments, and no others."""
    keyword_only = {name for name, p in PARAMETERS.items() if p.kind is p.KEYWORD_ONLY}
    named = get_type_hints(signature.KeywordOnly)
    assert set(named) == keyword_only - {"tail", "transform", "device"}
    assert set(get_type_hints(signature.Arguments)) == set(PARAMETERS) - APART


def test_overloads_have_the_same_types() -> None:
    """Except those that change batches: ``tail="pad"``, and a device's transform."""
    given = get_type_hints(signature.Arguments)
    assert given.pop("device") == signature.DeviceLike
    assert given.pop("rank") == signature.Rank
    assert given.pop("tail") == Literal["wrap", "drop", "uneven"] | None
    assert given == {name: PARAMETERS[name].annotation for name in given}


def test_each_argument_is_an_attribute() -> None:
    """Of loaders and their options, in the same order, except ``shuffle``."""
    assert list(NAMES) == [n for n in PARAMETERS if n not in {"self", "shuffle"}]


def test_each_argument_is_documented() -> None:
    """In the order of the signature."""
    words = (inspect.getdoc(DataLoader) or "").partition("\nArgs:\n")[2]
    described = re.findall(
        r"^    (\w+): ", words.partition("\nRaises:")[0], re.MULTILINE
    )
    assert described == list(PARAMETERS)[1:]
