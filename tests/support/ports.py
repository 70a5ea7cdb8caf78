"""Ports for servers under test."""

import os
import random
import socket
from contextlib import suppress
from itertools import cycle

# Below the ports that systems give to outgoing connections, one of which could take a port before
# its server listens; a thousand for each worker of pytest-xdist, in an order that two runs on one
# machine do not share.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_PORTS = cycle(random.sample(range(10_000 + 1_000 * _WORKER, 11_000 + 1_000 * _WORKER), 1_000))


def free_port() -> int:
    """A port of this machine that nothing listens at, and that no other test has been given."""
    while True:
        port = next(_PORTS)
        with suppress(OSError), socket.create_server(("", port)):
            return port
