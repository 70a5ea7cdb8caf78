"""The list of mutants: small changes to the code, each of which some test must notice.

The files *.toml beside this one are the list, one for each part of the code. A mutant is:

    name        what is wrong then, in a few words; no two are alike
    file        what is changed, from the root of the checkout
    in          of Python: the function or class, as in "Class.method"; without it the whole file
    change      what is changed, and must be there exactly once: of Python an expression or
                statements, however they are formatted, and of other languages exact text
    to          what takes its place; "" removes it
    tests       files, or node ids of pytest, that must notice
    isa         optional: the instruction set that the tests must run with
    survives    optional: why no test can notice
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from tests.mutation import python_code

LISTS = Path(__file__).parent
CPU_KERNELS = "kernels/cpu/"


@dataclass(frozen=True)
class Mutant:
    """One change. The fields are those above; `part` names the list, and `within` is `in`."""

    part: str
    name: str
    file: str
    change: str
    to: str
    tests: tuple[str, ...]
    within: str = ""
    isa: str = ""
    survives: str = ""

    def __str__(self) -> str:
        return f"{self.part}: {self.name}"

    @property
    def needs_build(self) -> bool:
        """Whether the mutant changes the compiled CPU kernels."""
        return self.file.startswith(CPU_KERNELS)

    def applied(self, text: str) -> str:
        """The file's text after the change.

        Raises:
            ValueError: what is to be changed is not there exactly once.
        """
        try:
            if self.file.endswith(".py"):
                return python_code.changed(text, self.within, self.change, self.to)
            if (found := text.count(self.change)) != 1:
                raise ValueError(f"occurs {found} times")
        except (ValueError, SyntaxError) as error:
            raise ValueError(
                f"mutant {str(self)!r}: what it changes must be in {self.file} once, but {error}: "
                "adapt it to the code, or remove it with the code"
            ) from error
        return text.replace(self.change, self.to)


def all_mutants(lists: Path = LISTS) -> list[Mutant]:
    """The whole list; mutants that need a compiler come last."""
    mutants = [
        Mutant(
            path.stem, within=fields.pop("in", ""), **{**fields, "tests": tuple(fields["tests"])}
        )
        for path in sorted(lists.glob("*.toml"))
        for fields in tomllib.loads(path.read_text())["mutant"]
    ]
    return sorted(mutants, key=lambda mutant: mutant.needs_build)
