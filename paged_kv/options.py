"""Options as fields of frozen dataclasses, and the command lines that are made of them.

A field says once what an option takes, means and is by default. Functions get all options as one
object; a command adds the fields to its parser, and makes the object of what was given. The parsers
of values, and the options of commands that load a model, are here too. argparse prints the message
of each ArgumentTypeError after the name of the option.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from inspect import cleandoc
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from paged_kv.checks import parse_size


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


# About 11 days: longer than any use, and short enough for the system's sleep.
MOST_SECONDS = 1e6


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with an option, and in another one where to look."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n`{self.prog} --help` lists the options\n")


def examples(*commands: str) -> dict[str, Any]:
    """Arguments of a parser that show commands below its options."""
    return {
        "epilog": "\n".join(["examples:", *(f"  {command}" for command in commands)]),
        "formatter_class": _Wrapped,
    }


class _Wrapped(argparse.HelpFormatter):
    """Wraps descriptions, but not the lines of examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("examples:"):
            return text
        return super()._fill_text(text, width, indent)


def _whole(meaning: str, *, least: int, most: float = math.inf) -> Callable[[str], int]:
    """The parser of the integers in a range; errors call them by their meaning."""

    def parsed(text: str) -> int:
        # int() raises above 4,300 digits; no option takes a number near 100 digits.
        if text.isdecimal() and len(text) < 100 and least <= int(text) <= most:
            return int(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not {meaning}")

    return parsed


def _real(meaning: str, is_one: Callable[[float], bool]) -> Callable[[str], float]:
    """The parser of the numbers for which `is_one` is true; errors call them by their meaning."""

    def parsed(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan  # which is in no range
        if is_one(number):
            return number
        raise argparse.ArgumentTypeError(f"{text!r} is not {meaning}")

    return parsed


positive = _whole("a positive integer, such as 8", least=1)
count = _whole("an integer from 0 on, such as 8", least=0)
seed = _whole("an integer from 0 to 2^64 - 1", least=0, most=(1 << 64) - 1)
seconds = _real(
    f"a number of seconds above 0, up to {MOST_SECONDS:,.0f}, such as 0.5",
    lambda number: 0 < number <= MOST_SECONDS,
)
duration = _real(
    f"a number of seconds, up to {MOST_SECONDS:,.0f}, such as 60",
    lambda number: 0 <= number <= MOST_SECONDS,
)
temperature = _real("a temperature, such as 0 or 0.7", lambda number: 0 <= number < math.inf)
share = _real("a share between 0 and 1, such as 0.5", lambda number: 0 <= number <= 1)


def budget(text: str) -> int | str:
    """Bytes for pages, or "auto"."""
    return text if text == "auto" else parse_size(text)


def name(text: str) -> str:
    """A name that is not empty."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty: give a name, or leave the option out")
    return text


def path(text: str) -> Path:
    """The path of a file or folder; "~" is the user's home."""
    return Path(name(text)).expanduser()


def require_writable(file: Path) -> None:
    """Check that a file can be written, and leave it as it is.

    Raises:
        FileNotFoundError: its folder is not there.
        OSError: it is a folder, or may not be written.
    """
    if not file.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {file.parent} for {file.name}: make it first")
    if file.is_dir():
        raise IsADirectoryError(f"{file} is a folder: name a file to write")
    is_new = not file.exists()
    if not is_new and not file.is_file():
        return  # To open and close a pipe would end it for its reader.
    try:
        file.open("ab").close()
    except OSError as error:
        raise type(error)(
            f"{file} cannot be written ({error.strerror}): name a file that can"
        ) from None
    if is_new:
        file.unlink()


class PriorityRange(NamedTuple):
    """The priorities that a client may give its requests; lower ones begin sooner."""

    least: int
    most: int


def priorities(text: str) -> PriorityRange:
    """A range such as `-10:100`, from the command line or a file of keys.

    Raises:
        ValueError: the text is none.
    """
    if found := re.fullmatch(r"(-?[0-9]{1,9}):(-?[0-9]{1,9})", text):
        least, most = int(found[1]), int(found[2])
        if least <= 0 <= most:
            return PriorityRange(least, most)
    raise ValueError(f"LOW:HIGH is needed, with 0 within, got {text!r}")


# Where a draft model can be named: prompt look-up; the prediction head that comes with the model;
# the same if there is one, and else no drafts.
NGRAM, OWN_HEAD, AUTO_HEAD = "ngram", "head", "auto"
NO_DRAFT_MODEL = frozenset({None, NGRAM, OWN_HEAD, AUTO_HEAD})

# The embedded model, where a command takes the name of a model.
EMBEDDED = "stdlib-llama"

# The Hub takes no name that begins with a dot or a dash: ./model is a folder.
_REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def named_model(text: str) -> str:
    """The folder or repository that a text names: that of the embedded model for its name, unless
    there is a folder of this name here; any other name as it is."""
    return embedded_model() if text == EMBEDDED and not Path(text).exists() else name(text)


def require_model(option: str, name: str) -> None:
    """Check that a name, given by an option, may be a model: mlx-lm takes a missing folder for a
    repository.

    Raises:
        FileNotFoundError: the name is neither a folder nor of the form of a repository, or the
            folder lacks files of a model.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if _REPOSITORY.fullmatch(name):
            return
        raise FileNotFoundError(
            f"there is no folder {name!r}: give {option} the folder of a model, or a Hugging Face "
            "repository such as mlx-community/Llama-3.2-1B-Instruct-4bit"
        )
    for pattern, meaning in (("config.json", "configuration"), ("*.safetensors", "weights")):
        if not any(folder.glob(pattern)):
            raise FileNotFoundError(
                f"the folder {name!r} holds no {meaning} ({pattern}): give {option} a complete "
                "folder, as a download or `mlx_lm.convert` makes it"
            )


def not_loaded(option: str, name: str, error: BaseException) -> ValueError:
    """What to raise for an error of mlx-lm, transformers or the Hub, which are of many types."""
    said = " ".join(str(error).split()).rstrip(".")
    return ValueError(
        f"{option} {name} cannot be loaded: {type(error).__name__}: {said}: {_remedy(said)}"
    )


def _remedy(said: str) -> str:
    if re.search(r"[Mm]odel type .* not supported", said):
        return "a newer mlx-lm may know it (pip install --upgrade mlx-lm), or choose another model"
    if "Hub" in said or "Repository" in said:
        return "check its name and your network, or name a folder"
    return "check that its files are complete, or download them again"


@dataclass(frozen=True)
class ModelOptions(Options):
    """A model, what drafts for it, and the numbers that both compute with.

    Attributes:
        model: folder or Hugging Face repository of a model; stdlib-llama is a small one in this
            package, which writes text that looks like Python.
        draft_model: a smaller model with the same vocabulary, or a prediction head of the model,
            which drafts tokens for all prompts; or head, the one that comes with the model; or
            auto, the same if there is one; or ngram, which drafts what followed the same tokens
            earlier. Nothing is drafted where it is slower.
        dtype: convert the model's numbers to this format, and compute in it. On a CPU float32 is
            the quickest where OpenBLAS is installed.
    """

    model: str | None = option(None, parse=named_model)
    draft_model: str | None = option(None, parse=named_model, usual="no drafts")
    dtype: str | None = option(
        None, usual="the model's own", choices=["float32", "float16", "bfloat16"]
    )

    def require_models(self) -> None:
        """Raise an OSError if a model is not there, or its folder is incomplete."""
        if self.model is not None:
            require_model("--model", self.model)
        if self.draft_model not in NO_DRAFT_MODEL:
            require_model("--draft-model", str(self.draft_model))


def embedded_model() -> str:
    """The folder of `stdlib-llama`, for `mlx_lm.load`: a llama of 5.5 million numbers in bfloat16
    that writes what looks like Python, so that examples run without a download."""
    return str(Path(__file__).with_name("models") / EMBEDDED)
