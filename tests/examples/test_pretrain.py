"""``examples/pretrain.py``: killed on two ranks, it continues on one, to the bit."""

import os
import random
import re
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pretrain
import pytest
import torch


def trained(path: Path, ranks: int, last: int = 0) -> list[int]:
    """Run all ranks, and kill them after step ``last``, if given; return the steps."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    steps = []
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, pretrain.__file__, str(path)],
                    env={
                        **os.environ,
                        **master,
                        "RANK": str(rank),
                        "WORLD_SIZE": str(ranks),
                    },
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in range(ranks)
        ]
        for line in processes[0].stdout or ():
            found = re.match(r"step (\d+):", line)
            steps += [int(found[1])] if found else []
            if last and steps[-1:] == [last]:
                for process in processes:
                    process.kill()
    assert last or not any(process.returncode for process in processes)
    return steps


def losses(path: Path) -> list[float]:
    saved: list[Any] = torch.load(path)
    found: list[float] = saved[-1]
    return found


@pytest.mark.slow
def test_killed_on_two_ranks_it_continues_on_one(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole.pt", tmp_path / "killed.pt"
    assert trained(whole, 2) == [*range(1, pretrain.STEPS + 1)]
    last = random.Random(0).randrange(3, pretrain.STEPS - 3)
    trained(killed, 2, last)
    done = len(losses(killed))
    assert last <= done < pretrain.STEPS
    assert trained(killed, 1) == [*range(done + 1, pretrain.STEPS + 1)]
    assert losses(killed) == losses(whole)
    assert losses(whole)[-1] < losses(whole)[0]
