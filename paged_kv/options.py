"""Options as fields of frozen dataclasses, and the command lines that are made of them.

A field says once what an option takes, means and is by default. Functions get all options as one
object; a command adds the fields to its parser, and makes the object of what was given.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from inspect import cleandoc
from typing import Any, NamedTuple, TypeVar


def option(
    default: Any,
    *,
    parse: Callable[[str], Any] | None = str,
    check: Callable[[Any], Any] | None = None,
    flag: str | None = None,
    needs: str | None = None,
    group: str | None = None,
    usual: str | None = None,
    **argument: Any,
) -> Any:
    """A field of a class of `Options`, whose docstring says what it means.

    Args:
        default: its value where nothing is given.
        parse: makes its value of a text; None for an option that command lines do not have.
        check: returns a value as the object keeps it, or raises TypeError or ValueError. The
            default is not checked.
        flag: its name on command lines, with underscores; None for the name of the field.
        needs: the flag without which it means nothing.
        group: the title above it and the following options in `--help`.
        usual: what `--help` calls the default; None for the default itself.
        argument: more arguments of `add_argument`; a function is called for it with each parser.
    """
    facts: dict[str, Any] = {"parse": parse, "check": check, "flag": flag, "needs": needs}
    facts |= {"group": group, "usual": usual, "argument": argument}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=facts)
    return field(default=default, metadata=facts)


def part(default: Options, *, prefix: str = "", group: str | None = None) -> Any:
    """A field that holds options of another class, whose flags begin with the prefix."""
    return field(default=default, metadata={"prefix": prefix, "group": group})


@dataclass(frozen=True)
class Options:
    """The base of options: checks each value that is not the default.

    Raises:
        TypeError, ValueError: an option is of the wrong type or out of its range; the message says
            which.
    """

    def __post_init__(self) -> None:
        for each in fields(self):
            value, check = getattr(self, each.name), each.metadata.get("check")
            if check is not None and value is not each.default:
                object.__setattr__(self, each.name, check(value))


# An attribute and its meaning in a docstring, which goes on in deeper lines.
_ATTRIBUTE = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)

AnyOptions = TypeVar("AnyOptions", bound=Options)


class _Flag(NamedTuple):
    name: str
    field: Field[Any]
    value: Any
    meaning: str
    group: str | None


def add_options(parser: argparse.ArgumentParser, defaults: Options, *names: str) -> None:
    """Add the flags of these options to a parser.

    What is not given is not in the parsed arguments either: `parsed_options` takes the defaults.

    Args:
        defaults: their values where nothing is given.
        names: of the flags to add; without any, all.
    """
    place: argparse._ActionsContainer = parser
    for flag in _flags(defaults):
        if names and flag.name not in names:
            continue
        if flag.group is not None:
            place = parser.add_argument_group(flag.group)
        given = flag.field.metadata["argument"].items()
        argument = {name: value() if callable(value) else value for name, value in given}
        if isinstance(flag.value, bool):
            argument["action"] = "store_true"
        else:
            argument["type"] = _parser(flag.field.metadata)
        argument["help"] = _help(flag).replace("%", "%%")
        place.add_argument(_spelled(flag.name), default=argparse.SUPPRESS, **argument)


def parsed_options(arguments: argparse.Namespace, defaults: AnyOptions) -> AnyOptions:
    """The options of which `add_options` added flags with these defaults.

    Raises:
        ValueError: an option is given without the one that it needs.
    """
    given = vars(arguments)
    for flag in _flags(defaults):
        needed = flag.field.metadata["needs"]
        if flag.name in given and needed is not None and needed not in given:
            raise ValueError(
                f"{_spelled(flag.name)} is an option of {_spelled(needed)}: add "
                f"{_spelled(needed)}, or leave it out"
            )
    return _changed(defaults, given)


def _changed(defaults: AnyOptions, given: Mapping[str, Any], prefix: str = "") -> AnyOptions:
    changes = {}
    for each in fields(defaults):
        value = getattr(defaults, each.name)
        if isinstance(value, Options):
            changes[each.name] = _changed(value, given, prefix + each.metadata["prefix"])
        elif each.metadata["parse"] is not None and (name := _name(each, prefix)) in given:
            changes[each.name] = given[name]
    return replace(defaults, **changes)


def _flags(options: Options, prefix: str = "", group: str | None = None) -> Iterator[_Flag]:
    meanings = _meanings(type(options))
    for each in fields(options):
        value = getattr(options, each.name)
        group = each.metadata["group"] or group
        if isinstance(value, Options):
            yield from _flags(value, prefix + each.metadata["prefix"], group)
            group = None
        elif each.metadata["parse"] is not None:
            yield _Flag(_name(each, prefix), each, value, meanings.get(each.name, ""), group)
            group = None


def _name(each: Field[Any], prefix: str) -> str:
    return prefix + (each.metadata["flag"] or each.name)


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _meanings(kind: type[Options]) -> dict[str, str]:
    """What the docstrings of a class and its bases say of its options; Python with -OO has none."""
    texts = [cleandoc(each.__doc__ or "") for each in reversed(kind.__mro__)]
    found = [each for text in texts for each in _ATTRIBUTE.findall(text)]
    return {name: " ".join(text.split()).removesuffix(".") for name, text in found}


def _help(flag: _Flag) -> str:
    text, usual = flag.meaning, flag.field.metadata["usual"]
    if usual is None or flag.value != flag.field.default:
        if isinstance(flag.value, bool) or flag.value in (None, ()):
            return str(text)
        usual = f"{flag.value:g}" if isinstance(flag.value, float) else flag.value
    return f"{text} (default: {usual})"


def _parser(meaning: Mapping[str, Any]) -> Callable[[str], Any]:
    """What makes a value of a text, and says what is wrong with it."""

    def parsed(text: str) -> Any:
        try:
            value = meaning["parse"](text)
            if meaning["check"] is not None:
                meaning["check"](value)
        except (TypeError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return value

    return parsed
