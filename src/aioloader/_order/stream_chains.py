"""Compare the descriptions of two streams.

A description is a dict, ready for JSON: ``"kind"``, the parameters that determine the
samples and their order, and ``"of"``, the description of the stream before it. It does
not include the location of the data (root, store, credentials), caches, or how much is
read ahead. ``"function"`` is the name of a user function, which may have been renamed:
a difference there is only worth a warning.
"""

from typing import Any, NamedTuple, TypeAlias

Description: TypeAlias = dict[str, Any]


class Differences(NamedTuple):
    """How a stream differs from the one that saved a state.

    Attributes:
        errors: Differences because of which the state does not fit.
        renamed: Functions with other names.
    """

    errors: list[str]
    renamed: list[str]


def steps_of(description: Description) -> list[Description]:
    """Return the source and the steps of a description, in that order."""
    steps = [description]
    while "of" in steps[-1]:
        steps.append(steps[-1]["of"])
    return [{k: v for k, v in one.items() if k != "of"} for one in reversed(steps)]


def is_repeatable(description: Description) -> bool:
    """Tell whether a stream yields the same samples when read again."""
    return all(
        step.get("deterministic", True)
        and all(map(is_repeatable, step.get("streams", ())))
        for step in steps_of(description)
    )


def differences(saved: Description, found: Description) -> Differences:
    """Compare two descriptions; return text for an error or a warning."""
    before, now = steps_of(saved), steps_of(found)
    if _kinds(before) != _kinds(now):
        chains = f"{'.'.join(_kinds(before))}, and this is {'.'.join(_kinds(now))}"
        return Differences([f"it was saved by {chains}"], [])
    result = Differences([], [])
    for old, new in zip(before, now, strict=True):
        for name in sorted(old.keys() | new.keys()):
            _compare(old, new, name, result)
    return result


def _kinds(steps: list[Description]) -> list[str]:
    return [one["kind"] for one in steps]


def _compare(
    old: Description, new: Description, name: str, result: Differences
) -> None:
    """Add the difference of two steps in one parameter."""
    was, is_now = old.get(name), new.get(name)
    if was == is_now:
        return
    if name == "streams" and was and is_now and len(was) == len(is_now):
        for at, (one, other) in enumerate(zip(was, is_now, strict=True)):
            errors, renamed = differences(one, other)
            result.errors.extend(f"stream {at} of {old['kind']}: {e}" for e in errors)
            result.renamed.extend(f"stream {at} of {old['kind']}: {e}" for e in renamed)
        return
    if name == "streams":
        was, is_now = (f"{len(found or ())} streams" for found in (was, is_now))
    text = f"{name} of {old['kind']} was {was!r}, and is {is_now!r}"
    (result.renamed if name == "function" else result.errors).append(text)
