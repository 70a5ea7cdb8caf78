"""Waits for another thread or process, however busy the machine is."""

from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

# For an event that never comes, not for a slow one: pytest-timeout ends a test a minute later.
PATIENCE_S = 240
# For what ends by a time-out of half a second, and must not take the five seconds of another one.
# The shortest of three waits is compared with it, so that a machine may be busy with other things.
SHORT_PATIENCE_S = 4


def wait_until(is_true: Callable[..., Any]) -> None:
    """Return once the condition holds.

    Raises:
        AssertionError: it is not, after minutes.
    """
    deadline = monotonic() + PATIENCE_S
    while not is_true():
        assert monotonic() < deadline, "waited in vain"
        sleep(0.01)
