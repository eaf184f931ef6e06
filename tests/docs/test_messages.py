"""Fix it has every message of the package as a heading, and no other."""

import re

import pytest

from docs import messages


@pytest.mark.slow
def test_every_message_is_a_heading() -> None:
    """After a change of words, `python tests/docs/messages.py --fix` renames them."""
    assert not messages.missing()


@pytest.mark.slow
def test_every_heading_is_a_message() -> None:
    """What is said no more is not listed."""
    assert not messages.stale()


# How messages ended that said what is wrong, and left the reader alone with it.
DEAD_ENDS = re.compile(
    r"(damaged|cut|cut short|(cut short|has) (at )?… (of … )?bytes|meanwhile|printed|"
    r"was closed|is closed|ha(s|ve) ended|has changed since|cannot be read(: …)?|"
    r"such objects|failed before(: …)?|of another (dataset|type|version))$"
)


@pytest.mark.slow
def test_every_message_ends_in_something_to_do() -> None:
    """What, where, the numbers, and then what the reader can do about it."""
    told = [one for one in messages.messages() if not messages.is_internal(one)]
    assert not [one for one in told if DEAD_ENDS.search(one.text)]


def test_no_heading_comes_twice() -> None:
    """One place for each message."""
    found = messages.headings()
    assert len(found) > 300
    assert sorted(set(found)) == sorted(found)


def test_what_is_said_elsewhere_is_said_there() -> None:
    """The modules that are named have the words."""
    for place, (module, *stems) in messages.ELSEWHERE.items():
        texts = messages.texts_in(module)
        for stem in stems:
            assert any(messages.is_stem(stem, text) for text in texts), (place, stem)


@pytest.mark.slow
def test_what_is_internal_exists() -> None:
    """No place is listed that is gone."""
    places = [message.place for message in messages.messages()]
    listed = [*messages.INTERNAL, *messages.PASSED_ON]
    assert not [one for one in listed if not any(p.startswith(one) for p in places)]
