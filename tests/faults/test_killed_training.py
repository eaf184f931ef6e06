"""Trainings are killed at random moments and continued: what is delivered is the same.

A moment is drawn in two parts: a letter that the training reports of its work, and some
milliseconds that it goes on after it. Nothing depends on what it does meanwhile.
"""

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aioloader._workers.worker_spec import QUIET
from faults import killed_training
from faults.killed_training import ALL, EPOCHS, SAMPLES, write_shards
from faulty import await_end

# Letters until a kill, and seconds after them, at most.
LETTERS, LATER = 20, 0.006
# Of each of the four variants, so that there are more than fifty.
KILLS = 13
SECONDS = 30.0


class Server:
    """Has trainings forked, and kills them.

    Args:
        program: What forks them.
        reports: Where the letters of trainings arrive.
    """

    def __init__(self, program: "subprocess.Popen[str]", reports: int) -> None:
        self._program = program
        self._reports = reports

    def train(
        self,
        variant: str,
        folder: Path,
        letters: int = ALL,
        later: float = 0.0,
        *,
        spawns_server: bool = False,
    ) -> bool:
        """Run one training; tell whether it was killed, else it has ended well.

        Args:
            variant: Of the training.
            folder: Of its log and state.
            letters: After how many of its reports it is killed.
            later: How many seconds after that.
            spawns_server: Whether it begins with the imports of a new fork server.
        """
        folder.mkdir(exist_ok=True)
        order = {
            "variant": variant,
            "folder": str(folder),
            "spawns_server": spawns_server,
        }
        pid = int(self._ask(json.dumps(order)))
        with contextlib.ExitStack() as stack:
            process = os.pidfd_open(pid)
            stack.callback(os.close, process)
            self._await_letters(process, letters)
            select.select([process], [], [], later)
            signal.pidfd_send_signal(process, signal.SIGKILL)
            await_end(process)
        status = int(self._ask("reap"))
        self._drain()
        assert status in {0, -signal.SIGKILL}
        assert_nothing_left(pid)
        return status != 0

    def _await_letters(self, process: int, letters: int) -> None:
        """Read so many letters, or until the training has ended."""
        poll = select.poll()
        poll.register(self._reports, select.POLLIN)
        poll.register(process, select.POLLIN)
        while letters:
            ready = dict(poll.poll(SECONDS * 1000))
            assert ready, "the training is stuck"
            if self._reports in ready:
                letters -= len(os.read(self._reports, min(letters, 1 << 12)))
            else:
                return

    def _drain(self) -> None:
        """Drop the letters that nobody has waited for."""
        poll = select.poll()
        poll.register(self._reports, select.POLLIN)
        while poll.poll(0):
            os.read(self._reports, 1 << 12)

    def _ask(self, line: str) -> str:
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        self._program.stdin.write(f"{line}\n")
        self._program.stdin.flush()
        return self._program.stdout.readline()


def assert_nothing_left(session: int) -> None:
    """Fail unless all processes of a killed training end without its help."""
    while pids := list(members(session)):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                process = os.pidfd_open(pid)
                try:
                    await_end(process)
                finally:
                    os.close(process)


def members(session: int) -> Iterator[int]:
    """Yield the processes of a session that are alive."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, _, found, *_ = (
                (entry / "stat").read_text().rpartition(")")[2].split()
            )
            if int(found) == session and state not in {"Z", "X"}:
                yield int(entry.name)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Start what trainings are forked from; its imports are those of a fork server."""
    reports, theirs = os.pipe()
    with subprocess.Popen(
        [sys.executable, killed_training.__file__, str(theirs)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=[theirs],
        env={**os.environ, **QUIET},
    ) as program:
        yield Server(program, reports)
        assert program.stdin is not None
        program.stdin.close()
    os.close(reports)
    os.close(theirs)


def delivered(folder: Path) -> list[Any]:
    """Return the batches in the log of a training: epoch, numbers and draws."""
    return [json.loads(line) for line in (folder / "log").read_text().splitlines()]


def assert_all_once(batches: list[Any]) -> None:
    """Fail unless there is every sample of every epoch, once."""
    for epoch in range(EPOCHS):
        numbers = [n for at, found, _ in batches if at == epoch for n in found]
        assert sorted(numbers) == list(range(SAMPLES))


def trained(server: Server, variant: str, folder: Path, chosen: random.Random) -> int:
    """Train to the end, however often it is killed; return how often that was."""
    kills = 0
    while server.train(
        variant, folder, chosen.randint(1, LETTERS), chosen.random() * LATER
    ):
        kills += 1
        assert kills < 10 * KILLS, "it comes no nearer to its end"
    return kills


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["processes", "served", "loop", "stream"])
def test_killed_at_random_moments(variant: str, server: Server, tmp_path: Path) -> None:
    """Batches, their order and what was drawn for them are those of a whole run."""
    write_shards(tmp_path / "shards")
    assert not server.train(variant, tmp_path / "whole")
    expected = delivered(tmp_path / "whole")
    assert_all_once(expected)
    chosen, kills, number = random.Random(variant), 0, 0
    while kills < KILLS:
        folder = tmp_path / str(number)
        kills += trained(server, variant, folder, chosen)
        assert delivered(folder) == expected
        number += 1


@pytest.mark.slow
def test_killed_out_of_order(server: Server, tmp_path: Path) -> None:
    """The same batches as in order, from other workers; a late one is not forgotten."""
    assert not server.train("processes", tmp_path / "whole")
    expected = delivered(tmp_path / "whole")
    chosen, kills, found = random.Random("unordered"), 0, expected
    while kills < KILLS:
        folder = tmp_path / str(kills)
        kills += trained(server, "unordered", folder, chosen)
        found = delivered(folder)
        assert sorted(found) == sorted(expected)
    assert found != expected


@pytest.mark.slow
@pytest.mark.fuzz
def test_killed_with_a_fork_server_that_is_new(server: Server, tmp_path: Path) -> None:
    """While it imports torch, and when it has forked workers."""
    assert not server.train("served", tmp_path / "whole")
    folder = tmp_path / "killed"
    assert server.train("served", folder, 1, spawns_server=True)
    server.train("served", folder, 10, spawns_server=True)
    assert not server.train("served", folder)
    assert delivered(folder) == delivered(tmp_path / "whole")
