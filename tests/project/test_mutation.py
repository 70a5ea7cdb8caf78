"""The list of mutants fits the code, and the tool reports the outcome of each."""

import ast

import pytest

from tests.mutation.checkout import Checkout, Run
from tests.mutation.mutants import Mutant, all_mutants
from tests.mutation.verdicts import Judge, Outcome, verdict_of
from tests.support.folders import ROOT

MUTANTS = all_mutants()


@pytest.mark.parametrize("part", sorted({mutant.part for mutant in MUTANTS}))
def test_every_mutant_still_fits_the_code(part: str) -> None:
    """If this fails, the code has changed: adapt the mutant to it, or remove it with the code."""
    for mutant in [mutant for mutant in MUTANTS if mutant.part == part]:
        changed = mutant.applied((ROOT / mutant.file).read_text())
        if mutant.file.endswith(".py"):
            ast.parse(changed)


def test_every_test_that_is_named_exists() -> None:
    for mutant in MUTANTS:
        assert mutant.tests, mutant
        for named in mutant.tests:
            file, _, test = named.partition("::")
            text = (ROOT / file).read_text()
            assert f"def {test.partition('[')[0]}" in text, f"{mutant}: {named}"


def test_no_two_mutants_have_one_name() -> None:
    names = [str(mutant) for mutant in MUTANTS]
    assert len(set(names)) == len(names)


def mutant_of(before: str, after: str, survives: str = "", isa: str = "") -> Mutant:
    return Mutant("sums", "a mutant", "sums.py", before, after, ("test_sums.py",), isa, survives)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A project of one function."""
    source = tmp_path_factory.mktemp("source")
    (source / "sums.py").write_text("def add(a, b):\n    return a + b\n")
    (source / "test_sums.py").write_text(
        "import pytest\nfrom sums import add\n\n\n"
        "def test_add():\n    assert add(2, 2) == 4\n\n\n"
        "@pytest.mark.slow\ndef test_more():\n    assert add(3, 2) == 5\n"
    )
    (source / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    return Checkout(source, tmp_path_factory.mktemp("copy"))


@pytest.mark.slow
def test_a_mutant_is_tried_on_a_copy_that_is_sound_again_afterwards(checkout: Checkout) -> None:
    sound = (checkout.root / "sums.py").read_text()
    judge = Judge(checkout, [])
    verdict = judge.judge(mutant_of("a + b", "a - b"))
    assert (verdict.outcome, verdict.note) == (Outcome.KILLED, "test_sums.py::test_add")
    assert (checkout.root / "sums.py").read_text() == sound
    verdict = judge.judge(mutant_of("a + b", "a * b"))
    assert (verdict.outcome, verdict.note) == (Outcome.KILLED, "test_sums.py::test_more")
    verdict = judge.judge(mutant_of("a + b", "b + a"))
    assert verdict.outcome is Outcome.SURVIVED
    verdict = judge.judge(mutant_of("a / b", "a - b"))
    assert verdict.outcome is Outcome.BROKEN
    assert "occurs 0 times" in verdict.note


@pytest.mark.parametrize(
    ("status", "survives", "outcome", "note"),
    [
        (0, "", Outcome.SURVIVED, ""),
        (0, "it is the same", Outcome.EXCUSED, "it is the same"),
        (1, "", Outcome.KILLED, "test_a.py::test_b"),
        (1, "it is the same", Outcome.BROKEN, "the list says that it survives"),
        (2, "", Outcome.BROKEN, "pytest cannot run"),
        (-11, "", Outcome.KILLED, "signal 11"),
        (None, "", Outcome.KILLED, "it hangs"),
    ],
)
def test_what_a_run_says(status: int | None, survives: str, outcome: Outcome, note: str) -> None:
    mutant = mutant_of("a", "b", survives)
    verdict = verdict_of(Run(status, "FAILED test_a.py::test_b - no\n", 1.0), mutant)
    assert verdict.outcome is outcome
    assert note in verdict.note
    assert verdict.is_fault == (outcome in (Outcome.SURVIVED, Outcome.BROKEN))


def test_where_its_tests_cannot_run_a_mutant_is_skipped(checkout: Checkout) -> None:
    verdict = Judge(checkout, ["generic"]).judge(mutant_of("a + b", "a - b", isa="vax"))
    assert verdict.outcome is Outcome.SKIPPED
