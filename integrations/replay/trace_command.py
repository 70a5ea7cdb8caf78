"""The command `paged-kv trace`: records the requests of a program, and replays them."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING

from paged_kv.allocator.prefixes.eviction import (
    BETTER_OF_TWO,
    LEAST_WORTH,
    EvictionPolicy,
    FirstInFirstOut,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
)
from paged_kv.checks import format_size, parse_size
from paged_kv.options import examples, path
from paged_kv.pool.options import PoolOptions

if TYPE_CHECKING:
    from paged_kv.integrations.replay.replay import Outcome

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

POLICIES: dict[str, EvictionPolicy] = {
    "auto": BETTER_OF_TWO,
    "lru": LeastRecentlyUsed(),
    "lfu": LeastFrequentlyUsed(),
    "fifo": FirstInFirstOut(),
    "worth": LEAST_WORTH,
}
_DESCRIPTION = """\
How would these requests have run with another budget, format or policy? `record` writes the
requests of a program to a file: when they came, how long they were and what they had in common,
but no tokens. `replay` serves them again, with all that manages pages and without a model.
"""


def add_trace_parser(subparsers: Subparsers) -> None:
    """Register the subcommand "trace"."""
    parser = subparsers.add_parser(
        "trace",
        help="record requests, and replay them with other parameters",
        description=_DESCRIPTION,
        **examples(
            "paged-kv trace record trace.jsonl paged-kv server --model MODEL",
            "paged-kv trace replay trace.jsonl --max-kv-bytes 2GB --page-format q4",
        ),
    )
    commands = parser.add_subparsers(dest="trace_command", required=True, metavar="COMMAND")
    record = commands.add_parser("record", help="run a program, and record its requests")
    record.set_defaults(run=_record)
    record.add_argument("file", type=path, help="the trace to write; it must not exist yet")
    record.add_argument("program", nargs=argparse.REMAINDER, help="the program and its arguments")
    _add_replay_parser(commands)


def _page_format(text: str) -> str:
    """A page format, as the option of pools."""
    try:
        PoolOptions(page_format=text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _add_replay_parser(commands: Subparsers) -> None:
    parser = commands.add_parser("replay", help="run a trace with other parameters and compare")
    parser.set_defaults(run=_replay)
    parser.add_argument("file", type=path, help="a recorded trace, or one in Mooncake's format")
    parser.add_argument(
        "--max-kv-bytes",
        type=parse_size,
        metavar="SIZE",
        help="the most memory for pages, such as 4GB (default: as recorded)",
    )
    parser.add_argument(
        "--page-format",
        type=_page_format,
        metavar="FORMAT",
        help="how pages hold numbers: fp16, q8, q4, two of these as q8/q4, or auto (default: as "
        "recorded)",
    )
    parser.add_argument(
        "--eviction",
        choices=[*POLICIES],
        default="auto",
        help="which cached prefixes to evict when memory is short: the least recently used (lru), "
        "the least frequently used (lfu), the first stored (fifo), those worth least (worth), or "
        "whatever finds more of lru and worth (auto, the default)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON to standard output")


def _record(arguments: argparse.Namespace) -> int:
    """Become the program; raises a ValueError or an OSError if that cannot be."""
    from paged_kv.trace import open_trace

    if not arguments.program:
        raise ValueError("name a program behind the file, such as paged-kv server --model MODEL")
    file, (program, *_) = arguments.file.absolute(), arguments.program
    open_trace(file).close()
    try:
        os.execvpe(program, arguments.program, {**os.environ, "PAGED_KV_TRACE": str(file)})
    except OSError as error:
        raise type(error)(f"{program} cannot be run ({error.strerror}): name a program") from None


def _replay(arguments: argparse.Namespace) -> int:
    """Replay as recorded, where the trace says how, and with the other parameters."""
    # Imported here because loading mlx-lm takes seconds.
    from paged_kv.integrations.replay.replay import replay
    from paged_kv.trace import read_trace

    trace = read_trace(arguments.file)
    max_bytes = arguments.max_kv_bytes or trace.max_bytes
    if max_bytes is None:
        raise ValueError(
            f"{arguments.file} does not say how much memory there was: give --max-kv-bytes"
        )
    page_format = arguments.page_format or trace.page_format
    runs: dict[str, tuple[int, str, EvictionPolicy]] = {}
    if trace.max_bytes is not None:
        runs["as recorded"] = trace.max_bytes, trace.page_format, BETTER_OF_TWO
    if (changed := (max_bytes, page_format, POLICIES[arguments.eviction])) not in runs.values():
        runs[f"{format_size(max_bytes)}, {page_format}, {arguments.eviction}"] = changed
    outcomes = {title: replay(trace, *changes) for title, changes in runs.items()}
    if arguments.json:
        print(json.dumps({title: asdict(each) for title, each in outcomes.items()}, indent=2))
    else:
        _print(outcomes)
    return 0


def _print(outcomes: dict[str, Outcome]) -> None:
    from rich.table import Table

    from paged_kv.commands.plain_console import PlainConsole

    table = Table("", *outcomes, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for cells in zip(*map(_cells, outcomes.values()), strict=True):
        table.add_row(cells[0][0], *[cell for _, cell in cells])
    PlainConsole().print(table)


def _cells(outcome: Outcome) -> list[tuple[str, str]]:
    share = outcome.cached_tokens / max(1, outcome.prompt_tokens)
    return [
        ("requests served", f"{outcome.served:,}"),
        ("requests too long for the pool", f"{outcome.refused:,}"),
        ("tokens of prompts", f"{outcome.prompt_tokens:,}"),
        ("  of them cached", f"{share:.1%}"),
        ("preemptions", f"{outcome.preemptions:,}"),
        ("most bytes of pages in use", format_size(outcome.peak_bytes)),
        ("wait, mean and longest", f"{outcome.mean_wait_s:.1f}, {outcome.longest_wait_s:.1f} s"),
        ("time in all", f"{outcome.seconds:,.0f} s"),
    ]
