"""No test depends on how quick the machine is, or on a port that another program may take.

A test counts steps, or compares two times. It waits for an event with `wait_until` of
`tests/support/patience.py`, not for a time. A server's port comes from `tests/support/ports.py`, or
is the one that the server itself was given and still holds.
"""

import ast
import re
from collections.abc import Callable, Iterator

import pytest

from tests.support.folders import ROOT

FOLDER = ROOT / "tests"
CLOCK = re.compile(r"(time\.)?(perf_counter|process_time|thread_time|monotonic|time)(_ns)?|repeat")
MAY_SLEEP = {
    "tests/support/patience.py",  # asks again and again for an event
    "tests/support/far_servers.py",  # plays a network that takes time
    "tests/support/soak_questions.py",  # sends a request in parts
    "tests/support/store_torture.py",  # stops a writer at a random moment
    "tests/kernels/cpu/test_native_kernels.py",  # looks whether idle threads stay asleep
    "tests/server/completions/test_request_state.py",  # in a loop in which nobody waits
    "tests/server/completions/test_tool_calls.py",  # lets the event loop run during a slow parse
}


def absolute_times(tree: ast.Module) -> Iterator[int]:
    """The lines of assertions that a time is less than a number."""
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in ("time", "timeit")
        for alias in node.names
    }
    if not imported and "time" not in _modules(tree):
        return
    timed = imported | {"time"}
    while more := set(_made_of(tree, timed)) - timed:
        timed |= more
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield from (
                each.lineno
                for each in ast.walk(node.test)
                if isinstance(each, ast.Compare) and _is_bound(each, timed)
            )


def _modules(tree: ast.Module) -> set[str]:
    """The modules that it imports whole."""
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Import))
    return {alias.name for node in found for alias in node.names}


def _made_of(tree: ast.Module, timed: set[str]) -> Iterator[str]:
    """Names of variables that are computed with a clock, and of functions that return such."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(value=value, targets=[ast.Name(id=name)]) if _is_timed(value, timed):
                yield name
            case ast.Call(func=ast.Attribute(ast.Name(name), "append"), args=[value]) if _is_timed(
                value, timed
            ):
                yield name
            case ast.FunctionDef(name=name) if any(
                isinstance(each, ast.Return) and each.value and _is_timed(each.value, timed)
                for each in ast.walk(node)
            ):
                yield name


def _is_timed(node: ast.AST, timed: set[str]) -> bool:
    """Whether a clock, or what was computed with one, occurs in an expression."""
    for each in ast.walk(node):
        text = ast.unparse(each) if isinstance(each, ast.Attribute | ast.Name) else ""
        is_clock = CLOCK.fullmatch(text) and text.split(".")[0] in timed
        if is_clock or text in timed - {"time"}:
            return True
    return False


def _is_bound(node: ast.Compare, timed: set[str]) -> bool:
    sides = [node.left, *node.comparators]
    for less, operator, more in zip(sides, node.ops, sides[1:], strict=False):
        if isinstance(operator, ast.Gt | ast.GtE):
            less, more = more, less
        is_order = isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE)
        numbers = not any(isinstance(each, ast.Name) for each in ast.walk(more))
        if is_order and numbers and _is_timed(less, timed):
            return True
    return False


def sleeps(tree: ast.Module) -> Iterator[int]:
    """The lines of sleeps; `asyncio.sleep(0)` only lets others run."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name("sleep") | ast.Attribute(attr="sleep"), args=[length]):
                if ast.unparse(length) != "0":
                    yield node.lineno


def ports_given_back(tree: ast.Module) -> Iterator[int]:
    """The lines of `with` that ask the system for a port and close the socket again: another
    program may have the port by the time that it is used."""
    for node in ast.walk(tree):
        if isinstance(node, ast.With | ast.AsyncWith):
            made = " ".join(ast.unparse(item.context_expr) for item in node.items)
            body = "\n".join(ast.unparse(each) for each in node.body)
            asks = re.search(r"create_server\(\([^)]*, 0\)|socket\.socket\(", made + body)
            if asks and re.search(r"return .*getsockname\(\)", body):
                yield node.lineno


Lint = Callable[[ast.Module], Iterator[int]]
LINTS: list[Lint] = [absolute_times, sleeps, ports_given_back]


@pytest.mark.parametrize("lint", LINTS)
def test_no_test_has_the_habit(lint: Lint) -> None:
    found = {
        f"{name}:{line}"
        for path in FOLDER.rglob("*.py")
        if (name := str(path.relative_to(ROOT))) not in MAY_SLEEP
        for line in lint(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert not found


@pytest.mark.parametrize(
    ("lint", "source"),
    [
        (absolute_times, "from time import monotonic\nbegan = monotonic()\nassert began < 0.1"),
        (absolute_times, "import time\nassert 3 > time.perf_counter()"),
        (absolute_times, "import time\ntook = time.time()\nassert 0 < took < 1e-3"),
        (absolute_times, "from timeit import repeat\nassert min(repeat(f)) / 50 < 50e-6"),
        (absolute_times, "import time\nw = []\nw.append(time.monotonic())\nassert min(w) < 2 * 3"),
        (absolute_times, "import time\ndef t():\n    return time.monotonic()\nassert t() < 1"),
        (sleeps, "import time\n\ntime.sleep(0.1)"),
        (sleeps, "from asyncio import sleep\n\nawait sleep(at)"),
        (ports_given_back, "\nwith socket.create_server(('', 0)) as s: return s.getsockname()[1]"),
    ],
)
def test_planted_habit_is_found(lint: Lint, source: str) -> None:
    assert list(lint(ast.parse(source))) == [len(source.splitlines())]


@pytest.mark.parametrize(
    ("lint", "source"),
    [
        (
            absolute_times,
            "import time\nfrom tests.support.patience import S\nassert time.time() < S",
        ),
        (absolute_times, "import time\nassert time.monotonic() - began >= 1"),
        (absolute_times, "import time\na = time.monotonic()\nassert time.monotonic() - a < 3 * a"),
        (absolute_times, "import mlx.core as mx\nassert mx.repeat(keys, 2).size < 10"),
        (sleeps, "await asyncio.sleep(0)"),
        (ports_given_back, "with socket.create_server(('', 0)) as s: serve(s)"),
    ],
)
def test_what_is_no_such_habit_passes(lint: Lint, source: str) -> None:
    assert not list(lint(ast.parse(source)))
