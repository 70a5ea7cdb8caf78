"""The command `paged-kv run`: runs a Python program with pages for all its models."""

from __future__ import annotations

import argparse
import logging
import os
import re
import runpy
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from paged_kv.commands.interrupts import raised
from paged_kv.integrations.cache_options import FOR_EVERY_MODEL
from paged_kv.options import add_options, examples, parsed_options


def add_run_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "run",
        usage="paged-kv run [options] -- PROGRAM [ARGUMENT ...]",
        help="run a server or another Python program with pages for its models",
        description="Runs a Python program as it is, in this process, with pages for every model "
        "that mlx-lm or mlx-vlm make prompt caches for. Rapid-MLX and vllm-mlx keep prompts in "
        "these pages too. PROGRAM is an installed command, a file, a module, or -m and a module.",
        **examples(
            "paged-kv run -- mlx_lm.server --model MODEL",
            "paged-kv run --max-kv-bytes 8GB -- rapid-mlx serve MODEL",
            "paged-kv run --page-format q8 -- vllm-mlx serve MODEL --continuous-batching",
            "paged-kv run -- python program.py",
        ),
    )
    add_options(parser, FOR_EVERY_MODEL)
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    try:
        options = parsed_options(arguments, FOR_EVERY_MODEL)
        options.require_usable()
        program = _program(arguments.program[arguments.program[:1] == ["--"] :])
    except ValueError as error:
        print(f"paged-kv run: {error}", file=sys.stderr)
        return 2
    # Imported here because loading mlx-lm takes seconds: usage errors do not need it.
    from paged_kv.integrations.servers.every_model import use_pages

    use_pages(options)
    # The program configures logging as if this command had not.
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    try:
        with raised():
            program()
    except Exception:  # the program's own, as Python prints it
        traceback.print_exc()
        return 1
    return 0


def _program(words: list[str]) -> Callable[[], object]:
    """What runs a program, which finds its words in `sys.argv`.

    Raises:
        ValueError: there is no such program.
    """
    if words and re.fullmatch(r"python[\d.]*", Path(words[0]).name):
        words = words[1:]
    if is_module := words[:1] == ["-m"]:
        words = words[1:]
    if not words:
        raise ValueError("name a program after --, such as: paged-kv run -- mlx_lm.server")
    sys.argv, name = words, words[0]
    commands = entry_points(group="console_scripts", name=Path(name).name)
    if commands and not is_module:
        (command, *_) = commands
        return lambda: sys.exit(command.load()())
    if Path(name).is_file() and not is_module:
        sys.path[0] = os.path.dirname(os.path.abspath(name))
        return lambda: runpy.run_path(name, run_name="__main__")
    sys.path[0] = os.getcwd()
    with suppress(ImportError, ValueError):
        if find_spec(name) is not None:
            return lambda: runpy.run_module(name, run_name="__main__", alter_sys=True)
    raise ValueError(f"{name} is no installed command, file or module of this Python")
