"""Makes the tables and numbers of README.md and docs/ from the files of benches/results:
python -m benches.tables

Rewrites the text between `<!-- table: NAME -->` and `<!-- end -->`. NAME is a bench, "why" or
"headlines". Within a sentence, `<!-- number: NAME -->` is one of `benches.prose_numbers`. The
newest mlx and mlx-lm of a bench are shown, one table for each machine. --check writes nothing, and
exits with 1 if a document is out of date.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benches.family_tables import model_families, vision_families
from benches.headline_tables import DIGESTS
from benches.prose_numbers import NUMBERS
from benches.quality_tables import (
    copying,
    held_bytes,
    page_codecs,
    quantised_quality,
    step_lengths,
)
from benches.results_file import RESULTS
from benches.speed_tables import (
    cpu_kernels,
    distributed,
    host_cost,
    latent_attention,
    prefix_reuse,
    publishing,
    quantised_kernels,
    rings,
    speculation,
    whole_model,
)
from benches.store_tables import page_store, page_store_faults
from benches.table_cells import (
    count,
    megabytes,
    micros,
    millis,
    ratio,
    seconds,
    spaced,
    table,
)

ROOT = RESULTS.parents[1]
_MARKED = re.compile(
    r"(?P<opening><!-- (?P<kind>table|number): (?P<name>.*?) -->\n?)"
    r"(?P<body>.*?)(?P<closing><!-- end -->)",
    re.DOTALL,
)
_OPENING, _CLOSING = re.compile("<!-- (?:table|number): "), "<!-- end -->"

# What a results file holds, and its "figures".
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
    """A bench's tables, each followed by a line that says what it was measured on.

    Raises:
        ValueError: there is no table of that name.
        FileNotFoundError: the bench has no results.
    """
    if name in DIGESTS:
        return _digest(name, results)
    if name not in TABLES:
        known = ", ".join(sorted({*TABLES, *DIGESTS}))
        raise ValueError(f"there is no table {name!r}: use one of {known}")
    tables = [
        f"{TABLES[name](result['figures'])}\n\n{measured_on(result)}\n"
        for result in newest(name, results)
    ]
    return "\n" + "\n".join(tables) + "\n"


def _digest(name: str, results: Path) -> str:
    """What is made of several benches, and the machines that they ran on."""
    digest, benches = DIGESTS[name]
    found = {bench: newest(bench, results)[0] for bench in benches}
    machines = dict.fromkeys(measured_on(result) for result in found.values())
    text = digest({bench: result["figures"] for bench, result in found.items()})
    return f"\n{text}\n\n" + "\n".join(machines) + "\n\n"


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


def measured_on(result: Result) -> str:
    machine = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    memory = f"{machine['memory_bytes'] / 2**30:.0f} GiB"
    where = f"{machine['chip']}, {machine['cores']}, {memory}, {machine['system']}"
    return f"*{where}; {versions}.*"


def allocator(figures: Figures) -> str:
    """Rates and latencies of the block allocator."""
    targets = figures["targets"]
    rates = {
        "pairs_per_second": "one block allocated and released",
        "bulk_allocated_blocks_per_second": "blocks allocated in one call",
        "bulk_released_blocks_per_second": "blocks released in one call",
    }
    rows = [
        (label, f"{figures[name]:,} a second", f"{targets[name]:,}")
        for name, label in rates.items()
    ]
    latencies = " / ".join(
        micros(figures[f"pair_{percentile}_ns"]) for percentile in ("p50", "p99", "p99.9")
    )
    rows.append(("one block allocated and released, p50 / p99 / p99.9", latencies, ""))
    forks = [name for name in figures if name.startswith("fork_of_")]
    rows += [
        (spaced(name.removesuffix("_ns")), micros(figures[name]), "") for name in sorted(forks)
    ]
    used, free = f"{figures['blocks_used']:,}", f"{figures['blocks_free']:,}"
    return table((f"{used} blocks in use, {free} free", "measured", "target"), rows)


def growth(figures: Figures) -> str:
    """What growing to many tokens costs in memory and time, for each way of growing."""
    head = ("held", "peak above held", "copied to grow", "median step", "longest step")
    rows: list[tuple[str, ...]] = []
    for phase, step in figures["tokens_per_step"].items():
        rows += [
            (
                f"{phase}, {step:,} a step: {cache}",
                megabytes(row["held_bytes"]),
                megabytes(row["peak_above_held_bytes"]),
                megabytes(row["copied_for_growth_bytes"]),
                millis(row["median_step_seconds"]),
                millis(row["max_step_seconds"]),
            )
            for cache, row in figures[phase].items()
        ]
    return table((f"{figures['tokens']:,} tokens", *head), rows)


def batch_operations(figures: Figures) -> str:
    """Operations on batches and the write behind each, on mlx-lm's caches and on pages."""
    head = ("mlx-lm", "pages", "mlx-lm / pages", "new in mlx-lm", "new in pages", "blocks copied")
    rows = []
    for operation, result in figures["operations"].items():
        for phase, label in (("operation", operation), ("next_write", "its next token")):
            stock, paged = result["mlx_lm"][phase], result["paged"][phase]
            rows.append(
                (
                    label,
                    millis(stock["seconds"]),
                    millis(paged["seconds"]),
                    ratio(result["ratios"][phase]["seconds"]),
                    megabytes(stock["new_bytes"]),
                    megabytes(paged["new_bytes"]),
                    f"{paged['blocks_copied_change']:.0f} of {paged['blocks_used']:.0f}",
                )
            )
    return table(
        (f"{len(figures['lengths'])} rows of up to {figures['tokens']:,} tokens", *head), rows
    )


