"""The tables and numbers of README.md and docs/ come from results files and are up to date."""

import json
import re
from pathlib import Path

import pytest

from benches.results_file import RESULTS
from benches.tables import NUMBERS, STATISTICS, TABLES, documents, main, newest, rewritten

MARKED = "before\n<!-- table: growth -->\n{}<!-- end -->\nafter\n"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A folder with the results of a bench, measured with two versions of mlx."""
    (source, *_) = newest("growth", RESULTS)
    for mlx, tokens in (("0.32.9", 1_234), ("0.32.10", 5_678)):
        source["versions"]["mlx"] = mlx
        source["figures"]["tokens"] = tokens
        (tmp_path / f"growth-{mlx}.json").write_text(json.dumps(source))
    return tmp_path


def test_documents_are_up_to_date() -> None:
    assert main(["--check"]) == 0


def test_a_table_stands_between_its_markers_and_shows_the_newest_versions(results: Path) -> None:
    text = rewritten(MARKED.format("what was here before\n"), results)
    assert text.startswith("before\n<!-- table: growth -->\n\n|")
    assert text.endswith("*\n\n<!-- end -->\nafter\n")
    assert "5,678 tokens" in text
    assert "1,234" not in text
    assert "what was here before" not in text
    assert rewritten(text, results) == text


def test_every_table_and_number_stands_in_a_document() -> None:
    text = "".join(path.read_text() for path in documents())
    assert sorted(re.findall(r"<!-- table: (.*?) -->", text)) == sorted([*TABLES, STATISTICS])
    assert set(re.findall(r"<!-- number: (.*?) -->", text)) == NUMBERS.keys()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<!-- table: speed -->\n<!-- end -->\n", ValueError),
        ("<!-- number: speed -->1<!-- end -->", ValueError),
        ("<!-- table: growth -->\n", ValueError),
        ("<!-- end -->\n", ValueError),
        ("<!-- table: growth -->\n" + MARKED, ValueError),
        (MARKED.replace("growth", "serving"), FileNotFoundError),  # no results of that bench
    ],
)
def test_wrong_markers_and_missing_results_are_refused(
    text: str, error: type[Exception], results: Path
) -> None:
    with pytest.raises(error):
        rewritten(text, results)
