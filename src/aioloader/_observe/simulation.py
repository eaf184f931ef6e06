"""A discrete-event simulation: processes, and the lanes that they wait for.

A process is a generator. It yields seconds to sleep, or ``Lanes`` to get one lane,
which it keeps until it releases it. Processes get lanes in the order of their requests.
"""

import heapq
from collections import deque
from collections.abc import Generator
from itertools import count
from typing import TypeAlias

Process: TypeAlias = Generator["float | Lanes", None, None]


class Simulation:
    """Simulated time and the queue of events.

    Attributes:
        now: The time, in seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._next: list[tuple[float, int, Process]] = []
        self._order = count()

    def start(self, process: Process) -> None:
        """Start a process now."""
        self._push(self.now, process)

    def run(self, until: Process) -> None:
        """Run until a process ends or there are no more events."""
        self.start(until)
        process = None
        while self._next and process is not until:
            self.now, _, process = heapq.heappop(self._next)
            for wanted in process:
                if not isinstance(wanted, Lanes):
                    self._push(self.now + wanted, process)
                elif wanted.take(process):
                    continue
                process = None
                break

    def lanes(self, free: int) -> "Lanes":
        """Return ``free`` lanes; 0 makes a signal: each release wakes one process."""
        return Lanes(self, free)

    def _push(self, at: float, process: Process) -> None:
        heapq.heappush(self._next, (at, next(self._order), process))


class Lanes:
    """Resources that each serve one process at a time."""

    def __init__(self, simulation: Simulation, free: int) -> None:
        self._simulation = simulation
        self._free = free
        self._waiting: deque[Process] = deque()

    def take(self, process: Process) -> bool:
        """Give a free lane to a process, or let it wait; return which."""
        if self._free:
            self._free -= 1
            return True
        self._waiting.append(process)
        return False

    def release(self) -> None:
        """Free a lane, or give it to the process that has waited longest."""
        if self._waiting:
            self._simulation.start(self._waiting.popleft())
        else:
            self._free += 1
