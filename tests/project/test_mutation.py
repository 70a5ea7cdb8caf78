"""The mutants fit the code, and the tool reports the outcome of each."""

import ast
from pathlib import Path

import pytest

from tests.mutation.checkout import Checkout
from tests.mutation.generated import draw
from tests.mutation.mutants import QUICK, SLOW, Mutant, Round, equal_mutants, listed_mutants
from tests.mutation.verdicts import Judge, Outcome
from tests.support.folders import ROOT

LISTED = listed_mutants()


def require_to_fit(mutant: Mutant) -> None:
    text = mutant.applied((ROOT / mutant.file).read_text())
    if mutant.file.endswith(".py"):
        ast.parse(text)
        change, to = (ast.dump(ast.parse(code)) for code in (mutant.change, mutant.to))
        assert change != to, mutant
    assert mutant.change != mutant.to, mutant


def test_every_mutant_of_the_lists_still_fits_the_code() -> None:
    """If this fails, the code has changed: adapt the mutant to it, or remove it with the code."""
    for mutant in [*LISTED, *equal_mutants()]:
        require_to_fit(mutant)
    assert len({mutant.name for mutant in LISTED}) == len(LISTED)


def test_all_tests_that_are_named_exist() -> None:
    named = {path for mutant in LISTED for tests in mutant.rounds for path in tests.paths}
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_what_uses_a_module_tests_it_last() -> None:
    [mutant] = draw(1, 1, "allocator/ring.py")
    places = ("tests/allocator/test_ring.py", "tests/allocator", "tests/paged_kv")
    assert mutant.rounds == tuple(Round((place,), QUICK) for place in places)


@pytest.mark.soak
def test_a_mutant_is_tried_on_a_copy_that_is_sound_again_afterwards(tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.mkdir()
    sound = "def add(a, b):\n    return a + b\n"
    (source / "sums.py").write_text(sound)
    (source / "test_sums.py").write_text(
        "import pytest\nfrom sums import add\n\n\n"
        "def test_add():\n    assert add(2, 2) == 4\n\n\n"
        "@pytest.mark.slow\ndef test_more():\n    assert add(3, 2) == 5\n"
    )
    (source / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    soak\n")
    judge = Judge(Checkout(source, copy))
    for change, to, outcome, note in (
        ("a + b", "a - b", Outcome.KILLED, "test_sums.py::test_add"),
        ("a + b", "a * b", Outcome.KILLED, "test_sums.py::test_more"),
        ("a + b", "b + a", Outcome.SURVIVED, ""),
        ("a / b", "a - b", Outcome.BROKEN, "occurs 0 times"),
    ):
        rounds = tuple(Round(("test_sums.py",), marker) for marker in (QUICK, SLOW))
        verdict = judge.judge(Mutant("a mutant", "sums.py", change, to, "add", rounds=rounds))
        assert verdict.outcome is outcome
        assert note in verdict.note
        assert (copy / "sums.py").read_text() == sound
