"""The command `paged-kv completion`: prints a script that completes commands and options."""

from __future__ import annotations

import argparse

from paged_kv.commands.cache_options import examples
from paged_kv.extras import extra_module

_SHELLS = ("bash", "zsh", "tcsh")


def add_completion_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "completion",
        help="print a script with which a shell completes commands and options",
        description="Prints a script for a shell, which completes commands and options with it.",
        **examples(
            "paged-kv completion bash >~/.local/share/bash-completion/completions/paged-kv",
            'paged-kv completion zsh >"${fpath[1]}/_paged-kv"',
        ),
    )
    parser.add_argument("shell", choices=_SHELLS)
    parser.set_defaults(run=lambda arguments: _run(commands, arguments.shell))


def _run(commands: argparse._SubParsersAction[argparse.ArgumentParser], shell: str) -> int:
    shtab = extra_module("shtab", "completion")
    for name, command in commands.choices.items():
        # A command whose options take long to load registers without them.
        if (full_parser := command.get_default("full_parser")) is not None:
            commands.choices[name] = full_parser()
    parser = argparse.ArgumentParser("paged-kv")
    parser._actions.append(commands)
    print(shtab.complete(parser, shell))
    return 0
