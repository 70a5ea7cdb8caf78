"""python -m tests [--soak] [ARGUMENT...]: runs the tests on two workers, and says what they cost.

Cost is counted in T: the processor time that ten million sums in a Python loop take on the machine
at hand. So a cost is the same number on a quick machine and on a slow one. Without arguments the
plain tests run, and fail if they cost a third more than their budget. Arguments go to pytest.
"""

from __future__ import annotations

import os
import subprocess
import sys

PLAIN = "not slow and not soak"
PLAIN_BUDGET = 200.0
"""T that the plain tests may cost, all processes together."""
PLAIN_COST = 150.0
"""T that they cost when this was written; it only tells how long they will take."""
LEEWAY = 4 / 3  # Of the budget: some processors are worse at the tests than at sums.
WORKERS = 2
SUMS = "s=0\nfor i in range(10**7): s+=i"
# The soak tries so many times the examples of Hypothesis, new histories and generated mutants.
SOAK = {"PAGED_KV_EXAMPLES": "20", "PAGED_KV_SOAK": "200"}
MUTANTS = 200


def main(arguments: list[str]) -> int:
    """Run what the arguments ask for; return the exit status."""
    if arguments == ["--soak"]:
        return soak()
    is_plain = not arguments
    unit = yardstick()
    if is_plain:
        minutes = PLAIN_COST * unit / min(WORKERS, os.cpu_count() or 1) / 60
        tell(f"takes about {minutes:.0f} minutes here, where T is {unit:.2f} s")
    status, seconds = seconds_of(pytest("-n", str(WORKERS), "-m", PLAIN, *arguments))
    cost = seconds / unit
    tell(f"cost {cost:.0f} T, of {unit:.2f} s of processor time each")
    if is_plain and cost > PLAIN_BUDGET * LEEWAY:
        tell(f"the plain tests may cost {PLAIN_BUDGET:.0f} T: see CONTRIBUTING.md, Cost")
        return status or 1
    return status


def yardstick() -> float:
    """T on this machine [s]: the mean of as many loops at once as there are workers, because two
    processors may be halves of one core."""
    before = os.times()
    loops = [subprocess.Popen([sys.executable, "-c", SUMS]) for _ in range(WORKERS)]
    for loop in loops:
        loop.wait()
    after = os.times()
    return (after.children_user - before.children_user) / WORKERS


def soak() -> int:
    """Run what no merge waits for: long histories, whole grids, drawn mutants and planted ones."""
    environment = {**SOAK, **os.environ}
    runs = [
        pytest("-n", str(WORKERS), "-m", "soak"),
        [sys.executable, "-m", "tests.mutation", "--count", str(MUTANTS)],  # and the lists
    ]
    return max(subprocess.run(run, env=environment).returncode for run in runs)


def pytest(*options: str) -> list[str]:
    """The command that runs pytest; later options win."""
    return [sys.executable, "-m", "pytest", "-q", "--dist", "worksteal", *options]


def seconds_of(command: list[str]) -> tuple[int, float]:
    """The exit status of a command, and the processor time of it and all that it waited for [s]."""
    before = os.times()
    status = subprocess.run(command).returncode
    after = os.times()
    user = after.children_user - before.children_user
    return status, user + after.children_system - before.children_system


def tell(text: str) -> None:
    print(f"test: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
