"""Defines the options of commands that make paged caches, and how their help looks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paged_kv.commands.arguments import (
    budget,
    page_format,
    path,
    positive,
    read_tokens,
    store_size,
    tier,
)
from paged_kv.commands.model_names import NO_DRAFT_MODEL, require_model
from paged_kv.sizes import parse_size
from paged_kv.store.folder import DEFAULT_STORE_BYTES, default_folder
from paged_kv.tiers.store_options import StoreOptions


def add_cache_options(
    parser: argparse._ActionsContainer, *, after: int = 1, max_kv_bytes: str | None = None
) -> None:
    """The memory of pages, their format, and where they persist.

    Args:
        after: the default of --store-after.
        max_kv_bytes: the default of --max-kv-bytes.
    """
    budget_default = max_kv_bytes or "80%% of what the machine recommends, less what is in use"
    parser.add_argument(
        "--max-kv-bytes",
        type=budget,
        default=max_kv_bytes,
        metavar="SIZE",
        help="the most memory for pages, such as 4GB. A draft model gets its share of it. "
        "Snapshots of recurrent layers take up to a quarter of it besides. With auto, what the "
        "machine has, less weights, a prompt step, which is measured, and a tenth for the system. "
        f"(default: {budget_default})",
    )
    parser.add_argument(
        "--page-format",
        type=page_format,
        default="fp16",
        metavar="FORMAT",
        help="how pages hold numbers: fp16, the model's own 16 bits, q8 or q4; or two of these for "
        "keys and values, such as q8/q4; or auto, which requantises the oldest pages to q8 and "
        "then q4 when memory is short (default: fp16)",
    )
    add_read_tokens_option(parser)
    add_offload_option(parser)
    parser.add_argument(
        "--wait-for-pages",
        action="store_true",
        help="let decode steps wait for such pages instead of leaving out those that are late",
    )
    parser.add_argument(
        "--store",
        type=tier,
        nargs="?",
        action="append",
        const=default_folder(),
        metavar="PLACE",
        help="persist prompts' pages and reuse them: in a folder, or on a server that machines "
        "share, as redis://HOST, rediss://HOST or s3://BUCKET (extras redis and s3). Give it "
        f"several times for several tiers, quickest first. Without a place, in {default_folder()}",
    )
    parser.add_argument(
        "--store-bytes",
        type=store_size,
        default=parse_size(DEFAULT_STORE_BYTES),
        metavar="SIZE",
        help="the most that the folder of --store may take on disk (default: "
        f"{DEFAULT_STORE_BYTES})",
    )
    parser.add_argument(
        "--store-after",
        type=positive,
        default=after,
        metavar="N",
        help="write a prefix to the store once N prompts have begun with it; counts outlive the "
        f"process (default: {after})",
    )
    parser.add_argument(
        "--store-at-once",
        type=positive,
        metavar="TOKENS",
        help="write a prefix of at least so many tokens when it is first seen (default: no such "
        "length)",
    )
    parser.add_argument(
        "--store-secret",
        type=path,
        metavar="FILE",
        help="a file of at least 32 bytes, the same on all machines, with which entries on servers "
        "are verified",
    )
    parser.add_argument(
        "--store-unauthenticated",
        action="store_true",
        help="take servers without --store-secret: whoever can write there can change answers",
    )
    parser.add_argument(
        "--store-daily-bytes",
        type=parse_size,
        metavar="SIZE",
        help="the most to write to the folder of --store in a day, such as 20GB, over restarts; "
        "then it is only read (default: no limit)",
    )


def store_options(arguments: argparse.Namespace) -> StoreOptions:
    """The store's options of a command."""
    return StoreOptions(
        after=arguments.store_after,
        at_once=arguments.store_at_once,
        daily_bytes=arguments.store_daily_bytes,
        secret=arguments.store_secret,
        unauthenticated=arguments.store_unauthenticated,
    )


def has_servers(store: Sequence[str | Path] | None) -> bool:
    """Whether some tiers of --store are servers."""
    return any(isinstance(place, str) for place in store or ())


def add_read_tokens_option(parser: argparse._ActionsContainer) -> None:
    """How many tokens a decode step reads."""
    parser.add_argument(
        "--read-tokens",
        type=read_tokens,
        metavar="N",
        help="an approximation: in layers that see the whole context, a decode step reads the "
        "first and the latest tokens and those that are likely to matter most, N in all, 768 or "
        "more; what is no longer is read whole. Prompts are computed exactly (default: all tokens)",
    )


def add_offload_option(parser: argparse._ActionsContainer) -> None:
    """Where pages go that memory does not hold."""
    parser.add_argument(
        "--offload",
        type=path,
        metavar="FOLDER",
        help="with --read-tokens: let the oldest pages go to a file in this folder when memory is "
        "short, and come back to layers for which they matter (default: pages stay in memory)",
    )


def require_offload_complete(arguments: argparse.Namespace) -> None:
    """Check that --offload has the option that it needs.

    Raises:
        ValueError: it has not.
    """
    if arguments.offload is not None and arguments.read_tokens is None:
        raise ValueError(
            "--offload is for decode steps that do not read all: add --read-tokens, such as "
            "--read-tokens 8192, or leave it out"
        )


def add_dtype_option(parser: argparse._ActionsContainer) -> None:
    """The number format of a model's weights."""
    parser.add_argument(
        "--dtype",
        choices=["float32", "float16", "bfloat16"],
        help="convert the model's numbers to this format, and compute in it. On a CPU float32 is "
        "the quickest where OpenBLAS is installed (default: the model's own)",
    )


def require_complete(arguments: argparse.Namespace) -> None:
    """Check that no option lacks another one that it needs.

    Raises:
        ValueError: one does.
        OSError: the file of --store-secret cannot be read.
    """
    if arguments.store is None and arguments.store_bytes != parse_size(DEFAULT_STORE_BYTES):
        raise ValueError("--store-bytes limits the folder of --store: add --store, or leave it out")
    for option in ("store_at_once", "store_daily_bytes", "store_secret"):
        if arguments.store is None and getattr(arguments, option) is not None:
            name = option.replace("_", "-")
            raise ValueError(f"--{name} is an option of --store: add --store, or leave it out")
    require_offload_complete(arguments)
    if arguments.wait_for_pages and arguments.offload is None:
        raise ValueError(
            "--wait-for-pages is an option of --offload: add --offload, or leave it out"
        )
    if has_servers(arguments.store):
        from paged_kv.tiers.opening import read_seal

        read_seal(store_options(arguments))


def require_folders(arguments: argparse.Namespace) -> None:
    """Check the folders that options name, before models are loaded.

    Raises:
        OSError: a model is not there, or its folder is incomplete, or the store's is a file.
    """
    for option, name in (("--model", arguments.model), ("--draft-model", arguments.draft_model)):
        if name not in NO_DRAFT_MODEL:
            require_model(option, name)
    for place in arguments.store or ():
        if isinstance(place, Path) and place.is_file():
            raise NotADirectoryError(f"{place} is a file: name a folder for the pages")


def examples(*commands: str) -> dict[str, Any]:
    """Arguments of a parser that show commands below its options."""
    return {
        "epilog": "\n".join(["examples:", *(f"  {command}" for command in commands)]),
        "formatter_class": _Wrapped,
    }


class _Wrapped(argparse.HelpFormatter):
    """Wraps descriptions, but not the lines of examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("examples:"):
            return text
        return super()._fill_text(text, width, indent)
