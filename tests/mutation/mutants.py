"""The list of mutants: small changes to the code, each of which some test must notice.

The files *.toml beside this one are the list, one for each part of the code. A mutant is:

    name        what is wrong then, in a few words; no two are alike
    file        what is changed, from the root of the checkout
    before      text that occurs exactly once in the file
    after       what takes its place
    tests       files, or node ids of pytest, that must notice
    isa         optional: the instruction set that the tests must run with
    survives    optional: why no test can notice
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

LISTS = Path(__file__).parent
CPU_KERNELS = "kernels/cpu/"


@dataclass(frozen=True)
class Mutant:
    """One change. The fields are those above; `part` names the list."""

    part: str
    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
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
            ValueError: what is to be changed does not occur exactly once.
        """
        found = text.count(self.before)
        if found != 1 or self.before == self.after:
            raise ValueError(
                f"mutant {str(self)!r}: its text must occur once in {self.file} and be changed, "
                f"but occurs {found} times: adapt it to the code, or remove it with the code"
            )
        return text.replace(self.before, self.after)


def all_mutants(lists: Path = LISTS) -> list[Mutant]:
    """The whole list; mutants that need a compiler come last."""
    mutants = [
        Mutant(path.stem, **{**fields, "tests": tuple(fields["tests"])})
        for path in sorted(lists.glob("*.toml"))
        for fields in tomllib.loads(path.read_text())["mutant"]
    ]
    return sorted(mutants, key=lambda mutant: mutant.needs_build)
