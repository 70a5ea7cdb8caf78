"""Changes Python code by its syntax: neither its place in a function nor its format matters."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import accumulate
from textwrap import dedent
from typing import TypeAlias

Definition: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Code: TypeAlias = ast.expr | ast.stmt


def changed(source: str, name: str, change: str, to: str, nth: int | None = None) -> str:
    """A source in which code of one definition is replaced.

    Args:
        name: of a function or class, as in "Class.method"; "" for the whole source.
        change: an expression or statements. Comments, line breaks and quotes do not count.
        to: what takes its place; "" removes statements.
        nth: which of several to replace, from 0; None if there must be only one.

    Raises:
        ValueError: there is no such code, or it is there more than once and `nth` is None.
        SyntaxError: `change` or `to` is no Python.
    """
    found = occurrences(ast.parse(source), name, change, to)
    if not (len(found) == 1 if nth is None else nth < len(found)):
        raise ValueError(f"occurs {len(found)} times in {name or 'the file'}")
    return _spliced(source, found[nth or 0], dedent(to).strip())


def occurrences(tree: ast.Module, name: str, change: str, to: str) -> list[list[Code]]:
    """The nodes that `change` stands for, as often as a definition has them."""
    old, new = (ast.parse(dedent(code)).body for code in (change, to))
    expression = _expression(old) if _expression(new) else None
    code: list[ast.AST] = [expression] if expression else [*old]
    return [found for each in _definitions(tree, name) for found in _occurrences(each, code)]


def definitions_in(node: ast.AST) -> Iterator[Definition]:
    """Functions and classes within a node, without those that are within these."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            yield child
        else:
            yield from definitions_in(child)


def _expression(nodes: list[ast.stmt]) -> ast.expr | None:
    return nodes[0].value if len(nodes) == 1 and isinstance(nodes[0], ast.Expr) else None


def _definitions(tree: ast.Module, name: str) -> list[ast.AST]:
    """Those with a name: of a property there may be several."""
    found: list[ast.AST] = [tree]
    for part in name.split(".") if name else []:
        found = [inner for outer in found for inner in definitions_in(outer) if inner.name == part]
    return found


def _occurrences(definition: ast.AST, code: list[ast.AST]) -> Iterator[list[Code]]:
    for parent in ast.walk(definition):
        for _, value in ast.iter_fields(parent):
            siblings = value if isinstance(value, list) else [value]
            for start in range(len(siblings) - len(code) + 1):
                nodes = siblings[start : start + len(code)]
                if all(map(_is_same, nodes, code)):
                    yield nodes


def _is_same(one: object, other: ast.AST) -> bool:
    # A name is the same whether it is read, written or deleted.
    return type(one) is type(other) and _dump(one) == _dump(other)


def _dump(node: ast.AST) -> str:
    return re.sub(r", ctx=\w+\(\)", "", ast.dump(node))


def _spliced(source: str, nodes: list[Code], to: str) -> str:
    """The source with other text for some nodes; all else stays as it was written."""
    text = source.encode()  # columns count bytes
    starts = [0, *accumulate(map(len, text.splitlines(keepends=True)))]
    first, last = nodes[0], nodes[-1]
    assert last.end_lineno is not None
    assert last.end_col_offset is not None
    begin = starts[first.lineno - 1] + first.col_offset
    end = starts[last.end_lineno - 1] + last.end_col_offset
    indented = (to or "pass").replace("\n", "\n" + " " * first.col_offset)
    new = f"({to})" if isinstance(first, ast.expr) else indented
    return (text[:begin] + new.encode() + text[end:]).decode()
