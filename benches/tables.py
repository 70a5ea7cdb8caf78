"""Makes the tables and numbers of README.md and docs/ from the files of benches/results:
python -m benches.tables

Rewrites the text between `<!-- table: NAME -->` and `<!-- end -->`. NAME is a bench, "why",
"headlines", or "statistics", which comes from the code. A table is a Jinja template, the file
benches/templates/NAME.md, that gets the figures of its bench by their names. Within a sentence,
`<!-- number: NAME -->` is one of benches/templates/numbers.toml. The newest mlx and mlx-lm of a
bench are shown, one table for each machine. --check writes nothing, and exits with 1 if a document
is out of date.
"""

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from benches.results_file import RESULTS
from paged_kv.allocator.allocator_stats import Unit
from paged_kv.integrations.bench.report import measured_on
from paged_kv.pool.stats import COLUMNS

ROOT = RESULTS.parents[1]
TEMPLATES = Path(__file__).with_name("templates")
TABLES = {path.stem for path in TEMPLATES.glob("*.md")}
NUMBERS: dict[str, dict[str, str]] = tomllib.loads((TEMPLATES / "numbers.toml").read_text())
# Templates that get the figures of several benches, by the names of these.
DIGESTS: dict[str, tuple[str, ...]] = {
    "why": ("serving_http",),
    "headlines": (
        "serving_http",
        "serving_shared",
        "prefix_reuse",
        "serving",
        "held_bytes",
        "whole_model",
        "host_cost",
    ),
}
STATISTICS = "statistics"
_MARKED = re.compile(
    r"(?P<opening><!-- (?P<kind>table|number): (?P<name>.*?) -->\n?)"
    r"(?P<body>.*?)(?P<closing><!-- end -->)",
    re.DOTALL,
)
_OPENING, _CLOSING = re.compile("<!-- (?:table|number): "), "<!-- end -->"

# What a results file holds, and its figures.
Result = dict[str, Any]
Figures = dict[str, Any]


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
    """A number of numbers.toml, from the first of its bench's newest results.

    Raises:
        ValueError: there is no number of that name.
        FileNotFoundError: its bench has no results.
    """
    if name not in NUMBERS:
        raise ValueError(f"there is no number {name!r}: use one of {', '.join(sorted(NUMBERS))}")
    figures = newest(NUMBERS[name]["bench"], results)[0]["figures"]
    return ENVIRONMENT.from_string(NUMBERS[name]["text"]).render(figures)


def section(name: str, results: Path = RESULTS) -> str:
    """A bench's tables, each followed by a line that says what it was measured on; or a table that
    comes from several benches, or from the code.

    Raises:
        ValueError: there is no table of that name.
        FileNotFoundError: the bench has no results.
    """
    if name == STATISTICS:
        return f"\n{statistics()}\n\n"
    if name not in TABLES:
        known = ", ".join(sorted({*TABLES, STATISTICS}))
        raise ValueError(f"there is no table {name!r}: use one of {known}")
    if name in DIGESTS:
        found = {bench: newest(bench, results)[0] for bench in DIGESTS[name]}
        figures = {bench: result["figures"] for bench, result in found.items()}
        machines = dict.fromkeys(_place(result) for result in found.values())
        return f"\n{_table(name, figures)}\n\n" + "\n".join(machines) + "\n\n"
    tables = [
        f"{_table(name, result['figures'])}\n\n{_place(result)}\n"
        for result in newest(name, results)
    ]
    return "\n" + "\n".join(tables) + "\n"


def _table(name: str, figures: Figures) -> str:
    template = ENVIRONMENT.get_template(f"{name}.md")
    return template.render(figures, figures=figures).rstrip("\n")


def _place(result: Result) -> str:
    return f"*{measured_on(result)}.*"


def statistics() -> str:
    """Every number of a pool's statistics, in the order in which `paged-kv stats` shows them."""
    rows = [
        f"| {column.label or ''} | `{column.name}` | {_metric(column)} | {column.meaning} |"
        for column in sorted(COLUMNS, key=lambda each: each.unit is not Unit.HELD_BYTES)
    ]
    head = "| shown as | field of `stats()` | metric, after `paged_kv:` | means |"
    return "\n".join([head, "| --- | --- | --- | --- |", *rows])


