"""No test asserts that something takes less than a time: that depends on the machine and on what
else runs there.

A test counts steps instead, or compares two times. A bound that ends a wait in vain comes from
`tests/support/patience.py`. That something takes at least a time may be asserted.
"""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.support.folders import ROOT

FOLDER = ROOT / "tests"
CLOCKS = re.compile(
    r"(perf_counter|process_time|thread_time|monotonic)(_ns)?|time_ns|timeit|repeat"
)
# Of modules: elsewhere these words mean something else.
MODULES_OF_CLOCKS = {"time", "timeit"}


def absolute_times(source: str) -> list[int]:
    """The lines of assertions that a time is less than a number."""
    if not CLOCKS.search(source) and "time.time" not in source:
        return []
    tree = ast.parse(source)
    clocks, numbers = _clocks(tree), _numbers(tree)
    timed = set(clocks)
    while more := set(_made_of(tree, timed)) - timed:
        timed |= more
    return [
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
        for line in _bounds(node, timed, numbers)
    ]


def _clocks(tree: ast.Module) -> set[str]:
    """The names of clocks, as imported: `perf_counter`, or `time.perf_counter`."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=aliases) if module in MODULES_OF_CLOCKS:
                names |= {
                    each.asname or each.name for each in aliases if CLOCKS.fullmatch(each.name)
                }
    return names


def _numbers(tree: ast.Module) -> set[str]:
    """The names of the module's own numbers."""
    return {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign) and _is_number(node.value, set())
        for each in node.targets
        for target in ast.walk(each)
        if isinstance(target, ast.Name)
    }


def _is_number(node: ast.expr, numbers: set[str]) -> bool:
    match node:
        case ast.Constant(value=int() | float()):
            return True
        case ast.Name(id=name):
            return name in numbers
        case ast.UnaryOp(operand=operand):
            return _is_number(operand, numbers)
        case ast.BinOp(left=left, right=right):
            return _is_number(left, numbers) and _is_number(right, numbers)
    return False


def _is_timed(node: ast.AST, timed: set[str]) -> bool:
    """Whether a clock, or what was computed with one, occurs in an expression."""
    return any(_name_of(each, timed) for each in ast.walk(node))


def _name_of(node: ast.AST, timed: set[str]) -> bool:
    match node:
        case ast.Name(id=name):
            return name in timed
        case ast.Attribute(value=ast.Name(id=module), attr=name):
            is_clock = module in MODULES_OF_CLOCKS and CLOCKS.fullmatch(name)
            return bool(is_clock or (module == "time" and name == "time"))
    return False


def _made_of(tree: ast.Module, timed: set[str]) -> Iterator[str]:
    """Names of variables that are computed with a clock, and of functions that return such."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets, value=value) if _is_timed(value, timed):
                yield from (each.id for each in targets if isinstance(each, ast.Name))
            case ast.AugAssign(target=ast.Name(id=name), value=value) if _is_timed(value, timed):
                yield name
            case ast.NamedExpr(target=ast.Name(id=name), value=value) if _is_timed(value, timed):
                yield name
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[value]
            ) if _is_timed(value, timed):
                yield name
            case ast.FunctionDef(name=name):
                returned = [each.value for each in ast.walk(node) if isinstance(each, ast.Return)]
                if any(each is not None and _is_timed(each, timed) for each in returned):
                    yield name


def _bounds(node: ast.Assert, timed: set[str], numbers: set[str]) -> Iterator[int]:
    """The lines of comparisons of a time that must be less than a number."""
    for each in ast.walk(node.test):
        if not isinstance(each, ast.Compare):
            continue
        sides = [each.left, *each.comparators]
        for less, operator, more in zip(sides, each.ops, sides[1:], strict=False):
            if isinstance(operator, ast.Gt | ast.GtE):
                less, more = more, less
            if isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE) and (
                _is_timed(less, timed) and _is_number(more, numbers)
            ):
                yield each.lineno


def test_no_test_asserts_that_something_takes_less_than_a_time() -> None:
    found = {
        f"{path.relative_to(FOLDER)}:{line}"
        for path in FOLDER.rglob("*.py")
        for line in absolute_times(path.read_text(encoding="utf-8"))
    }
    assert not found


PLANTED = {
    "clock": "from time import monotonic\nbegan = monotonic()\nassert monotonic() - began < 0.1",
    "module": "import time\nbegan = time.process_time()\nassert time.process_time() - began <= 2",
    "turned": "import time\nassert 3 > time.perf_counter()",
    "chain": "import time\ntook = time.time()\nassert 0 < took < 1e-3",
    "repeat": "from timeit import repeat\nassert min(repeat(f, number=50)) / 50 < 50e-6",
    "list": "import time\nwaits = []\nwaits.append(time.monotonic())\nassert min(waits) < 2 * 3",
    "name": "import time\nLIMIT = 0.5\ntook = time.monotonic()\nassert took < LIMIT",
    "function": "import time\ndef took():\n    return time.monotonic()\nassert took() < 1",
}
ALLOWED = {
    "patience": "import time\nfrom tests.support.patience import S\nassert time.time() < S",
    "deadline": "import time\nend = time.monotonic() + S\nassert time.monotonic() < end",
    "at least": "import time\nbegan = time.monotonic()\nassert time.monotonic() - began >= 1",
    "two times": "import time\na = time.monotonic()\nassert time.monotonic() - a < 3 * a",
    "no clock": "import mlx.core as mx\nassert mx.repeat(keys, 2).size < 10",
}


@pytest.mark.parametrize("source", PLANTED.values(), ids=PLANTED)
def test_planted_time_is_found(source: str) -> None:
    assert absolute_times(source) == [len(source.splitlines())]


@pytest.mark.parametrize("source", ALLOWED.values(), ids=ALLOWED)
def test_allowed_comparison_passes(source: str) -> None:
    assert absolute_times(source) == []
