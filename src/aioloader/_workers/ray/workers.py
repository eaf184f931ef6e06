"""``RayWorkers``: how many worker actors to use on a Ray cluster, and their resources.

The object only describes actors; an iteration's first request places them. This module
also connects to the cluster, and ends a cluster that it has started.
"""

import math
import os
import socket
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from aioloader._base.cpu_threads import CpuThread
from aioloader._base.extras import imported
from aioloader._base.forks import fork_safe
from aioloader._base.warnings import warn

_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}


class RayWorkers:
    """Worker actors on a Ray cluster, for ``DataLoader(..., workers=RayWorkers(8))``.

    Like worker processes, actors read, transform and collate, with the same samples,
    order, random numbers and errors. An actor that dies, alone or with its node, is
    replaced and its batches are made again; ``on_timeout="restart"`` ends stuck actors.
    An iterable dataset is read once, by the loader. (With ``rng="worker"`` random
    numbers depend on which actor makes a batch, as with processes.)

    The dataset and the functions are put into Ray's store once. Each node has one
    read-only copy of big arrays. (A tensor cannot be read-only: never write to one in
    place.) Batches return through the store and are copied once, into the loader's
    memory. An actor needs a second or two to import torch; ``persistent_workers=True``
    keeps actors between epochs. Ray runs actors at nice 15, so they wait on a node that
    is busy, unless ``RAY_worker_niceness=0`` was set when the cluster was started.

    Modules that workers import, such as aioloader, must be installed on all nodes.
    Functions and classes that a script or a notebook defines are sent to the actors.

    Args:
        num_workers: How many actors; the loader's ``num_workers`` may be left at 0.
        resources: What each actor needs, by the names of ``ray.cluster_resources()``,
            such as ``{"CPU": 2, "loader": 1}``; one CPU by default.
        address: The cluster (``"auto"``, ``"host:port"``). ``None``: the cluster that
            this process is connected to, or else the one in ``RAY_ADDRESS``. Without
            either, a cluster is started here with room for these workers, and shut down
            with the last ``RayWorkers`` of this process. Other clusters keep running.

    Raises:
        ImportError: If Ray is not installed.
        TypeError: If an argument is of the wrong type.
        ValueError: If a number is out of range or an address is for Ray Client; at the
            first iteration, if this process is connected to another cluster.
        ConnectionError: At the first iteration, if there is no cluster at the address.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        resources: Mapping[str, float] | None = None,
        address: str | None = None,
    ) -> None:
        if isinstance(num_workers, bool) or not isinstance(num_workers, int):
            raise TypeError(f"num_workers must be an integer, got {num_workers!r}")
        if num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, got {num_workers}")
        if not isinstance(resources, (Mapping, type(None))):
            raise TypeError(f"resources must be a mapping, got {resources!r}")
        if not isinstance(address, (str, type(None))):
            raise TypeError(f"address must be a string or None, got {address!r}")
        needs = {"CPU": 1.0, **(resources or {})}
        for name, amount in needs.items():
            if not isinstance(amount, (int, float)):
                raise TypeError(f"resources: {name!r} must be a number: {amount!r}")
            if not amount >= 0:
                raise ValueError(f"resources: {name!r} must not be negative: {amount}")
        _check_client("address", address)
        import_ray()
        self.num_workers = num_workers
        self.resources = needs
        self.address = address
        self._connection: _RayConnection | None = None

    def __repr__(self) -> str:
        return (
            f"RayWorkers({self.num_workers}, resources={self.resources}, "
            f"address={self.address!r})"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_connection": None}

    def options(self) -> dict[str, Any]:
        """Return the options with which Ray creates each actor."""
        known: dict[str, Any] = {
            option: self.resources[name]
            for name, option in _OPTIONS.items()
            if name in self.resources
        }
        own = {name: n for name, n in self.resources.items() if name not in _OPTIONS}
        return {**known, "resources": own, "scheduling_strategy": "SPREAD"}

    def connect(self) -> tuple[Any, object]:
        """Return the connected module ``ray``, and a token that keeps it connected.

        Connecting may take seconds. The token is None if user code has connected Ray.

        Raises:
            ConnectionError: If there is no cluster at the address.
            ValueError: If the address is for Ray Client or another cluster is in use.
        """
        global _ours  # noqa: PLW0603  (so is Ray's own state)
        ray = import_ray()
        with _LOCK:
            if not ray.is_initialized():
                self._start(ray)
                mine = self._connection = _RayConnection()
                _ours = weakref.ref(mine)
                weakref.finalize(mine, _disconnect, ray, _session(ray)).atexit = False
                return ray, mine
            current = ray.get_runtime_context().gcs_address
            if self.address not in {None, "auto", "local", current}:
                raise ValueError(
                    f"RayWorkers(address={self.address!r}): this process is already "
                    f"connected to the Ray cluster at {current!r}"
                )
            self._connection = _ours() if _ours is not None else None
        if self._connection is not None:
            self._warn_of_no_room(ray)
        return ray, self._connection

    def _start(self, ray: Any) -> None:
        """Connect to the given cluster; without an address, start a cluster here."""
        options: dict[str, Any] = {}
        address = self.address or os.environ.get("RAY_ADDRESS")
        _check_client("RAY_ADDRESS", address)
        if address is None:
            address, number = "local", self.num_workers
            own = {k: number * n for k, n in self.options()["resources"].items()}
            cpus = max(os.cpu_count() or 1, number * self.resources["CPU"])
            options = {"num_cpus": math.ceil(cpus), "resources": own}
            options["include_dashboard"] = False
        _probe(address)
        ray.init(address=address, logging_level="warning", **options)

    def _warn_of_no_room(self, ray: Any) -> None:
        """Warn if the connected cluster has too few free CPUs for these workers."""
        free = ray.available_resources().get("CPU", 0)
        needed = self.num_workers * self.resources["CPU"]
        if free < needed:
            warn(
                f"the Ray cluster that was started here has {free:g} CPUs free, and "
                f"{self!r} needs {needed:g}: actors without room wait until others "
                "end; start a larger cluster first with ray.init(num_cpus=...)"
            )


class _RayConnection:
    """A token for the connection to Ray, which ends when the token is collected."""

    __slots__ = ("__weakref__",)


# Seconds to wait for a cluster to answer.
_PROBE_SECONDS = 5.0
# One process has one connection to Ray.
_LOCK = fork_safe(threading.Lock())
_ours: "weakref.ref[_RayConnection] | None" = None


def _check_client(name: str, address: str | None) -> None:
    if address is not None and address.startswith("ray://"):
        raise ValueError(
            f"{name}={address!r} is a Ray Client address, which cannot transport "
            "batches: run this process on a node of the cluster, with 'auto'"
        )


def _probe(address: str) -> None:
    """Raise ``ConnectionError`` if no server is at ``host:port``; Ray tries longer."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():  # "auto", "local", what only Ray knows
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _PROBE_SECONDS).close()
    except OSError as error:
        raise ConnectionError(
            f"no Ray cluster at {address!r}: {error}; give the address that "
            "`ray start --head` prints, host:port, or 'auto' on a node of the cluster"
        ) from error


def _session(ray: Any) -> str:
    return str(ray.get_runtime_context().get_job_id())


def _disconnect(ray: Any, session: str) -> None:
    """Disconnect Ray in a new thread, because finalizers may run in any thread."""

    def end() -> None:
        with _LOCK:
            if ray.is_initialized() and _session(ray) == session:
                ray.shutdown()

    thread = CpuThread("aioloader-ray-end")
    thread.post(end)
    thread.stop(thread.ident)


def import_ray() -> Any:
    return imported("ray", "ray", "RayWorkers needs Ray")
