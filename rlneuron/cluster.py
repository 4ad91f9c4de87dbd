"""The Ray cluster of a run: started in-process on loopback, or joined; cores are reserved by one placement group.

In-process: every port on 127.0.0.1, token authentication with a random token that lies in the run folder
(mode 0600) and is never printed. `ray.address` joins a cluster under that cluster's own authentication.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray
import ray._private.ray_constants as ray_constants
import ray._raylet as raylet  # a compiled module without types
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from rlneuron.waiting import RunError

RESOURCE = {"neuron": "neuron_cores", "cuda": "GPU"}
"""Ray's resource that a role's bundle holds, by device type; on cpu nothing is reserved."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A Ray cluster that this process is connected to."""

    address: str
    dashboard_url: str | None
    token_path: Path | None
    """File with the dashboard's token; None on a joined cluster."""
    started_here: bool


def start(*, run_folder: Path, resources: Mapping[str, float], include_dashboard: bool, namespace: str) -> Cluster:
    """Starts Ray in this process: loopback only, token authentication.

    `resources` are the simulated cores (`{"neuron_cores": 4}`); real ones are found by Ray itself and stay out of it.
    """
    token_path = run_folder / "ray_token"
    if not token_path.exists():
        descriptor = os.open(token_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
    # Ray reads these when it starts its daemons; they are how its authentication and node address are chosen.
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token_path)
    os.environ.pop("RAY_AUTH_TOKEN", None)
    _read_authentication_again()
    _stay_on_loopback()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Two OpenMP threads on a busy core wait for each other's time slice: one thread per worker.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = ray.init(
        address="local",
        namespace=namespace,
        resources=dict(resources),
        include_dashboard=include_dashboard,
        dashboard_host="127.0.0.1",
        logging_level=logging.WARNING,
        object_store_memory=_object_store_bytes(),
    )
    host = ray.util.get_node_ip_address()
    assert host == "127.0.0.1", f"an in-process cluster must listen on loopback, not on {host}"
    url = f"http://{context.dashboard_url}" if context.dashboard_url else None
    return Cluster(ray.get_runtime_context().gcs_address, url, token_path, started_here=True)


def join(address: str, *, namespace: str) -> Cluster:
    """Connects to a running cluster ("auto" or "host:port")."""
    _read_authentication_again()
    host, _, port = address.rpartition(":")
    if port.isdigit():
        _require_listener(address, host, int(port))
    if host in ("127.0.0.1", "localhost"):
        _stay_on_loopback()
    try:
        context = ray.init(address=address, namespace=namespace, logging_level=logging.WARNING)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"ray.address: no cluster answers at {address!r} ({' '.join(str(error).split())[:200]}); start one with "
            "`ray start --head`, or leave ray.address out to start one in this process"
        ) from None
    url = f"http://{context.dashboard_url}" if context.dashboard_url else None
    return Cluster(ray.get_runtime_context().gcs_address, url, None, started_here=False)


def children() -> set[int]:
    """Process ids below this one."""
    return {process.pid for process in psutil.Process().children(recursive=True)}


def stop(before: set[int]) -> None:
    """Disconnects from Ray and ends every process below this one that is not in `before`.

    Ray's agents notice the end of their daemon by polling, up to half a minute late when it died while starting.
    """
    started = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
    ray.shutdown()
    _, alive = psutil.wait_procs(started, timeout=5)
    for process in alive:
        process.kill()


def _require_listener(address: str, host: str, port: int) -> None:
    """Ray itself tries an address for ten minutes."""
    try:
        socket.create_connection((host, port), timeout=10).close()
    except OSError as error:
        raise ValueError(
            f"ray.address: nothing listens at {address!r} ({error}); start a cluster with `ray start --head`, or leave "
            "ray.address out to start one in this process"
        ) from None


def _stay_on_loopback() -> None:
    """Makes Ray take 127.0.0.1 as this node's address: where clusters are off it does, for workers as well.

    `_node_ip_address="127.0.0.1"` would not do: Ray resolves it to the machine's outer address.
    """
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False


def _read_authentication_again() -> None:
    """Ray reads RAY_AUTH_* when it is imported; this is how its own tests make it look again."""
    raylet.Config.initialize("")  # type: ignore[attr-defined]
    raylet.AuthenticationTokenLoader.instance().reset_cache()  # type: ignore[attr-defined]


def _object_store_bytes() -> int:
    """Room for batches, not for weights (these go through their own segment): 512 MiB, less where /dev/shm is small."""
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else os.statvfs("/tmp")
    return max(80 * 2**20, min(512 * 2**20, int(shm.f_bavail * shm.f_frsize * 0.5)))


def reserve(roles: Sequence[str], resource: str | None, *, timeout_s: float) -> PlacementGroup | None:
    """A placement group with one single-core bundle per role, in order.

    Feasibility is checked first: a group that can never be placed is refused at once, with demanded, total and
    available. Bundles hold cores alone; with CPUs in them they never become ready on a small machine.
    """
    if resource is None:
        return None
    demanded = len(roles)
    total = int(ray.cluster_resources().get(resource, 0))
    available = int(ray.available_resources().get(resource, 0))
    what = f"{demanded} {resource} ({', '.join(roles)})"
    if demanded > total:
        raise ValueError(
            f"the run needs {what} but the cluster has {total} ({available} available); lower rollout.num_workers, "
            "choose a larger device.instance, or join a larger cluster with ray.address"
        )
    group = placement_group([{resource: 1}] * demanded, strategy="PACK")
    if not group.wait(timeout_s):
        remove_placement_group(group)
        raise RunError(
            f"{what} were not free within {timeout_s:g} s: the cluster has {total}, {available} available; "
            "another job holds them"
        )
    return group
