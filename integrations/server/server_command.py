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
        ValueError: an option is wrong, or does not work with several processes for one model, or
            mlx-lm is too old.
        OSError: the port is in use, or the model is not there.
    """
    arguments = _full_parser().parse_args(options)
    _require_mlx_lm()
    require_complete(arguments)

    import logging

    from mlx_lm.utils import maybe_set_recommended_wired_limit

    from paged_kv.integrations.distributed.meeting import joined_ranks
    from paged_kv.integrations.server.generation.paged_model_provider import PagedModelProvider
    from paged_kv.integrations.server.http.request_log import FORMAT, RequestIds
    from paged_kv.integrations.server.lifecycle import follow, run_server

    ranks = joined_ranks()
    if ranks.size > 1:
        _require_shareable(arguments)
    if arguments.model is None and not arguments.allow_model_switch:
        raise ValueError("there is nothing to serve: name a --model, or --allow-model-switch")
    maybe_set_recommended_wired_limit()
    logging.basicConfig(level=arguments.log_level, format=FORMAT, force=True)
    for handler in logging.getLogger().handlers:
        handler.addFilter(RequestIds())
    provider = PagedModelProvider(arguments)
    try:
        status = run_server(arguments, provider) if ranks.rank == 0 else follow(provider)
    except BaseException:
        ranks.abandon()
        raise
    if status:
        ranks.abandon()
    return status


def _require_mlx_lm() -> None:
    """Raise ValueError if mlx-lm's server is older than the one that this one builds on."""
    import mlx_lm

    if tuple(map(int, mlx_lm.__version__.split(".")[:3])) < (0, 32, 1):
        raise ValueError(
            f"the server needs mlx-lm 0.32.1 or newer, and mlx-lm {mlx_lm.__version__} is "
            "installed: pip install --upgrade mlx-lm"
        )


def _require_shareable(arguments: argparse.Namespace) -> None:
    """Raise ValueError if an option does not work with a model that several processes share."""
    for option in ("adapter_path", "draft_model", "allow_model_switch"):
        if getattr(arguments, option):
            raise ValueError(
                f"--{option.replace('_', '-')} does not work with several processes for one model: "
                "leave it out, or start the server without mlx.launch"
            )
