"""The fix-it pages have every error message as a heading, and no other heading."""

import re

import pytest

from docs import messages


@pytest.mark.slow
def test_every_message_is_a_heading() -> None:
    """After a change, `python tests/docs/messages.py --fix` renames the headings."""
    assert not messages.missing()


@pytest.mark.slow
def test_every_heading_is_a_message() -> None:
    assert not messages.stale()


# Ends of messages that say what is wrong, but not what to do.
DEAD_ENDS = re.compile(
    r"(damaged|cut|cut short|(cut short|has) (at )?… (of … )?bytes|meanwhile|printed|"
    r"was closed|is closed|ha(s|ve) ended|has changed since|cannot be read(: …)?|"
    r"such objects|failed before(: …)?|of another (dataset|type|version))$"
)


@pytest.mark.slow
def test_every_message_ends_in_a_remedy() -> None:
    """It says what and where, the numbers, and then what the reader can do."""
    public = [
        message for message in messages.messages() if not messages.is_internal(message)
    ]
    assert not [message for message in public if DEAD_ENDS.search(message.text)]


def test_headings_are_unique() -> None:
    headings = messages.headings()
    assert len(headings) > 300
    assert sorted(set(headings)) == sorted(headings)


def test_modules_listed_for_messages_have_their_words() -> None:
    for place, (module, *stems) in messages.ELSEWHERE.items():
        texts = messages.texts_in(module)
        for stem in stems:
            assert any(messages.is_stem(stem, text) for text in texts), (place, stem)


@pytest.mark.slow
def test_places_of_unlisted_messages_exist() -> None:
    places = [message.place for message in messages.messages()]
    listed = [*messages.INTERNAL, *messages.PASSED_ON]
    assert not [name for name in listed if not any(p.startswith(name) for p in places)]
