"""`paged-kv server`: mlx-lm's HTTP server on paged caches."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from paged_kv.arguments import page_format
from paged_kv.sizes import parse_size
from paged_kv.store_command import add_store_options


def add_server_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
) -> None:
    """Register the subcommand. It is given the options that nobody knows as `others`: mlx-lm, which
    knows them, takes seconds to load."""
    parser = commands.add_parser(
        "server",
        help="serve mlx-lm's HTTP API on paged caches",
        add_help=False,
        allow_abbrev=False,
    )
    parser.set_defaults(run=lambda arguments: run(arguments.others))


def run(options: Sequence[str]) -> int:
    """Serve until the process is interrupted; returns the exit status.

    Raises:
        ValueError: the process is one of several that share a model.
    """
    arguments = server_parser().parse_args(options)

    import logging

    import mlx.core as mx
    from mlx_lm.utils import maybe_set_recommended_wired_limit

    from paged_kv.integrations.paged_model_provider import PagedModelProvider
    from paged_kv.integrations.paged_server import serve

    if mx.distributed.init().size() > 1:
        raise ValueError(
            f"there are {mx.distributed.init().size()} processes for one model, and paged caches "
            "serve one: start it without mlx.launch, or use mlx_lm.server"
        )
    maybe_set_recommended_wired_limit()
    logging.basicConfig(
        level=arguments.log_level,
        format="%(asctime)s - %(levelname)s - %(message)s",
        force=True,
    )
    serve(PagedModelProvider(arguments), arguments.host, arguments.port)
    return 0


def server_parser() -> argparse.ArgumentParser:
    """All of mlx-lm's options, and ours."""
    parser = _mlx_lm_parser()
    parser.prog = "paged-kv server"
    parser.description = "mlx-lm's HTTP server on paged caches."
    ours = parser.add_argument_group("paged caches")
    ours.add_argument(
        "--max-kv-bytes",
        type=parse_size,
        help="the most memory for pages, such as 4GB: of all requests, and of what is kept of "
        "earlier prompts. A draft model gets its share of it. States of recurrent layers take up "
        "to a quarter of it besides. (default: 80%% of what the machine recommends, less what is "
        "in use)",
    )
    ours.add_argument(
        "--page-format",
        type=page_format,
        default="fp16",
        help="what pages hold: fp16, the model's own 16 bits, q8 or q4; or two of these for keys "
        "and for values, such as q8/q4; or auto, where the oldest pages of requests become q8 and "
        "then q4 when little memory is left (default: fp16)",
    )
    ours.add_argument(
        "--admission-timeout",
        type=_seconds,
        default=60.0,
        help="seconds that a request waits for memory before it is refused with 503 (default: 60)",
    )
    add_store_options(ours)
    _redefine(
        parser,
        "prompt_cache_size",
        "The most prompts to keep, of those that are not the beginning of another (default: as "
        "many as there is memory for; pages that are needed for requests are taken from them)",
    )
    _redefine(
        parser,
        "prompt_cache_bytes",
        "The most memory for pages of requests and of prompts that are kept; above it, prompts are "
        "forgotten. Requests may take more, up to --max-kv-bytes (default: no limit but that)",
    )
    _redefine(
        parser,
        "kv_bits",
        "Quantize keys and values as mlx-lm does: requests are served one at a time, and prompts "
        "are not reused. --page-format q8 or q4 does without both drawbacks",
    )
    return parser


def _redefine(parser: argparse.ArgumentParser, name: str, meaning: str) -> None:
    """Say what one of mlx-lm's options means with pages; its default becomes None."""
    (action,) = [action for action in parser._actions if action.dest == name]
    action.help, action.default = meaning, None


def _mlx_lm_parser() -> argparse.ArgumentParser:
    """The parser that mlx-lm's `main` makes, and gives to nobody."""
    from mlx_lm import server

    class Found(Exception):
        """Leaves `main` before it serves."""

    def found(parser: argparse.ArgumentParser, *_: Any) -> argparse.Namespace:
        parsers.append(parser)
        raise Found

    parsers: list[argparse.ArgumentParser] = []
    kind, name = argparse.ArgumentParser, "parse_args"
    stock = vars(kind)[name]
    setattr(kind, name, found)
    try:
        with suppress(Found):
            server.main()
    finally:
        setattr(kind, name, stock)
    (parser,) = parsers
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1
    if not seconds >= 0:
        raise argparse.ArgumentTypeError(f"a number of seconds is needed, got {text!r}")
    return seconds
