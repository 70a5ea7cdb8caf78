"""The list of mutants fits the code, and the tool reports the outcome of each."""

import ast

import pytest

from tests.mutation.checkout import Checkout, Run
from tests.mutation.mutants import Mutant, all_mutants
from tests.mutation.python_code import changed
from tests.mutation.verdicts import Judge, Outcome, verdict_of
from tests.support.folders import ROOT

MUTANTS = all_mutants()


@pytest.mark.parametrize("part", sorted({mutant.part for mutant in MUTANTS}))
def test_every_mutant_still_fits_the_code(part: str) -> None:
    """If this fails, the code has changed: adapt the mutant to it, or remove it with the code."""
    for mutant in [mutant for mutant in MUTANTS if mutant.part == part]:
        assert mutant.change != mutant.to, mutant
        text = mutant.applied((ROOT / mutant.file).read_text())
        if mutant.file.endswith(".py"):
            ast.parse(text)


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


CODE = '''
def twice(number):
    return number * 2


class Tally:
    """Counts."""

    @property
    @cached
    def total(self):
        """The sum."""
        # Of all.
        if self.kept is not None:
            return self.kept
        self.kept = sum(
            self.parts['a'],  # the first
            self.parts['b'],
        )
        self.note()
        return self.kept * 2
'''


@pytest.mark.parametrize(
    ("within", "change", "to", "result"),
    [
        ("twice", "number * 2", "number", "return number\n"),
        ("Tally.total", "self.kept * 2", "-(self.kept * 2)", "return -(self.kept * 2)"),
        ("Tally.total", 'sum(self.parts["a"], self.parts["b"])', "0", "self.kept = 0\n"),
        ("Tally.total", "self.note()", "", "self.parts['b'])\n        return"),
        ("Tally.total", "return self.kept", "", "is not None:\n            pass\n"),
        (
            "Tally.total",
            "self.note()\nreturn self.kept * 2",
            "return 0",
            "['b'])\n        return 0",
        ),
        ("Tally.total", "cached", "", "    @property\n    def total"),
        ("Tally", "property", "cached", "@cached\n    @cached"),
        ("", "def twice(number):\n    return number * 2", "twice = abs", "\ntwice = abs\n"),
    ],
)
def test_python_is_changed_by_its_syntax(within: str, change: str, to: str, result: str) -> None:
    text = changed(CODE, within, change, to)
    ast.parse(text)
    assert result in f"\n{text}"


@pytest.mark.parametrize(
    ("within", "change", "fault"),
    [
        ("", "2", "occurs 2 times in the file"),
        ("Tally.total", "self.kept", "occurs 4 times in Tally.total"),
        ("Tally.total", "self.kept = sum()", "occurs 0 times in Tally.total"),
        ("twice", "self.note()", "occurs 0 times in twice"),
        ("Tally.sum", "self.note()", "occurs 0 times in Tally.sum"),
    ],
)
def test_python_that_is_not_there_once_is_not_changed(within: str, change: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        changed(CODE, within, change, "pass" if "=" in change else "0")


def test_code_of_other_languages_is_changed_by_its_text() -> None:
    mutant = Mutant("sums", "a mutant", "sums.h", "a + b", "a - b", ("test_sums.py",))
    assert mutant.applied("int c = a + b;") == "int c = a - b;"
    with pytest.raises(ValueError, match="occurs 0 times"):
        mutant.applied("int c = a  + b;")


def mutant_of(change: str, to: str, survives: str = "", isa: str = "") -> Mutant:
    return Mutant(
        "sums", "a mutant", "sums.py", change, to, ("test_sums.py",), "add", isa, survives
    )


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
