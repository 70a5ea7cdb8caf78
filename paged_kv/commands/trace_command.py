"""The command `paged-kv trace`: replays a trace. `new_traces` has the commands that write one."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from paged_kv.commands.arguments import examples, path, positive
from paged_kv.commands.new_traces import add_parsers_of_new_traces
from paged_kv.sizes import counted, format_size, parse_size
from paged_kv.trace.admission_replay import BATCHES, AdmissionOutcome, replay_admission
from paged_kv.trace.recorder import PAGE_SIZE
from paged_kv.trace.replay import Outcome, Parameters, Replay, read_trace
from paged_kv.trace.requests import TracedLoad
from paged_kv.trace.reuse_replay import POLICIES, Reuse, most_reuse, replay_reuse
from paged_kv.trace.state_replay import foreseen_states, replay_ranked_states

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
Traces of block allocations. Any process that uses this library records one to the file that
PAGED_KV_TRACE names. `replay` runs it through the allocator again, with another budget, page size
or eviction policy; `synthesize` and `agents` make one up, and `import` reads a public one. None of
them needs a model or memory: only the bookkeeping runs.
"""
# No policy: what nobody uses is evicted at once.
_ALWAYS = "always"
_DEFAULT_POLICY = "worth"
_TITLES = {"most": "most possible", "foreseen": "with foresight"}


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
            "paged-kv trace agents made-up.txt --agents 8",
            "paged-kv trace import mooncake conversation_trace.jsonl trace.txt",
        ),
    )
    commands = parser.add_subparsers(dest="trace_command", required=True, metavar="COMMAND")
    _add_replay_parser(commands)
    add_parsers_of_new_traces(commands)


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
        choices=[*POLICIES, _ALWAYS],
        default=_DEFAULT_POLICY,
        help="which cached prefixes to evict when memory is short: the least recently used (lru), "
        "the least frequently used (lfu), the first stored (fifo) or those worth least (worth); or "
        "all of them at once (always) "
        f"(default: {_DEFAULT_POLICY})",
    )
    parser.add_argument(
        "--states",
        type=positive,
        metavar="N",
        help="say what prompts of requests find where N recurrent states are kept",
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


def run_replay(arguments: argparse.Namespace) -> int:
    """Replay as recorded and with the other parameters, print both, return 0."""
    events = read_trace(arguments.file)
    policy = POLICIES.get(arguments.eviction, POLICIES[_DEFAULT_POLICY])
    keeps_prefixes = arguments.eviction != _ALWAYS
    other = Parameters(arguments.page_size, arguments.max_kv_bytes, keeps_prefixes, policy)
    recorded = Replay(events, Parameters()).run()
    load = TracedLoad(events, PAGE_SIZE)
    _require_a_page(arguments, load)
    changed = recorded if other == Parameters() else Replay(events, other).run()
    admitted, reuse = _admitted(arguments, load), _reuse(arguments, load)
    states = _states(arguments, load)
    if arguments.json:
        content = {"recorded": as_dict(recorded), "replayed": as_dict(changed)}
        if admitted is not None:
            content["admission"] = asdict(admitted)
        content |= {"reuse": _shares(reuse)} if reuse else {}
        content |= {"states": _shares(states)} if states else {}
        print(json.dumps(content, indent=2))
        return 0
    # A trace may hold requests only.
    if recorded.sequences or not reuse:
        _print_outcomes(recorded, changed, _in_words(arguments))
    if reuse:
        _print_reuse(reuse, "pages")
    if states:
        _print_reuse(states, "states")
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


def _reuse(arguments: argparse.Namespace, load: TracedLoad) -> dict[str, Reuse]:
    """What prompts find with the chosen policy, with least recently used, and at most; nothing of a
    trace without requests."""
    if not load.requests:
        return {}
    max_bytes = arguments.max_kv_bytes
    names = _compared(arguments)
    found = {name: replay_reuse(load, POLICIES[name], max_bytes) for name in names}
    return {**found, "most": most_reuse(load, max_bytes)}


def _states(arguments: argparse.Namespace, load: TracedLoad) -> dict[str, Reuse]:
    """The same of recurrent states, if they are asked for."""
    if arguments.states is None or not load.requests:
        return {}
    count, names = arguments.states, _compared(arguments)
    found = {name: replay_ranked_states(load, count, POLICIES[name]) for name in names}
    return {**found, "foreseen": foreseen_states(load, count)}


def _compared(arguments: argparse.Namespace) -> list[str]:
    """The names of the chosen policy, if it is one, and of least recently used."""
    names = dict.fromkeys((arguments.eviction, "lru"))
    return [name for name in names if name in POLICIES]


def _shares(reuse: dict[str, Reuse]) -> dict[str, Any]:
    """What was found, ready for JSON."""
    return {name: {**vars(each), "share": each.share} for name, each in reuse.items()}


def as_dict(outcome: Outcome) -> dict[str, Any]:
    """An outcome, ready for JSON."""
    return {**vars(outcome), "stats": outcome.stats.as_dict()}


def _in_words(arguments: argparse.Namespace) -> str:
    words = []
    if arguments.max_kv_bytes:
        words.append(format_size(arguments.max_kv_bytes))
    if arguments.page_size != 256:
        words.append(f"{counted(arguments.page_size, 'token')} a page")
    if arguments.eviction == _ALWAYS:
        words.append("no prefix reuse")
    elif arguments.eviction != _DEFAULT_POLICY:
        words.append(f"evicts {arguments.eviction}")
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


def _print_reuse(reuse: dict[str, Reuse], things: str) -> None:
    """What each policy finds in the prompts of requests, of cached pages or states."""
    titles = [_TITLES.get(name, name) for name in reuse]
    found = list(reuse.values())
    rows = [
        ("tokens of prompts", *[f"{each.tokens_asked:,}" for each in found]),
        ("  of them found", *[f"{each.tokens_found:,}" for each in found]),
        ("  as a share", *[f"{each.share:.1%}" for each in found]),
        (f"{things} that fit", *[f"{each.capacity:,}" for each in found]),
        (f"{things} evicted", *[f"{each.evicted:,}" for each in found]),
    ]
    _print_table((f"\n{things}, by eviction policy", *[f"\n{each}" for each in titles]), rows)


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
