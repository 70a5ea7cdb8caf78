"""The command `paged-kv trace`: replays a recorded trace, or synthesizes one."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from paged_kv.commands.arguments import length_range, path, positive, share
from paged_kv.commands.cache_options import examples
from paged_kv.commands.output_files import removed_unless_complete
from paged_kv.sizes import counted, format_size, parse_size
from paged_kv.trace.admission_replay import BATCHES, AdmissionOutcome, replay_admission
from paged_kv.trace.recorder import PAGE_SIZE
from paged_kv.trace.replay import Outcome, Parameters, Replay, read_trace
from paged_kv.trace.requests import TracedLoad

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Traces of block allocations. Any process that uses this library records one to the file that
PAGED_KV_TRACE names. `replay` runs it through the allocator again, with another budget or page
size, or without prefix reuse; `synthesize` makes one up. Neither needs a model or memory: only the
bookkeeping runs.
"""
_DEFAULT_BUDGET = "16GB"


def add_trace_parser(subparsers: "Subparsers") -> None:
    """Register the subcommand "trace"."""
    parser = subparsers.add_parser(
        "trace",
        help="replay a recorded load with other parameters",
        description=_DESCRIPTION,
        **examples(
            "PAGED_KV_TRACE=trace.txt paged-kv server --model MODEL",
            "paged-kv trace replay trace.txt --max-kv-bytes 2GB",
            "paged-kv trace synthesize made-up.txt --sequences 100",
        ),
    )
    commands = parser.add_subparsers(dest="trace_command", required=True, metavar="COMMAND")
    _add_replay_parser(commands)
    _add_synthesize_parser(commands)


def _add_replay_parser(commands: "Subparsers") -> None:
    parser = commands.add_parser("replay", help="run a trace with other parameters and compare")
    parser.set_defaults(run=run_replay)
    parser.add_argument("file", type=path, help="a trace")
    parser.add_argument(
        "--max-kv-bytes",
        type=parse_size,
        metavar="SIZE",
        help="the budget of each pool, such as 4GB",
    )
    parser.add_argument(
        "--page-size",
        type=positive,
        default=256,
        metavar="TOKENS",
        help="tokens a page; sizes other than 256 exist only here (default: 256)",
    )
    parser.add_argument(
        "--eviction",
        choices=["lru", "always"],
        default="lru",
        help="which cached prefixes to evict: the least recently used when memory is short, or all "
        "at once (default: lru)",
    )
    parser.add_argument(
        "--admission",
        choices=list(BATCHES),
        help="say how many requests would have run at once with this policy of paged-kv server",
    )
    parser.add_argument(
        "--max-tokens",
        type=positive,
        metavar="N",
        help="for --admission: the max_tokens of each request (default: as recorded)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON to standard output")


def _add_synthesize_parser(commands: "Subparsers") -> None:
    parser = commands.add_parser(
        "synthesize",
        help="make up a load of sequences with random lengths",
        description="The defaults for the model's geometry are those of Llama 3.1 8B.",
    )
    parser.set_defaults(run=run_synthesize)
    parser.add_argument("file", type=path, help="the trace to write; it must not exist yet")
    for flag, default, meaning in (
        ("--sequences", 64, "sequences at once"),
        ("--layers", 32, "layers that keep keys and values"),
        ("--kv-heads", 8, "key/value heads per layer"),
        ("--head-dim", 128, "head size"),
        ("--bytes-per-number", 2, "bytes per number"),
    ):
        parser.add_argument(
            flag,
            type=positive,
            default=default,
            metavar="N",
            help=f"{meaning} (default: {default})",
        )
    parser.add_argument(
        "--lengths",
        type=length_range,
        default=(100, 2000),
        metavar="MIN,MAX",
        help="tokens of a sequence: a range, drawn uniformly, or one number (default: 100,2000)",
    )
    parser.add_argument(
        "--churn",
        type=share,
        default=0.5,
        metavar="R",
        help="share of the sequences that end and are replaced by new ones (default: 0.5)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="draws the lengths and the sequences that end (default: 0)",
    )
    parser.add_argument(
        "--max-kv-bytes",
        type=parse_size,
        default=parse_size(_DEFAULT_BUDGET),
        metavar="SIZE",
        help=f"the pool's budget, such as 512MB or 4GB (default: {_DEFAULT_BUDGET})",
    )


def run_synthesize(arguments: argparse.Namespace) -> int:
    """Write a trace; return the exit status, 0."""
    from paged_kv.trace.synthetic_load import Load, synthesize

    shortest, longest = arguments.lengths
    load = Load(arguments.sequences, shortest, longest, arguments.churn, arguments.seed)
    numbers: int = 2 * arguments.layers * arguments.kv_heads * arguments.head_dim
    token_bytes = numbers * arguments.bytes_per_number
    with removed_unless_complete(arguments.file):
        synthesize(load, token_bytes, arguments.max_kv_bytes, arguments.file)
    return 0


