"""The parsers of command lines and of the values of options, and the check of files to write.

argparse prints the message of each ArgumentTypeError after the name of the option.
"""

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from paged_kv.sizes import parse_size

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
