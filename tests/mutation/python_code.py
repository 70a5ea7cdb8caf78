"""Changes Python code by its syntax: neither its place in a function nor its format matters."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from textwrap import dedent, indent
from typing import NamedTuple, TypeAlias

Definition: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
# What says how a node is written or used, and not what it is.
_NOT_COMPARED = {"ctx", "kind", "type_comment", "type_ignores"}


class _Place(NamedTuple):
    """Nodes in a field of their parent; `start` counts only if the field is a list."""

    definition: Definition | ast.Module
    parent: ast.AST
    field: str
    start: int


def changed(source: str, name: str, change: str, to: str) -> str:
    """A source in which code of one definition is replaced.

    Args:
        name: of a function or class, as in "Class.method"; "" for the whole source.
        change: an expression or statements that must be there once. Comments, line breaks, quotes
            and docstrings do not count.
        to: what takes its place; "" removes statements, a decorator or an item of a list.

    Raises:
        ValueError: there is no such definition, or the code is not there exactly once.
        SyntaxError: `change` or `to` is no Python.
    """
    tree = ast.parse(source)
    old, new = (ast.parse(dedent(code)).body for code in (change, to))
    forms: list[Sequence[ast.AST]] = [old]
    replacements: Sequence[ast.AST] = new
    if (expression := _expression(old)) and (not new or _expression(new)):
        forms = [[expression]] if new else [old, [expression]]
        replacements = [node.value for node in new if isinstance(node, ast.Expr)]
    places = [
        (place, len(form))
        for definition in _definitions(tree, name)
        for form in forms
        for place in _places(definition, form, only_lists=len(replacements) != 1)
    ]
    if len(places) != 1:
        raise ValueError(f"occurs {len(places)} times in {name or 'the file'}")
    [(place, count)] = places
    start = _start(place.definition)
    _replace(place, count, replacements)
    return _with_definition(source, start, place.definition)


def _expression(nodes: list[ast.stmt]) -> ast.expr | None:
    return nodes[0].value if len(nodes) == 1 and isinstance(nodes[0], ast.Expr) else None


def _definitions(tree: ast.Module, name: str) -> list[Definition | ast.Module]:
    """Those with a name: of a property there may be several."""
    found: list[Definition | ast.Module] = [tree]
    for part in name.split(".") if name else []:
        found = [inner for outer in found for inner in _inner(outer) if inner.name == part]
    return found


def _inner(node: ast.AST) -> Iterator[Definition]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            yield child
        else:
            yield from _inner(child)


def _places(
    definition: Definition | ast.Module, nodes: Sequence[ast.AST], only_lists: bool
) -> Iterator[_Place]:
    for parent in ast.walk(definition):
        for field, value in ast.iter_fields(parent):
            if only_lists and not isinstance(value, list):
                continue
            siblings = value if isinstance(value, list) else [value]
            for start in range(len(siblings) - len(nodes) + 1):
                if _is_same(siblings[start : start + len(nodes)], list(nodes)):
                    yield _Place(definition, parent, field, start)


def _is_same(one: object, other: object) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, ast.AST):
        return all(
            _is_same(_value(one, field), _value(other, field))
            for field in one._fields
            if field not in _NOT_COMPARED
        )
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return one == other


def _value(node: object, field: str) -> object:
    """A field of a node, without a docstring."""
    value = getattr(node, field)
    has_docstring = (
        field == "body"
        and isinstance(node, Definition | ast.Module)
        and ast.get_docstring(node, clean=False) is not None
    )
    return value[1:] if has_docstring else value


def _replace(place: _Place, count: int, nodes: Sequence[ast.AST]) -> None:
    siblings = getattr(place.parent, place.field)
    if not isinstance(siblings, list):
        setattr(place.parent, place.field, nodes[0])
        return
    siblings[place.start : place.start + count] = nodes
    if place.field == "body" and not siblings:
        siblings.append(ast.Pass())


def _start(definition: Definition | ast.Module) -> int:
    """The first line of a definition, from 0."""
    if isinstance(definition, ast.Module):
        return 0
    return min(node.lineno for node in (definition, *definition.decorator_list)) - 1


def _with_definition(source: str, start: int, definition: Definition | ast.Module) -> str:
    """The source with a definition as it has become; all else stays as it was written."""
    text = ast.unparse(definition)
    if isinstance(definition, ast.Module):
        return f"{text}\n"
    lines = source.split("\n")
    lines[start : definition.end_lineno] = [indent(text, " " * definition.col_offset)]
    return "\n".join(lines)
