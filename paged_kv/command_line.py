"""The command `paged-kv`, also `python -m paged_kv`.

Exit status: 0 for success, 1 for a failure, 2 for wrong arguments, 130 after an interrupt (SIGINT),
141 when the reader of its output has closed the pipe (SIGPIPE).
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paged_kv import __version__
from paged_kv.allocator.errors import PagedKVError
from paged_kv.commands.stats_command import add_stats_parser
from paged_kv.commands.store_command import add_store_parser
from paged_kv.extras import MissingBackend, MLXLMChanged, extra_module, missing_named
from paged_kv.options import Parser, examples

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_KNOWN_ERRORS = (PagedKVError, MissingBackend, MLXLMChanged, MemoryError, OSError, ValueError)


def _add_completion_parser(commands: _Commands) -> None:
    parser = commands.add_parser(
        "completion",
        help="print a script with which a shell completes commands and options",
        description="Prints a script for a shell, which completes commands and options with it.",
        **examples(
            "paged-kv completion bash >~/.local/share/bash-completion/completions/paged-kv",
            'paged-kv completion zsh >"${fpath[1]}/_paged-kv"',
        ),
    )
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    parser.set_defaults(run=lambda arguments: _run(commands, arguments.shell))


def _run(commands: _Commands, shell: str) -> int:
    shtab = extra_module("shtab", "completion")
    for name, command in commands.choices.items():
        # A command whose options take long to load registers without them.
        if (full_parser := command.get_default("full_parser")) is not None:
            commands.choices[name] = full_parser()
    parser = argparse.ArgumentParser("paged-kv")
    parser._actions.append(commands)
    print(shtab.complete(parser, shell))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    command = "paged-kv"
    try:
        with missing_named():
            arguments = _arguments(argv)
            command = f"paged-kv {arguments.command}"
            logging.basicConfig(level=arguments.log_level.upper(), format="%(name)s: %(message)s")
            status: int = arguments.run(arguments)
        # Flush here: at interpreter exit a closed pipe would look like any other failure.
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Point standard output at /dev/null, so that Python's flush at exit does not fail.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return 128 + signal.SIGPIPE
    except _KNOWN_ERRORS as error:
        print(f"{command}: {_in_words(error)}", file=sys.stderr)
        return 1
    return status


def _in_words(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    arguments, others = parser.parse_known_args(argv)
    if arguments.command == "server":
        arguments.others = others
    elif others:
        arguments.parser.error(f"unrecognized arguments: {' '.join(others)}")
    return arguments


def _parser() -> argparse.ArgumentParser:
    from paged_kv.integrations.bench.bench_command import add_bench_parser
    from paged_kv.integrations.doctor.doctor_command import add_doctor_parser
    from paged_kv.integrations.generation.generate_command import add_generate_parser
    from paged_kv.integrations.plan.plan_command import add_plan_parser
    from paged_kv.integrations.replay.trace_command import add_trace_parser
    from paged_kv.integrations.servers.run_command import add_run_parser
    from paged_kv.server.server_command import add_server_parser

    parser: argparse.ArgumentParser = Parser(
        prog="paged-kv", description="Paged key/value caches for MLX and mlx-lm."
    )
    parser.add_argument("--version", action="version", version=f"paged-kv {__version__}")
    parser.add_argument(
        "--log-level",
        default="warning",
        choices=["debug", "info", "warning", "error"],
        help="least severe level to log, to standard error (default: warning)",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_generate_parser(commands)
    add_server_parser(commands)
    add_run_parser(commands)
    add_plan_parser(commands)
    add_bench_parser(commands)
    add_doctor_parser(commands)
    add_trace_parser(commands)
    add_stats_parser(commands)
    add_store_parser(commands)
    _add_completion_parser(commands)
    _know_themselves(parser)
    return parser


def _know_themselves(parser: argparse.ArgumentParser) -> None:
    """Let the parser of the innermost command be `arguments.parser`: errors name its help."""
    parser.set_defaults(parser=parser)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _know_themselves(command)
