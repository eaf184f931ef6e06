"""Trainings are killed at random moments and continued: what is delivered is the same.

A moment is drawn in two parts: a letter that the training reports of its work, and some
milliseconds that it goes on after it. Nothing depends on what it does meanwhile.
"""

import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from multiprocessing import forkserver, get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from aioloader._workers.worker_spec import QUIET
from faults.killed_training import EPOCHS, SAMPLES, train, write_shards
from faulty import await_gone, is_alive, session

CONTEXT = get_context("forkserver")
# Letters until a kill, and seconds after them, at most.
LETTERS, LATER = 20, 0.006
# Of each variant, so that there are more than fifty.
KILLS = 13
SECONDS = 30.0


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    """Start what trainings are forked from: it has imported what they need."""
    CONTEXT.set_forkserver_preload(["pytest", train.__module__])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**QUIET, "PYTHONPATH": os.pathsep.join(sys.path)}.items():
            patch.setenv(name, value)
        forkserver.ensure_running()
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    CONTEXT.set_forkserver_preload(["__main__"])


def killed(
    variant: str, folder: Path, letters: int = sys.maxsize, later: float = 0.0
) -> bool:
    """Run one training; tell whether it was killed, else it has ended well.

    Args:
        variant: Of the training.
        folder: Of its log and state.
        letters: After how many of its reports it is killed.
        later: How many seconds after that.
    """
    folder.mkdir(exist_ok=True)
    reports, theirs = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=train, args=(variant, folder, theirs))
    process.start()
    with reports, theirs:
        while letters:
            ready = wait([reports, process.sentinel], SECONDS)
            assert ready, "the training is stuck"
            if reports not in ready:
                break
            reports.recv_bytes()
            letters -= 1
        wait([process.sentinel], later)
        process.kill()
        process.join()
    leader, status = process.pid, process.exitcode
    process.close()
    assert status in {0, -signal.SIGKILL}
    assert leader is not None
    # All processes of a killed training end without its help.
    while pids := [*filter(is_alive, session(leader))]:
        assert await_gone(pids) == []
    return status != 0


def delivered(folder: Path) -> list[Any]:
    """Return the batches in the log of a training: epoch, numbers and draws."""
    return [json.loads(line) for line in (folder / "log").read_text().splitlines()]


def assert_all_once(batches: list[Any]) -> None:
    """Fail unless there is every sample of every epoch, once."""
    for epoch in range(EPOCHS):
        numbers = [n for at, found, _ in batches if at == epoch for n in found]
        assert sorted(numbers) == list(range(SAMPLES))


def trained(variant: str, folder: Path, chosen: random.Random) -> int:
    """Train to the end, however often it is killed; return how often that was."""
    kills = 0
    while killed(variant, folder, chosen.randint(1, LETTERS), chosen.random() * LATER):
        kills += 1
        assert kills < 10 * KILLS, "it comes no nearer to its end"
    return kills


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["processes", "loop", "stream"])
def test_killed_at_random_moments(variant: str, tmp_path: Path) -> None:
    """Batches, their order and what was drawn for them are those of a whole run."""
    write_shards(tmp_path / "shards")
    assert not killed(variant, tmp_path / "whole")
    expected = delivered(tmp_path / "whole")
    assert_all_once(expected)
    chosen, kills, number = random.Random(variant), 0, 0
    while kills < KILLS:
        folder = tmp_path / str(number)
        kills += trained(variant, folder, chosen)
        assert delivered(folder) == expected
        number += 1


@pytest.mark.slow
def test_killed_out_of_order(tmp_path: Path) -> None:
    """The same batches as in order, from other workers; a late one is not forgotten."""
    assert not killed("processes", tmp_path / "whole")
    expected = delivered(tmp_path / "whole")
    chosen, kills, found = random.Random("unordered"), 0, expected
    while kills < KILLS:
        folder = tmp_path / str(kills)
        kills += trained("unordered", folder, chosen)
        found = delivered(folder)
        assert sorted(found) == sorted(expected)
    assert found != expected


@pytest.mark.slow
@pytest.mark.fuzz
def test_killed_with_a_fork_server_that_is_new(tmp_path: Path) -> None:
    """While it imports torch, and when it has forked workers."""
    assert not killed("processes", tmp_path / "whole")
    folder = tmp_path / "killed"
    assert killed("served", folder, 1)
    killed("served", folder, 10)
    assert not killed("served", folder)
    assert delivered(folder) == delivered(tmp_path / "whole")
