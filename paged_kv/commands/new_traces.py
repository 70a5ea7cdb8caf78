"""The commands `paged-kv trace synthesize`, `agents` and `import`, which write traces."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from paged_kv.commands.arguments import length_range, path, positive, share
from paged_kv.commands.output_files import removed_unless_complete
from paged_kv.sizes import parse_size
from paged_kv.trace.agent_load import AgentLoad, write_agent_load
from paged_kv.trace.public_traces import FORMATS, import_trace
from paged_kv.trace.request_lines import TracedMemory
from paged_kv.trace.synthetic_load import Load, synthesize

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_GEOMETRY = "The defaults for the model's geometry are those of Llama 3.1 8B."
_DEFAULT_BUDGET = "16GB"


def add_parsers_of_new_traces(commands: "Subparsers") -> None:
    """Register the subcommands that write traces."""
    _add_synthesize_parser(commands)
    _add_agents_parser(commands)
    _add_import_parser(commands)


def _add_synthesize_parser(commands: "Subparsers") -> None:
    parser = commands.add_parser(
        "synthesize",
        help="make up a load of sequences with random lengths",
        description=_GEOMETRY,
    )
    parser.set_defaults(run=run_synthesize)
    _add_new_trace(parser, "file")
    _add_count(parser, "--sequences", 64, "sequences at once")
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
    _add_seed(parser, "draws the lengths and the sequences that end")
    _add_memory(parser)


def _add_agents_parser(commands: "Subparsers") -> None:
    parser = commands.add_parser(
        "agents",
        help="make up the requests of coding agents",
        description="Each turn's prompt begins with the one before, and some agents have "
        f"sub-agents. paged_kv/trace/agent_load.py names the sources of the lengths. {_GEOMETRY}",
    )
    parser.set_defaults(run=run_agents)
    _add_new_trace(parser, "file")
    _add_count(parser, "--agents", 8, "sessions at once")
    _add_count(parser, "--requests", 2000, "requests in all")
    _add_seed(parser, "draws the lengths and the times")
    _add_memory(parser)


def _add_import_parser(commands: "Subparsers") -> None:
    parser = commands.add_parser(
        "import",
        help="read a public trace of requests",
        description="paged_kv/trace/public_traces.py describes the formats and names where such "
        f"traces are. {_GEOMETRY}",
    )
    parser.set_defaults(run=run_import)
    parser.add_argument("format", choices=list(FORMATS), help="the format of the public trace")
    parser.add_argument("source", type=path, metavar="file", help="the public trace")
    _add_new_trace(parser, "out")
    _add_memory(parser)


def _add_new_trace(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument(name, type=path, help="the trace to write; it must not exist yet")


def _add_seed(parser: argparse.ArgumentParser, meaning: str) -> None:
    parser.add_argument("--seed", type=int, default=0, help=f"{meaning} (default: 0)")


def _add_count(parser: argparse.ArgumentParser, flag: str, default: int, meaning: str) -> None:
    parser.add_argument(
        flag,
        type=positive,
        default=default,
        metavar="N",
        help=f"{meaning} (default: {default})",
    )


def _add_memory(parser: argparse.ArgumentParser) -> None:
    """Add the options of the model's geometry and of the budget."""
    _add_count(parser, "--layers", 32, "layers that keep keys and values")
    _add_count(parser, "--kv-heads", 8, "key/value heads per layer")
    _add_count(parser, "--head-dim", 128, "head size")
    _add_count(parser, "--bytes-per-number", 2, "bytes per number")
    parser.add_argument(
        "--max-kv-bytes",
        type=parse_size,
        default=parse_size(_DEFAULT_BUDGET),
        metavar="SIZE",
        help=f"the pool's budget, such as 512MB or 4GB (default: {_DEFAULT_BUDGET})",
    )


def _memory(arguments: argparse.Namespace) -> TracedMemory:
    """What those options say."""
    numbers: int = 2 * arguments.layers * arguments.kv_heads * arguments.head_dim
    return TracedMemory(numbers * arguments.bytes_per_number, arguments.max_kv_bytes)


def run_synthesize(arguments: argparse.Namespace) -> int:
    """Write a trace; return the exit status, 0."""
    shortest, longest = arguments.lengths
    load = Load(arguments.sequences, shortest, longest, arguments.churn, arguments.seed)
    memory = _memory(arguments)
    with removed_unless_complete(arguments.file):
        synthesize(load, memory.token_bytes, memory.max_bytes, arguments.file)
    return 0


def run_agents(arguments: argparse.Namespace) -> int:
    """Write a trace of agents; return the exit status, 0."""
    load = AgentLoad(arguments.agents, arguments.requests, arguments.seed)
    with removed_unless_complete(arguments.file):
        write_agent_load(load, _memory(arguments), arguments.file)
    return 0


def run_import(arguments: argparse.Namespace) -> int:
    """Write a public trace as one of this project; return the exit status, 0."""
    out: Path = arguments.out
    with removed_unless_complete(out):
        import_trace(arguments.format, arguments.source, _memory(arguments), out)
    return 0
