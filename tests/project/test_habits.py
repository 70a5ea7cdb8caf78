"""No test depends on how quick the machine is, or on a port that another program may take.

A test waits for an event with `wait_until` of `tests/support/patience.py`, not for a time. A
server's port comes from `tests/support/ports.py`, or is the one that the server was given.
"""

import re

import pytest

from tests.support.folders import ROOT

MAY_SLEEP = {
    "tests/support/patience.py",  # asks again and again for an event
    "tests/support/far_servers.py",  # plays a network that takes time
    "tests/support/soak_questions.py",  # sends a request in parts
    "tests/support/store_torture.py",  # stops a writer at a random moment
    "tests/kernels/cpu/test_native_kernels.py",  # looks whether idle threads stay asleep
    "tests/server/test_signals.py",  # starts processes that hang until a signal ends them
    "tests/paged_kv/commands/test_stats_command.py",  # starts one that is killed
    "tests/server/completions/test_request_state.py",  # in a loop in which nobody waits
    "tests/server/completions/test_tool_calls.py",  # lets the event loop run during a slow parse
}
HABITS = {
    "sleeps": r"\bsleep\((?!0\)|self|\))",
    "absolute times": r"assert .*(perf_counter|process_time|monotonic|time\.time)\(\).* < [\d.]+$",
    "ports given back": r"with socket\.\w+\(.*:\n(?:.*\n)?\s+return .*getsockname\(\)",
}


@pytest.mark.parametrize("habit", HABITS)
def test_no_test_has_the_habit(habit: str) -> None:
    found = {
        name
        for path in (ROOT / "tests").rglob("*.py")
        if (name := str(path.relative_to(ROOT))) not in MAY_SLEEP | {"tests/project/test_habits.py"}
        and re.search(HABITS[habit], path.read_text(encoding="utf-8"), re.M)
    }
    assert not found
