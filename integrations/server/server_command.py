"""`paged-kv server`: an OpenAI-compatible server on paged caches."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from paged_kv.commands.cache_options import require_complete


def add_server_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
) -> None:
    """Register the subcommand. It gets its options as `others`, unparsed: mlx-lm, which defines
    most of them, takes seconds to load."""
    parser = commands.add_parser(
        "server",
        help="serve OpenAI's API on paged caches, as mlx-lm's server does",
        add_help=False,
        allow_abbrev=False,
    )
    parser.set_defaults(run=lambda arguments: run(arguments.others), full_parser=_full_parser)


def _full_parser() -> argparse.ArgumentParser:
    from paged_kv.integrations.server.options import server_parser

    return server_parser()


def run(options: Sequence[str]) -> int:
    """Serve until a signal arrives; returns the exit status.

    Raises:
        ValueError: an option is wrong, or the process is one of several that share a model.
        OSError: the port is in use, or the model is not there.
    """
    arguments = _full_parser().parse_args(options)
    require_complete(arguments)

    import logging

    import mlx.core as mx
    from mlx_lm.utils import maybe_set_recommended_wired_limit

    from paged_kv.integrations.server.generation.paged_model_provider import PagedModelProvider
    from paged_kv.integrations.server.http.request_log import FORMAT, RequestIds
    from paged_kv.integrations.server.lifecycle import run_server

    if mx.distributed.init().size() > 1:
        raise ValueError(
            f"there are {mx.distributed.init().size()} processes for one model, and paged caches "
            "serve one: start it without mlx.launch, or use mlx_lm.server"
        )
    if arguments.model is None and not arguments.allow_model_switch:
        raise ValueError("there is nothing to serve: name a --model, or --allow-model-switch")
    maybe_set_recommended_wired_limit()
    logging.basicConfig(level=arguments.log_level, format=FORMAT, force=True)
    for handler in logging.getLogger().handlers:
        handler.addFilter(RequestIds())
    return run_server(arguments, PagedModelProvider(arguments))