def serving(figures: Figures) -> str:
    """One load on mlx-lm's caches and on pages."""
    stock, paged = figures["mlx_lm"], figures["paged"]
    names = {
        "wall_seconds": ("wall time", seconds),
        "prompt_tokens_per_second": ("prompt tokens a second", count),
        "generation_tokens_per_second": ("generated tokens a second", count),
        "all_tokens_per_second": ("all tokens over wall time, a second", count),
        "peak_memory_bytes": ("peak memory, weights included", megabytes),
    }
    rows: list[tuple[str, ...]] = [
        (label, show(stock[name]), show(paged[name])) for name, (label, show) in names.items()
    ]
    kv_bytes = paged["peak_kv_bytes"]
    in_pages = f"{megabytes(kv_bytes['active'])} in use, {megabytes(kv_bytes['mapped'])} mapped"
    rows.append(("peak of keys and values", megabytes(stock["peak_kv_bytes"]["nbytes"]), in_pages))
    held = [megabytes(run["peak_tokens_held"] * figures["token_bytes"]) for run in (stock, paged)]
    rows.append(("what the tokens themselves need", *held))
    load = f"{figures['requests']} requests, {figures['model']} in {figures['dtype']}"
    equal = figures["requests_with_equal_tokens_in_all_runs"]
    return (
        table((load, "mlx-lm", f"pages, {figures['backend']} backend"), rows)
        + f"\n\nTokens are equal in {equal} of {figures['requests']} requests."
    )


def serving_http(figures: Figures) -> str:
    """Two servers under one load."""
    servers = [figures["mlx_lm"], figures["paged"]]
    rates = [count(each["tokens_per_second"]) for each in servers]
    rows: list[tuple[str, ...]] = [("generated tokens a second, all clients", *rates)]
    for name, label in (
        ("first_token_seconds", "first token"),
        ("per_token_seconds", "per token"),
        ("whole_seconds", "whole answer"),
    ):
        for part in ("p50", "p95", "p99"):
            times = [millis(each[name][part]) for each in servers]
            rows.append((f"{label}, {part}", *times))
    load = f"{figures['requests']} requests of {figures['clients']} clients, {figures['model']} in "
    return (
        table((load + figures["dtype"], "mlx_lm.server", "paged-kv server"), rows)
        + f"\n\nTexts are equal in {figures['equal_texts']} of {figures['requests']} requests."
    )


def server_soak(figures: Figures) -> str:
    """What a server held early and at the end of a soak, and what its clients counted."""
    first, last, truth, told = (figures[name] for name in ("first", "last", "truth", "counted"))
    rows = [
        ("resident memory", megabytes(first["resident_bytes"]), megabytes(last["resident_bytes"])),
        ("open files", count(first["files"]), count(last["files"])),
        ("threads", count(first["threads"]), count(last["threads"])),
    ]
    behaviours = ", ".join(f"{name} {n}" for name, n in sorted(truth["behaviours"].items()))
    return (
        table(("idle server", "after 100 requests", f"after {count(figures['requests'])}"), rows)
        + f"\n\nOf {count(sum(truth['kinds'].values()))} answers that were read, "
        f"{len(truth['wrong'])} were wrong. /metrics differed from what the clients counted in "
        f"{len(figures['differences'])} numbers, and {megabytes(told['kv_active_bytes'])} of pages "
        f"were in use at the end. Sequences were preempted "
        f"{count(told['num_preemptions_total'])} times. "
        f"{megabytes(told['store_written_bytes_total'])} were written to the store, which held "
        f"{megabytes(figures['stored_bytes'])} of the {megabytes(figures['store_limit_bytes'])} "
        f"allowed at the end. What the clients did: {behaviours}."
    )


def admission(figures: Figures) -> str:
    """Two policies of admission on the same arrivals."""
    loads = {
        "short answers, max_tokens 1,900": figures["short_answers"]["1900"],
        "short answers, max_tokens 512": figures["short_answers"]["512"],
        "answers of max_tokens, 512": figures["answers_of_max_tokens"],
    }
    rows = []
    for name, load in loads.items():
        runs = [load[policy][-1] for policy in ("reserve", "optimistic")]
        means = [f"{run['running_mean']:.1f}" for run in runs]
        speeds = [ratio(load["speed_ratio"]), count(runs[1]["preemptions"])]
        rows.append((f"{load['requests']} requests, {name}", *means, *speeds))
    loads_wrong = sum(load["requests_wrong"] for load in loads.values())
    head = ("running, reserve", "running, optimistic", "times the tokens a second", "preemptions")
    pool = f"{figures['model']} in {figures['dtype']}, {megabytes(figures['pool_bytes'])} of pages"
    return table((pool, *head), rows) + f"\n\nRequests with other tokens: {loads_wrong}."


TABLES: dict[str, Callable[[Figures], str]] = {
    "allocator": allocator,
    "growth": growth,
    "batch_operations": batch_operations,
    "admission": admission,
    "serving": serving,
    "serving_http": serving_http,
    "server_soak": server_soak,
    "cpu_kernels": cpu_kernels,
    "host_cost": host_cost,
    "whole_model": whole_model,
    "speculation": speculation,
    "rings": rings,
    "prefix_reuse": prefix_reuse,
    "publishing": publishing,
    "latent_attention": latent_attention,
    "distributed": distributed,
    "quantised_kernels": quantised_kernels,
    "page_codecs": page_codecs,
    "held_bytes": held_bytes,
    "quantised_quality": quantised_quality,
    "copying": copying,
    "step_lengths": step_lengths,
    "page_store": page_store,
    "page_store_faults": page_store_faults,
    "model_families": model_families,
    "vision_families": vision_families,
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
