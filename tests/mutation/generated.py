"""Generated mutants: what may go wrong anywhere, in every function of some rooms.

Operators are swapped, conditions negated, constants and bounds moved by one, and calls, assignments
to attributes and deletions left out. Constructors stay as they are, and what raises, logs or
describes.

A draw takes the functions in a random order and a random mutant of each, then another of each: long
functions have most mutants, and the same tests notice all of one function. The tests are those of
the module, then those of its folder, then those of the rooms that use it. They are the quick ones,
for what `./test` does not notice is merged.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import islice, zip_longest
from pathlib import Path
from random import Random
from typing import NamedTuple, TypeAlias

from tests.mutation.mutants import Mutant, Round, equal_mutants
from tests.mutation.python_code import Code, definitions_in, occurrences
from tests.support.folders import ROOT

ROOMS = (
    *("allocator", "paged_kv/steps", "paged_kv/pool", "paged_kv/prefix"),
    *("kernels/pages", "server/engine"),
)
USED_BY = {"allocator": "tests/paged_kv"}  # the tests of other rooms use all of theirs

FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Change: TypeAlias = tuple[Code, str]  # code, and what takes its place

_PAIRS: list[tuple[type[ast.AST], type[ast.AST]]] = [
    *((ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn), (ast.Lt, ast.LtE)),
    *((ast.Gt, ast.GtE), (ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv)),
]
SWAPPED = dict(_PAIRS) | {right: left for left, right in _PAIRS} | {ast.Mod: ast.FloorDiv}
UNCHANGED_FUNCTIONS = ("__init__", "__repr__", "__str__")
UNCHANGED = (*(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef), ast.Assert, ast.Raise)
LOGS = ("log.", "logger.", "logging.", "warn")
SIMPLE = (ast.Return, ast.Assign, ast.AnnAssign, ast.AugAssign)
# These are no code without what is around them, or say nothing.
PIECES = (ast.Slice, ast.Starred, ast.Tuple, ast.Constant, ast.UnaryOp, ast.JoinedStr)


class Function(NamedTuple):
    """A function of a file, whose syntax is `tree`."""

    file: str
    name: str
    node: FunctionNode
    tree: ast.Module


def draw(seed: int, count: int, text: str = "") -> list[Mutant]:
    """Mutants at random, the same of one seed, of functions with a text in their file or name."""
    random = Random(seed)
    decks = []
    for each in random.sample(functions := list(all_functions(text)), len(functions)):
        changes = list(changes_of(each.node))
        decks.append([(each, change) for change in random.sample(changes, len(changes))])
    drawn = (mutant_of(*card) for cards in zip_longest(*decks) for card in cards if card)
    equal = {*equal_mutants()}
    return list(islice((mutant for mutant in drawn if mutant not in equal), count))


def all_functions(text: str = "") -> Iterator[Function]:
    """The functions of all rooms with a text in their file or name."""
    for path in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        file, tree = str(path.relative_to(ROOT)), _tree(path)
        for name, node in _functions(tree):
            if text in f"{file} {name}":
                yield Function(file, name, node, tree)


def changes_of(function: FunctionNode) -> Iterator[Change]:
    """All changes of a function, without those of functions within it."""
    is_question = function.returns is not None and ast.unparse(function.returns) == "bool"
    for node, around in _code(function.body, None):
        yield from _swapped(node)
        yield from _negated(node, is_question)
        yield from _left_out(node)
        yield from _moved_by_one(node, around)


def mutant_of(function: Function, change: Change) -> Mutant:
    """A change as a mutant."""
    file, name, _, tree = function
    node, to = change
    code = ast.unparse(node)
    nth = [found[0] is node for found in occurrences(tree, name, code, to)].index(True)
    description = f"{name}:{node.lineno} `{code}` -> `{to}`"
    return Mutant(description, file, code, to, name, nth, _rounds(Path(file)))


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _rounds(file: Path) -> tuple[Round, ...]:
    folder, room = f"tests/{file.parent}", file.parts[0]
    places = (f"{folder}/test_{file.name}", folder, USED_BY.get(room, f"tests/{room}"))
    return tuple(Round((each,)) for each in dict.fromkeys(places) if (ROOT / each).exists())


def _functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, FunctionNode]]:
    for each in definitions_in(node):
        if not isinstance(each, ast.ClassDef) and each.name not in UNCHANGED_FUNCTIONS:
            yield f"{prefix}{each.name}", each
        yield from _functions(each, f"{prefix}{each.name}.")


def _code(nodes: Iterable[ast.AST], around: Code | None) -> Iterator[tuple[ast.AST, Code | None]]:
    """Nodes that may change, each with the least code around it that can be read alone."""
    for node in nodes:
        if not isinstance(node, UNCHANGED) and not _logs(node):
            yield node, around
            yield from _code(_parts(node), _readable(node, around))


def _readable(node: ast.AST, around: Code | None) -> Code | None:
    if isinstance(node, ast.stmt):
        return node if isinstance(node, SIMPLE) else None
    return node if isinstance(node, ast.expr) and not isinstance(node, PIECES) else around


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    # Python 3.11 does not know where in a file the parts of an f-string are.
    if not isinstance(node, ast.JoinedStr):
        annotation = getattr(node, "annotation", None)
        yield from (part for part in ast.iter_child_nodes(node) if part is not annotation)


def _logs(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and ast.unparse(node).startswith(LOGS)


def _swapped(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in SWAPPED:
        yield _with(node, node, "op", SWAPPED[type(node.op)]())
    if isinstance(node, ast.Compare):
        for at, operator in enumerate(node.ops):
            swapped = SWAPPED[type(operator)]()
            yield _with(node, node, "ops", [*node.ops[:at], swapped, *node.ops[at + 1 :]])


def _negated(node: ast.AST, is_question: bool) -> Iterator[Change]:
    answer = getattr(node, "value", None) if isinstance(node, ast.Return) and is_question else None
    for condition in (getattr(node, "test", None), *getattr(node, "ifs", ()), answer):
        if condition and not isinstance(condition, ast.Compare):  # whose operators are swapped
            yield condition, ast.unparse(ast.UnaryOp(ast.Not(), condition))


def _left_out(node: ast.AST) -> Iterator[Change]:
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await)
    targets = node.targets if isinstance(node, ast.Assign) else []
    is_kept = any(isinstance(each, ast.Attribute | ast.Subscript) for each in targets)
    if isinstance(node, ast.stmt) and (is_call or is_kept or isinstance(node, ast.Delete)):
        yield node, "pass"


def _moved_by_one(node: ast.AST, around: Code | None) -> Iterator[Change]:
    if isinstance(node, ast.Constant) and type(node.value) is int and around:
        yield _with(around, node, "value", node.value + 1)
    if isinstance(node, ast.Slice) and around:
        for field, operator in (("lower", ast.Add()), ("upper", ast.Sub())):
            if (bound := getattr(node, field)) and not isinstance(bound, PIECES):
                yield _with(around, node, field, ast.BinOp(bound, operator, ast.Constant(1)))
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "range":
        *starts, end = node.args[:2]
        less = ast.BinOp(end, ast.Sub(), ast.Constant(1))
        yield _with(node, node, "args", [*starts, less, *node.args[2:]])


def _with(around: Code, node: ast.AST, field: str, value: object) -> Change:
    """Code in which one field of a node has another value."""
    before = getattr(node, field)
    setattr(node, field, value)
    text = ast.unparse(around)
    setattr(node, field, before)
    return around, text
