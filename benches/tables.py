"""Makes the tables and numbers of README.md and docs/ from the files of benches/results:
python -m benches.tables

Rewrites the text between `<!-- table: NAME -->` and `<!-- end -->`. NAME is a bench, "why",
"headlines", or "statistics", which comes from the code. Within a sentence,
`<!-- number: NAME -->` is one of `benches.prose_numbers`. The newest mlx and mlx-lm of a bench are
shown, one table for each machine. --check writes nothing, and exits with 1 if a document is out of
date.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from benches import memory_tables, quality_tables, reuse_tables, speed_tables, structured_tables
from benches.prose_numbers import DIGESTS, NUMBERS
from benches.results_file import RESULTS
from paged_kv.integrations.bench.report import measured_on

TABLES = (
    speed_tables.TABLES | reuse_tables.TABLES | quality_tables.TABLES | structured_tables.TABLES
)
# Those that need no results.
OF_CODE = {"statistics": memory_tables.statistics}
ROOT = RESULTS.parents[1]
_MARKED = re.compile(
    r"(?P<opening><!-- (?P<kind>table|number): (?P<name>.*?) -->\n?)"
    r"(?P<body>.*?)(?P<closing><!-- end -->)",
    re.DOTALL,
)
_OPENING, _CLOSING = re.compile("<!-- (?:table|number): "), "<!-- end -->"

# What a results file holds.
Result = dict[str, Any]


def rewritten(text: str, results: Path = RESULTS) -> str:
    """The text with every marked part made anew from the newest results.

    Raises:
        ValueError: a marker has no end, or names no table or number.
        FileNotFoundError: a table's bench has no results.
    """
    closed = [match for match in _MARKED.finditer(text) if not _OPENING.search(match["body"])]
    if not len(closed) == len(_OPENING.findall(text)) == text.count(_CLOSING):
        raise ValueError(f"every '<!-- table: ' or '<!-- number: ' needs an end {_CLOSING!r}")

    def made(match: re.Match[str]) -> str:
        make = section if match["kind"] == "table" else number
        return match["opening"] + make(match["name"], results) + match["closing"]

    return _MARKED.sub(made, text)


def number(name: str, results: Path = RESULTS) -> str:
    """A number of `benches.prose_numbers`, from the first of its bench's newest results.

    Raises:
        ValueError: there is no number of that name.
        FileNotFoundError: its bench has no results.
    """
    if name not in NUMBERS:
        raise ValueError(f"there is no number {name!r}: use one of {', '.join(sorted(NUMBERS))}")
    bench, told = NUMBERS[name]
    return told(newest(bench, results)[0]["figures"])


def section(name: str, results: Path = RESULTS) -> str:
    """A bench's tables, each followed by a line that says what it was measured on; or a table that
    comes from the code.

    Raises:
        ValueError: there is no table of that name.
        FileNotFoundError: the bench has no results.
    """
    if name in OF_CODE:
        return f"\n{OF_CODE[name]()}\n\n"
    if name in DIGESTS:
        return _digest(name, results)
    if name not in TABLES:
        known = ", ".join(sorted({*TABLES, *DIGESTS, *OF_CODE}))
        raise ValueError(f"there is no table {name!r}: use one of {known}")
    tables = [
        f"{TABLES[name](result['figures'])}\n\n{_place(result)}\n"
        for result in newest(name, results)
    ]
    return "\n" + "\n".join(tables) + "\n"


def _digest(name: str, results: Path) -> str:
    """What is made of several benches, and the machines that they ran on."""
    digest, benches = DIGESTS[name]
    found = {bench: newest(bench, results)[0] for bench in benches}
    machines = dict.fromkeys(_place(result) for result in found.values())
    text = digest({bench: result["figures"] for bench, result in found.items()})
    return f"\n{text}\n\n" + "\n".join(machines) + "\n\n"


def _place(result: Result) -> str:
    return f"*{measured_on(result)}.*"


def newest(name: str, results: Path) -> list[Result]:
    """A bench's results with the newest mlx and mlx-lm, in the order of their files' names.

    Raises:
        FileNotFoundError: there are none.
    """
    contents = [json.loads(path.read_text()) for path in sorted(results.glob("*.json"))]
    of_bench = [content for content in contents if content["bench"] == name]
    if not of_bench:
        raise FileNotFoundError(f"no results of {name} in {results}: run python -m benches.{name}")
    latest = max(map(_version, of_bench))
    return [content for content in of_bench if _version(content) == latest]


def _version(result: Result) -> list[list[int]]:
    versions = result["versions"]
    return [[int(n) for n in re.findall(r"\d+", versions[name])] for name in ("mlx", "mlx-lm")]


def documents(root: Path = ROOT) -> list[Path]:
    """The files that may hold tables."""
    return [root / "README.md", *sorted(root.glob("docs/*.md"))]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the tables from benches/results.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if outdated")
    check = parser.parse_args(arguments).check
    status = 0
    for path in documents():
        text = path.read_text(encoding="utf-8")
        new = rewritten(text)
        if check and new != text:
            print(f"{path.name} is not up to date: run python -m benches.tables", file=sys.stderr)
            status = 1
        elif not check:
            path.write_text(new, encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
