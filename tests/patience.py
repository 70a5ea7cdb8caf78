"""Waits for another thread or process, however busy the machine is."""

from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

# For what never comes, not for what is slow: pytest-timeout ends a test a minute later.
PATIENCE_S = 240


def wait_until(is_true: Callable[..., Any]) -> None:
    """Return once that is so.

    Raises:
        AssertionError: it is not, after minutes.
    """
    deadline = monotonic() + PATIENCE_S
    while not is_true():
        assert monotonic() < deadline, "waited in vain"
        sleep(0.01)
