"""`paged-kv server`: an OpenAI-compatible server on paged caches."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paged_kv.server.signals import ending_at_once

if TYPE_CHECKING:
    from paged_kv.server.options import ServerOptions


def add_server_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the subcommand. It gets its options as `others`, unparsed: mlx-lm, which defines
    most of them, takes seconds to load."""
    parser = commands.add_parser(
        "server",
        help="serve OpenAI's API on paged caches, as mlx-lm's server does",
        add_help=False,
        allow_abbrev=False,
    )

    def full_parser() -> argparse.ArgumentParser:
        from paged_kv.server.options import server_parser

        return server_parser()

    parser.set_defaults(run=lambda arguments: run(arguments.others), full_parser=full_parser)


def run(words: Sequence[str]) -> int:
    """Serve as the words of a command line say, until a signal arrives; returns the exit status.

    Raises:
        ValueError: an option is wrong, or does not work with several processes for one model, or
            mlx-lm is too old.
        OSError: the port is in use, or the model is not there.
    """
    from paged_kv.server.options import parsed_server_options

    with ending_at_once():
        options = parsed_server_options(words)
        require_servable(options)
        return _serve(options)


def require_servable(options: ServerOptions) -> None:
    """Raise ValueError or OSError before anything is loaded, if options do not fit together or a
    file is not there."""
    options.cache.require_usable()
    if options.cache.reproducible and options.draft_model:
        raise ValueError(
            "--draft-model does not work with --reproducible: steps that verify drafts round "
            "otherwise than steps of one token. Leave one of them out"
        )
    if options.prefill_from and not options.cache.has_servers:
        raise ValueError(
            "--prefill-from needs a tier that both servers share: add --store redis://... or "
            "s3://..., as the other server has it"
        )
    if options.adapter_path and not Path(options.adapter_path).is_dir():
        raise FileNotFoundError(
            f"there is no folder {options.adapter_path!r}: give --adapter-path the folder of an "
            "adapter, or leave it out"
        )
    options.require_models()
    if options.model is None and not (options.allow_model_switch or options.model_alias):
        raise ValueError(
            "there is nothing to serve: name a --model or a --model-alias, or give "
            "--allow-model-switch"
        )


def require_servable_by(options: ServerOptions, ranks: int) -> None:
    """Raise ValueError if an option does not work with so many processes for one model, or if
    --max-kv-bytes is too small."""
    if ranks == 1:
        from paged_kv.server.engine.model_limits import require_sufficient_budget

        require_sufficient_budget(options)
        return
    # Each holds a part of the model, and finds out when it has loaded it what its pages need.
    for option in ("adapter_path", "allow_model_switch", "model_alias", "prefill_from"):
        if getattr(options, option):
            raise ValueError(
                f"--{option.replace('_', '-')} does not work with several processes for one model: "
                "leave it out, or start the server without mlx.launch"
            )


def prepare_process(options: ServerOptions) -> None:
    """Let a process that will serve write log lines to standard error, each with the id of its
    request, and keep as much memory wired as it may; ValueError if Metal does not allow it."""
    import logging

    from paged_kv.server.http.request_log import OneLine

    _limit_wired_memory(options.wired_limit)
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine())
    logging.basicConfig(level=options.log_level, handlers=[handler], force=True)


def _limit_wired_memory(nbytes: int | None) -> None:
    """Keep so many bytes wired, whatever mlx-lm asks for later; None leaves it to mlx-lm."""
    import mlx.core as mx
    from mlx_lm.utils import maybe_set_recommended_wired_limit

    if nbytes is None:
        maybe_set_recommended_wired_limit()
        return
    if nbytes:
        try:
            mx.set_wired_limit(nbytes)
        except ValueError as error:
            raise ValueError(f"--wired-limit {nbytes} is too much: {error}") from error
    # Its batch generators set the recommended limit, and take it back when they end.
    mx.set_wired_limit = lambda limit: nbytes


def _serve(options: ServerOptions) -> int:
    # All imports come before the first thread.
    from paged_kv.integrations.distributed.connected_ranks import joined_ranks
    from paged_kv.server.engine.paged_model_provider import PagedModelProvider
    from paged_kv.server.lifecycle import follow, run_server

    ranks = joined_ranks()
    require_servable_by(options, ranks.size)
    prepare_process(options)
    provider = PagedModelProvider(options)
    try:
        status = run_server(options, provider) if ranks.rank == 0 else follow(provider)
    except BaseException:
        ranks.abandon()
        raise
    if status:
        ranks.abandon()
    return status
