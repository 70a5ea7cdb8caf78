"""The command `paged-kv`, also `python -m paged_kv`.

Exit status: 0 when all went well, 1 when something failed, 2 when the arguments were wrong. As with
other programs, 130 when the user has interrupted it, and 141 when nobody reads its output any more.
"""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence

from paged_kv import __version__
from paged_kv.allocator.errors import PagedKVError
from paged_kv.commands.doctor_command import add_doctor_parser
from paged_kv.commands.stats_command import add_stats_parser
from paged_kv.commands.store_command import add_store_parser
from paged_kv.commands.trace_command import add_trace_parser
from paged_kv.extras import MissingBackend, backend_named


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    command = "paged-kv"
    try:
        with backend_named():
            arguments = _arguments(argv)
            command = f"paged-kv {arguments.command}"
            logging.basicConfig(level=arguments.log_level.upper(), format="%(name)s: %(message)s")
            status: int = arguments.run(arguments)
        # Now: when Python ends, a reader that has gone could no longer be told from a failure.
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        _discard_output()
        return 128 + signal.SIGPIPE
    except (PagedKVError, MissingBackend, MemoryError, OSError, ValueError) as error:
        print(f"{command}: {_in_words(error)}", file=sys.stderr)
        return 1
    return status


def _in_words(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _discard_output() -> None:
    """Let Python write what is left of the output to nowhere when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    arguments, others = parser.parse_known_args(argv)
    if arguments.command == "server":
        arguments.others = others
    elif others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="paged-kv", description="Paged key/value caches for MLX and mlx-lm."
    )
    parser.add_argument("--version", action="version", version=f"paged-kv {__version__}")
    parser.add_argument(
        "--log-level",
        default="warning",
        choices=["debug", "info", "warning", "error"],
        help="what to log, to standard error (default: warning)",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_integrations(commands)
    add_stats_parser(commands)
    add_trace_parser(commands)
    add_store_parser(commands)
    add_doctor_parser(commands)
    return parser


def _add_integrations(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from paged_kv.integrations.generate_command import add_generate_parser
    from paged_kv.integrations.server.server_command import add_server_parser

    add_generate_parser(commands)
    add_server_parser(commands)