def _metric(column: Any) -> str:
    return f"`{column.metric}{'_total' * column.is_counter}`" if column.metric else ""


def newest(name: str, results: Path) -> list[Result]:
    """A bench's results with the newest mlx and mlx-lm, in the order of their files' names.

    Raises:
        FileNotFoundError: there are none.
    """
    contents = [json.loads(path.read_text()) for path in sorted(results.glob("*.json"))]
    of_bench = [content for content in contents if content["bench"] == name]
    if not of_bench:
        raise FileNotFoundError(f"no results of {name} in {results}: run its bench")
    latest = max(map(_version, of_bench))
    return [content for content in of_bench if _version(content) == latest]


def _version(result: Result) -> list[list[int]]:
    versions = result["versions"]
    return [[int(n) for n in re.findall(r"\d+", versions[name])] for name in ("mlx", "mlx-lm")]


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _digits(number: float) -> str:
    """Three; all before the point, where there are more."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.3g} ms" if seconds < 0.1 else f"{1e3 * seconds:,.0f} ms"


def _loss(row: Figures, digits: int) -> str:
    """Of perplexity, with its error."""
    loss, error = row["loss_percent"], row["standard_error_percent"]
    return f"{loss:+.{digits}f} ± {error:.{digits}f} %"


def _gain(row: Figures) -> float:
    """Of the two rates that stand beside it."""
    return float(row["paged_tokens_per_second"] / row["mlx_lm_tokens_per_second"])


def _told(
    entries: Iterable[tuple[str, Figures]], key: str, meanings: Mapping[str, str] | None = None
) -> dict[str, list[str]]:
    """The names of entries by what each tells: the meaning of what occurs in it, or itself."""
    names: dict[str, list[str]] = {}
    for name, entry in entries:
        meant = (means for said, means in (meanings or {}).items() if said in entry[key])
        names.setdefault(next(meant, entry[key]), []).append(name)
    return names


def _longest(rows: list[Figures], page_format: str) -> str:
    """The loss of each model over the most tokens that it read."""
    own = sorted(
        (row for row in rows if row["cache"] == page_format), key=lambda row: int(row["tokens"])
    )
    losses = {row["model"]: row["loss_percent"] for row in own}
    return " and ".join(f"{loss:.2f} % ({model})" for model, loss in sorted(losses.items()))


def _at_once(loads: dict[str, Figures], what: str, *memories: str) -> str:
    """The most that writing prompts of 16,384 tokens at once adds, of what a store that writes
    everything writes or finds, in any load."""
    added = [
        load["memory"][memory]["second sight, 16,384 tokens at once"][what]
        - load["memory"][memory]["second sight"][what]
        for load in loads.values()
        for memory in memories
    ]
    return f"{100 * max(added):.0f} %"


ENVIRONMENT = Environment(
    loader=FileSystemLoader(TEMPLATES),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    autoescape=False,  # Markdown
)
ENVIRONMENT.filters |= {
    "f": format,
    "count": lambda number: f"{number:,.0f}",
    "digits": _digits,
    "percent": lambda share, digits=0: f"{share:.{digits}%}",
    "mb": lambda size: f"{size / 1e6:,.1f} MB",
    "giga": lambda number: f"{number / 1e9:,.1f} G",
    "s": lambda seconds: f"{seconds:,.1f} s",
    "ms": _milliseconds,
    "us": lambda seconds: f"{1e6 * seconds:,.1f} µs",
    "median": median,
    "loss": _loss,
    "quoted": _quoted,
    "spaced": lambda name: name.replace("_", " "),
    "rows": lambda count: "1 row" if int(count) == 1 else f"{count} rows",
    "gain": _gain,
    "by_gain": lambda rows: sorted(rows, key=_gain),
    "told": _told,
    "longest": _longest,
    "at_once": _at_once,
}
ENVIRONMENT.tests |= {
    "ending": str.endswith,
    "holds": lambda names, name: name in names,
}


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
