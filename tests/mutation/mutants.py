"""Mutants: small changes to the code, each of which some test must notice.

The lists *.toml beside this file name those that would hurt a user most, a file for each room:

    name        what is wrong then, in a few words; no two are alike
    file        what is changed, from the root of the checkout
    in          of Python: the function or class, as in "Class.method"; without it the whole file
    change      what is changed, and must be there exactly once: of Python an expression or
                statements, however they are formatted, and of other languages exact text
    to          what takes its place; "" removes it
    tests       files, or folders, that must notice

Those that `generated.py` draws have no list, but `equal.toml` names the ones that no test can
notice: by `file`, `in`, `change`, `to`, `nth` if it is not 0, the first - and `why`.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tests.mutation import python_code

FOLDER = Path(__file__).parent
EQUAL = FOLDER / "equal.toml"
# Quick tests notice most mutants; the slow ones run only for those that these let pass.
QUICK, SLOW = "not slow and not soak", "slow"


class Round(NamedTuple):
    """Tests that run together: files or folders, and pytest's expression of markers."""

    paths: tuple[str, ...]
    marker: str = QUICK


@dataclass(frozen=True)
class Mutant:
    """One change. The fields are those above; `within` is `in`, and `rounds` run in turn.

    Two are the same if they change the same code, wherever its lines are.
    """

    name: str = field(compare=False)
    file: str
    change: str
    to: str
    within: str = ""
    nth: int | None = None
    rounds: tuple[Round, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        return f"{self.file} {self.name}"

    @property
    def needs_build(self) -> bool:
        """Whether the mutant changes the compiled CPU kernels."""
        return self.file.startswith("kernels/cpu/") and not self.file.endswith(".py")

    def applied(self, text: str) -> str:
        """The file's text after the change.

        Raises:
            ValueError: what is to be changed is not there exactly once.
        """
        try:
            if self.file.endswith(".py"):
                return python_code.changed(text, self.within, self.change, self.to, self.nth)
            if (found := text.count(self.change)) != 1:
                raise ValueError(f"occurs {found} times")
        except (ValueError, SyntaxError) as error:
            raise ValueError(f"{self}: adapt what it changes, or remove it: {error}") from error
        return text.replace(self.change, self.to)


def listed_mutants() -> list[Mutant]:
    """Those that would hurt a user most."""
    paths = sorted(path for path in FOLDER.glob("*.toml") if path != EQUAL)
    return [_mutant(**fields) for path in paths for fields in _entries(path)]


def equal_mutants() -> list[Mutant]:
    """Generated ones that no test can notice; their name says why."""
    return [
        _mutant(name=fields.pop("why"), nth=fields.pop("nth", 0), **fields)
        for fields in _entries(EQUAL)
    ]


def _mutant(tests: tuple[str, ...] = (), **fields: Any) -> Mutant:
    rounds = tuple(Round(tuple(tests), marker) for marker in (QUICK, SLOW))
    return Mutant(within=fields.pop("in", ""), rounds=rounds, **fields)


def _entries(path: Path) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = tomllib.loads(path.read_text()).get("mutant", [])
    return entries
