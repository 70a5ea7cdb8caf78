"""Replicas on Ray Serve: a cluster of this machine, on loopback."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.folders import MODEL_FOLDERS, ROOT
from tests.support.patience import wait_until
from tests.support.ports import free_port
from tests.support.running_server import RunningServer

# Processes have it in their titles. Two workers of pytest have clusters of their own.
NAME = f"paged-kv-{os.getpid()}"

USUAL: dict[str, Any] = {
    "model": str(MODEL_FOLDERS["stdlib-llama"]),
    "dtype": "float32",
    "num_cpus": 0.1,
    "max_kv_bytes": "60MB",
    "prefill_step_size": 256,
}


@contextmanager
def ray_cluster() -> Iterator[int]:
    """A cluster without an application, and the port at which Serve listens."""
    ray, serve = pytest.importorskip("ray"), pytest.importorskip("ray.serve")
    port = free_port()
    with pytest.MonkeyPatch.context() as patched:
        # Workers get the environment of this process.
        patched.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patched.setenv("PYTHONPATH", str(ROOT))
        patched.setenv("OPENBLAS_NUM_THREADS", "1")
        ray.init(
            num_cpus=4,
            _node_ip_address="127.0.0.1",
            include_dashboard=False,
            object_store_memory=80_000_000,
            log_to_driver=False,
            configure_logging=False,
        )
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            yield port
        finally:
            serve.shutdown()
            ray.shutdown()


class Replicas(RunningServer):
    """The application, which serves until the next one is deployed."""

    def __init__(self, port: int, **arguments: Any) -> None:
        self.port = port
        self.deploy(**arguments)

    def deploy(self, **arguments: Any) -> None:
        """Serve with other arguments from now on."""
        from ray import serve

        from paged_kv.ray import app

        serve.run(app(USUAL | arguments), name=NAME, route_prefix="/")
        wait_until(lambda: len(self.processes()) == int(arguments.get("num_replicas", 1)))

    def stop(self) -> None:
        """End all replicas."""
        from ray import serve

        serve.delete(NAME)

    def processes(self, deployment: str = "Replica") -> list[int]:
        """The ids of the processes of a deployment."""
        title = f"ray::ServeReplica:{NAME}:{deployment}"
        return [pid for pid, found in titles() if found.startswith(title)]

    def kill(self, pid: int) -> None:
        """End a process as the system does when memory runs out."""
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: pid not in [found for found, _ in titles()])


def titles() -> Iterator[tuple[int, str]]:
    """The ids and titles of all processes."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (OSError, UnicodeDecodeError):
            continue
        yield int(folder.name), title
