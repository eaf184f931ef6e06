"""The computed pace agrees with closed forms, and with loaders on a simulated clock."""

from dataclasses import MISSING, fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from aioloader._base.records import RecordedSettings
from aioloader._observe.costs import Costs, costs_of
from aioloader._observe.pace import seconds_per_batch
from observe import clock


def costs(count: int = 1, **given: Any) -> Costs:
    """Return the costs of batches; a cost that is not given is zero."""
    arrays = {field.name: np.zeros(count) for field in fields(Costs)
              if field.default is MISSING}  # fmt: skip
    arrays |= {"reads": np.ones(count), "samples": np.ones(count)}
    return Costs(**arrays | {
        name: arrays[name] * 0 + cost if name in arrays else cost
        for name, cost in given.items()
    })  # fmt: skip


def workers(number: int, **changes: object) -> RecordedSettings:
    """Return a loader with processes that read."""
    plain = RecordedSettings(
        "workers", number, "process", reads_in_workers=True, window=2 * number, cores=8
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


SETTINGS = st.one_of(
    st.just(RecordedSettings("inline")),
    st.builds(
        RecordedSettings,
        st.sampled_from(["thread", "loop"]),
        window=st.integers(1, 6),
        concurrency=st.sampled_from([4, 8, 16]),
        on_device=st.integers(0, 2),
    ).map(lambda s: s if s.place == "loop" else replace(s, concurrency=1)),
    st.builds(
        lambda number, each, in_order: workers(
            number, window=number * each, in_order=in_order
        ),
        st.integers(1, 4),
        st.integers(2, 3),
        st.booleans(),
    ),
    st.builds(
        lambda number, each: replace(
            workers(number, window=number * each, concurrency=8), reads_in_workers=False
        ),
        st.integers(1, 4),
        st.integers(2, 3),
    ),
)


def error_of(
    batches: list[clock.Ticks], setting: RecordedSettings, change: str
) -> float:
    """Return the error of the pace computed for a changed loader."""
    if setting.place != "workers" and not setting.on_device:
        # Batches of the loader's own thread do not travel.
        batches = [batch._replace(transport=0) for batch in batches]
    recorded = clock.Clock(setting, batches).run(97)
    changed = setting
    if change == "window" and setting.place != "inline":
        changed = replace(setting, window=2 * (setting.window or 1))
    if change == "workers" and setting.place == "workers":
        changed = replace(setting, workers=setting.workers + 1)
    if change == "concurrency" and setting.concurrency > 1:
        changed = replace(setting, concurrency=2 * setting.concurrency)
    # What is hidden cannot be known: copies that no consumer waits for.
    assume(not setting.on_device or change == "none")
    truth = clock.seconds_per_batch(clock.Clock(changed, batches).run(97))
    found = costs_of(recorded, setting)
    assert found is not None
    return seconds_per_batch(found, changed) / truth - 1


CHANGES = ["window", "workers", "concurrency", "none"]


@pytest.mark.slow
@given(
    batch=clock.ticks(1, 1, at_least=1),
    setting=SETTINGS,
    change=st.sampled_from(CHANGES),
)
def test_a_changed_loader_of_equal_batches_is_as_fast_as_computed(
    batch: clock.Ticks, setting: RecordedSettings, change: str
) -> None:
    """The recorded one is, too: within 5 points of what truly happens."""
    batch = batch._replace(reads=4 * batch.reads)
    assert abs(error_of([batch], setting, change)) < 0.05


@pytest.mark.slow
def test_a_loader_of_unequal_batches_is_nearly_as_fast_as_computed() -> None:
    """Within 5 points for 19 of 20 loaders; the pace is computed from means."""
    errors = list[float]()

    @settings(max_examples=200)
    @given(
        batches=st.lists(clock.ticks(4, 4, at_least=1), min_size=3, max_size=3),
        setting=SETTINGS,
        change=st.sampled_from(CHANGES),
    )
    def draw(batches: Any, setting: RecordedSettings, change: str) -> None:
        errors.append(abs(error_of(batches, setting, change)))

    draw()
    assert sum(error < 0.05 for error in errors) >= 0.95 * len(errors) > 100
