"""The client of the service benchmark: requests on a fixed schedule, from outside.

Open loop: request ``i`` is due at ``i / rate`` whether or not earlier ones have been
answered, and its time counts from then, so a blocked service cannot hide the delay.
Prints one JSON object with times in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time

_REQUEST = b"GET /?n=%d HTTP/1.1\r\nHost: localhost\r\n\r\n"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Client:
    """Keep-alive connections to one port; as many as there are open requests."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[Connection] = []
        self.times: list[float] = []

    async def ask(self, number: int, due: float) -> None:
        """Send one request and note the time from when it was due."""
        connection = self._idle.pop() if self._idle else await self._open()
        reader, writer = connection
        writer.write(_REQUEST % number)
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(head.decode())
        length = head.lower().partition(b"content-length:")[2].split()[0]
        await reader.readexactly(int(length))
        self.times.append((time.perf_counter() - due) * 1e3)
        self._idle.append(connection)

    async def _open(self) -> Connection:
        return await asyncio.open_connection("127.0.0.1", self._port)

    def close(self) -> None:
        """Close the connections, which are all idle by now."""
        for _, writer in self._idle:
            writer.close()


async def ask_all(port: int, rate: float, seconds: float) -> list[float]:
    """Send requests for ``seconds``; return the times in order of the answers."""
    client = Client(port)
    start = time.perf_counter()
    async with asyncio.timeout(2 * seconds + 10), asyncio.TaskGroup() as group:
        for number in range(int(rate * seconds)):
            due = start + number / rate
            await asyncio.sleep(due - time.perf_counter())
            group.create_task(client.ask(number, due))
    client.close()
    return client.times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--rate", type=float, default=50)
    parser.add_argument("--seconds", type=float, default=10)
    args = parser.parse_args()
    # the first second opens connections
    times = asyncio.run(ask_all(args.port, args.rate, 1 + args.seconds))
    counted = times[int(args.rate) :]
    cuts = statistics.quantiles(counted, n=100, method="inclusive")
    figures = {"p50": cuts[49], "p99": cuts[98], "max": max(counted)}
    print(json.dumps(figures | {"requests": len(counted)}))


if __name__ == "__main__":
    main()