def run_replay(arguments: argparse.Namespace) -> int:
    """Replay as recorded and with the other parameters, print both, return 0."""
    events = read_trace(arguments.file)
    other = Parameters(arguments.page_size, arguments.max_kv_bytes, arguments.eviction == "lru")
    recorded = Replay(events, Parameters()).run()
    load = TracedLoad(events, PAGE_SIZE)
    _require_a_page(arguments, load)
    changed = recorded if other == Parameters() else Replay(events, other).run()
    admitted = _admitted(arguments, load)
    if arguments.json:
        content = {"recorded": as_dict(recorded), "replayed": as_dict(changed)}
        if admitted is not None:
            content["admission"] = asdict(admitted)
        print(json.dumps(content, indent=2))
        return 0
    _print_outcomes(recorded, changed, _in_words(arguments))
    if admitted is not None:
        _print_admission(load, admitted, _admission_in_words(arguments))
    return 0


def _require_a_page(arguments: argparse.Namespace, load: TracedLoad) -> None:
    """Raise ValueError if --max-kv-bytes does not hold a page of every layer."""
    least = -(-load.page_bytes * arguments.page_size // PAGE_SIZE)
    if arguments.max_kv_bytes is not None and arguments.max_kv_bytes < least:
        raise ValueError(
            f"--max-kv-bytes {arguments.max_kv_bytes:,} holds no page: {arguments.page_size} "
            f"tokens take {least:,} bytes in all layers of this trace, so give at least these"
        )


def _admitted(arguments: argparse.Namespace, load: TracedLoad) -> AdmissionOutcome | None:
    if arguments.admission is None:
        return None
    if not load.requests:
        raise ValueError(
            f"--admission replays requests, and {arguments.file} has none: record a trace of "
            "`paged-kv server`, or of mlx-lm's batch_generate or BatchGenerator with a factory "
            "that is installed"
        )
    policy, most = arguments.admission, arguments.max_tokens
    return replay_admission(load, policy, most, arguments.max_kv_bytes)


def as_dict(outcome: Outcome) -> dict[str, Any]:
    """An outcome, ready for JSON."""
    return {**vars(outcome), "stats": outcome.stats.as_dict()}


def _in_words(arguments: argparse.Namespace) -> str:
    words = []
    if arguments.max_kv_bytes:
        words.append(format_size(arguments.max_kv_bytes))
    if arguments.page_size != 256:
        words.append(f"{counted(arguments.page_size, 'token')} a page")
    if arguments.eviction != "lru":
        words.append("no prefix reuse")
    return ", ".join(words)


def _admission_in_words(arguments: argparse.Namespace) -> str:
    words = [arguments.admission]
    if arguments.max_tokens:
        words.append(f"max_tokens {arguments.max_tokens:,}")
    if arguments.max_kv_bytes:
        words.append(format_size(arguments.max_kv_bytes))
    return ", ".join(words)


def _print_admission(load: TracedLoad, outcome: AdmissionOutcome, title: str) -> None:
    rows = [
        ("requests", f"{len(load.requests):,}", f"{outcome.requests:,}"),
        ("  of them too long for the pool", "", f"{outcome.impossible:,}"),
        ("running at once, on average", "", f"{outcome.running_mean:.1f}"),
        ("running at once, at most", f"{load.running_most:,}", f"{outcome.running_most:,}"),
        ("steps", "", f"{outcome.steps:,}"),
        ("preemptions", f"{load.preemptions:,}", f"{outcome.preemptions:,}"),
        ("tokens computed again", "", f"{outcome.tokens_recomputed:,}"),
    ]
    _print_table(("\n", "\nas recorded", f"\n{title}"), rows)


def _print_outcomes(recorded: Outcome, changed: Outcome, title: str) -> None:
    """Both outcomes; without a title, what was recorded alone."""
    rows = zip(_rows(recorded), _rows(changed), strict=True)
    columns = 3 if title else 2
    both = [(name, cell, other)[:columns] for (name, cell), (_, other) in rows]
    _print_table(("", "as recorded", title)[:columns], both)


def _print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*titles, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)


def _rows(outcome: Outcome) -> list[tuple[str, str]]:
    stats = outcome.stats
    found = outcome.tokens_found / outcome.tokens_asked if outcome.tokens_asked else 0.0
    return [
        ("budget", format_size(stats.bytes_budget)),
        ("block tables", f"{outcome.sequences:,}"),
        ("  of them refused, out of memory", f"{outcome.refused:,}"),
        ("tokens of prompts looked up", f"{outcome.tokens_asked:,}"),
        ("  of them found", f"{outcome.tokens_found:,} ({found:.1%})"),
        ("cached blocks evicted", f"{outcome.evicted:,}"),
        ("blocks copied on write", f"{outcome.cow_copies:,}"),
        ("most bytes of live tokens", format_size(outcome.peak_allocated)),
        ("most bytes of pages in use", format_size(outcome.peak_active)),
        ("most bytes mapped", format_size(outcome.peak_mapped)),
        ("slots without a live token, then", f"{outcome.fragmentation_at_peak:.1%}"),
        ("mapped at the end", format_size(stats.bytes_mapped)),
        ("  of it neither used nor cached", f"{stats.external_fragmentation:.1%}"),
    ]
