"""The command `paged-kv stats`: how well pages are used by a workload of given lengths."""

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from paged_kv.replay import ReplayResult, Workload, replay
from paged_kv.sizes import format_size, parse_size

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Replays sequences of random lengths through the block allocator and prints how much of the pool
holds tokens. It needs no model and no memory: only the bookkeeping runs. The defaults for the
model's geometry are those of Llama 3.1 8B.
"""


def add_stats_parser(subparsers: "Subparsers") -> None:
    """Register the subcommand "stats"; it sets `run`, which takes the parsed arguments."""
    parser = subparsers.add_parser(
        "stats", help="replay a workload and print how pages are used", description=_DESCRIPTION
    )
    parser.set_defaults(run=run_stats)
    _add_workload_arguments(parser)
    _add_geometry_arguments(parser)
    parser.add_argument(
        "--max-bytes",
        type=parse_size,
        default=parse_size("16GB"),
        metavar="SIZE",
        help="the pool's budget, such as 512MB, 4GB or 1.5GiB (default: 16GB)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON to standard output")


def run_stats(arguments: argparse.Namespace) -> int:
    """Replay and print; returns the exit status, always 0."""
    shortest, longest = arguments.lengths
    workload = Workload(arguments.sequences, shortest, longest, arguments.churn, arguments.seed)
    result = replay(workload, _token_bytes(arguments), arguments.max_bytes)
    print(json.dumps(_as_dict(result), indent=2) if arguments.json else _as_table(result))
    return 0


def _add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sequences",
        type=_positive,
        default=64,
        metavar="N",
        help="sequences at once (default: 64)",
    )
    parser.add_argument(
        "--lengths",
        type=_length_range,
        default=(100, 2000),
        metavar="MIN,MAX",
        help="tokens of a sequence, uniformly random, or one number (default: 100,2000)",
    )
    parser.add_argument(
        "--churn",
        type=_share,
        default=0.5,
        metavar="R",
        help="share of the sequences that end and are replaced by new ones (default: 0.5)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="chooses the lengths and who ends (default: 0)"
    )


def _add_geometry_arguments(parser: argparse.ArgumentParser) -> None:
    for flag, default, meaning in (
        ("--layers", 32, "layers that keep keys and values"),
        ("--kv-heads", 8, "key and value heads of a layer"),
        ("--head-dim", 128, "numbers of a head"),
        ("--bytes-per-number", 2, "bytes of a number"),
    ):
        parser.add_argument(
            flag,
            type=_positive,
            default=default,
            metavar="N",
            help=f"{meaning} (default: {default})",
        )


def _token_bytes(arguments: argparse.Namespace) -> int:
    numbers: int = 2 * arguments.layers * arguments.kv_heads * arguments.head_dim
    nbytes: int = numbers * arguments.bytes_per_number
    return nbytes


def _as_dict(result: ReplayResult) -> dict[str, int | float]:
    return {
        **asdict(result),
        "utilisation": result.utilisation,
        "internal_waste": result.internal_waste,
        "mean_waste_tokens": result.mean_waste_tokens,
        "external_fragmentation": result.external_fragmentation,
    }


def _as_table(result: ReplayResult) -> str:
    rows = [
        (
            "sequences",
            f"{result.sequences_live} live of {result.sequences_started} started",
            f"{result.sequences_ended} ended, {result.allocation_failures} did not fit",
        ),
        ("allocated", format_size(result.allocated_bytes), "live tokens"),
        ("active", format_size(result.active_bytes), "pages in use"),
        ("mapped", format_size(result.mapped_bytes), _slabs_in_words(result)),
        ("utilisation", f"{result.utilisation:.1%}", "allocated / mapped"),
        ("internal waste", f"{result.internal_waste:.1%}", _waste_in_words(result)),
        ("external fragmentation", f"{result.external_fragmentation:.1%}", "1 - active / mapped"),
        ("allocation failures", str(result.allocation_failures), "sequences that did not fit"),
    ]
    return _aligned(rows)


def _slabs_in_words(result: ReplayResult) -> str:
    peak, budget = format_size(result.peak_mapped_bytes), format_size(result.budget_bytes)
    return f"{result.slabs} slabs; at most {peak} of a budget of {budget}"


def _waste_in_words(result: ReplayResult) -> str:
    mean, half = f"{result.mean_waste_tokens:.1f}", result.page_size // 2
    return f"1 - allocated / active: {mean} tokens a sequence (half a page is {half})"


def _aligned(rows: list[tuple[str, str, str]]) -> str:
    names = max(len(name) for name, _, _ in rows)
    values = max(len(value) for _, value, _ in rows)
    return "\n".join(f"{name:<{names}}  {value:<{values}}  {note}" for name, value, note in rows)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer, such as 8")
    return int(text)


def _length_range(text: str) -> tuple[int, int]:
    parts = text.split(",")
    if len(parts) > 2 or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a range like 100,2000 nor a number")
    shortest, longest = int(parts[0]), int(parts[-1])
    if not 1 <= shortest <= longest:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be two lengths, the shorter first, from 1 on, such as 100,2000"
        )
    return shortest, longest


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share between 0 and 1, such as 0.5")
    return share
