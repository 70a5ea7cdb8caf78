"""Defines the options of `paged-kv server`: all of mlx-lm's, and those of paged caches."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch
from urllib.parse import urlsplit

from paged_kv.commands.arguments import MOST_SECONDS, Parser, positive
from paged_kv.commands.cache_options import add_cache_options, add_dtype_option, examples
from paged_kv.server.http.access import priorities
from paged_kv.sizes import parse_size

# Of the replayed loads in benches/store_writes.py this halves the bytes written, or better where
# prompts come once, and loses few hits.
STORE_AFTER = 2


def server_parser() -> argparse.ArgumentParser:
    """The parser of all options."""
    parser: argparse.ArgumentParser = Parser(
        "paged-kv server",
        description="Serves OpenAI's API like mlx-lm's server, on paged caches.",
        parents=[_mlx_lm_parser()],
        add_help=False,  # mlx-lm's has it
        **examples(
            "paged-kv server --model mlx-community/Llama-3.2-1B-Instruct-4bit --max-kv-bytes 4GB",
            "paged-kv server --model MODEL --page-format auto --store --api-key env:KEY",
            "paged-kv server --model MODEL --draft-model ngram --num-draft-tokens 8",
        ),
    )
    add_cache_options(
        parser.add_argument_group("paged caches"), after=STORE_AFTER, max_kv_bytes="auto"
    )
    _add_api_options(parser.add_argument_group("models and clients"))
    _add_drafts(parser.add_argument_group("drafts"))
    _add_prefill(parser.add_argument_group("several servers"))
    _add_limits(parser.add_argument_group("limits"))
    _add_responses(parser.add_argument_group("kept responses"))
    _redefine(
        parser,
        "prompt_cache_size",
        "The most prompts to cache, not counting prefixes of others (default: as many as memory "
        "allows; requests evict them when they need their pages)",
    )
    _redefine(
        parser,
        "prompt_cache_bytes",
        "The most memory for pages of requests and cached prompts; above it, prompts are evicted. "
        "Requests alone may take more, up to --max-kv-bytes (default: only --max-kv-bytes)",
    )
    _redefine(
        parser,
        "draft_model",
        "A smaller model with the same vocabulary, or a prediction head of the model, which "
        "drafts tokens for all requests; or head, the one that comes with the model; or auto, the "
        "same if there is one; or ngram, which drafts what followed the same tokens earlier in the "
        "prompt or the answer. Nothing is drafted where it is slower (default: no drafts)",
    )
    _redefine(
        parser,
        "kv_bits",
        "Quantize keys and values as mlx-lm does: requests are served one at a time, and prompts "
        "are not reused. --page-format q8 or q4 has neither drawback",
    )
    return parser


def _add_api_options(group: argparse._ArgumentGroup) -> None:
    add_dtype_option(group)
    group.add_argument(
        "--served-model-name",
        nargs="+",
        default=[],
        metavar="NAME",
        help="other names for the model, in requests and in /v1/models",
    )
    group.add_argument(
        "--model-alias",
        nargs="+",
        type=_alias,
        default=[],
        metavar="NAME=MODEL",
        help="names for other models, each a folder or a repository, which requests by this name "
        "load in the place of the loaded one, also without --allow-model-switch",
    )
    group.add_argument(
        "--allow-model-switch",
        action="store_true",
        help="load any model that a request names, replacing the loaded one. Without this, a "
        "request for another model gets 404",
    )
    group.add_argument(
        "--api-key",
        metavar="FILE",
        help="serve only requests with one of the keys in this file, one a line, or in an "
        "environment variable: env:NAME. Only requests with the same key share prompts. Behind a "
        "key, requests=NUMBER and priorities=LOW:HIGH say what differs from the options "
        "--max-requests-per-key and --priorities",
    )
    group.add_argument(
        "--open-status",
        action="store_true",
        help="with --api-key, answer /kv, /kv/data and /metrics without a key too. They tell of "
        "all clients' requests",
    )
    group.add_argument(
        "--allowed-hosts",
        type=_names,
        default=[],
        metavar="NAME,...",
        help="names under which /kv, /kv/data and /metrics are served, beside addresses and the "
        "names of this machine, such as a service's name in a cluster; * for any name",
    )
    group.add_argument(
        "--skip-system-lines",
        nargs="*",
        default=["x-anthropic-billing-header:"],
        metavar="BEGINNING",
        help="leave out lines with such a beginning at the start of system blocks in /v1/messages. "
        "They change with every request and mean nothing to the model, which would compute the "
        "whole prompt again; without a value, none (default: x-anthropic-billing-header:)",
    )
    group.add_argument(
        "--drop-tools",
        action="store_true",
        help="answer requests with tools without them where the model's chat template has none; "
        "they get 400 otherwise",
    )
    group.add_argument(
        "--allow-image-urls",
        action="store_true",
        help="fetch images that requests name by http URLs, from any host this machine can reach",
    )


def _add_prefill(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--prefill-from",
        type=_http_url,
        metavar="URL",
        help="another paged-kv server, which computes long prompts and publishes their pages in a "
        "tier that both share (--store redis://... or s3://...), such as http://other:8080",
    )
    group.add_argument(
        "--prefill-key",
        metavar="FILE",
        help="with --prefill-from: the API key to send to the other server, in a file or in an "
        "environment variable: env:NAME",
    )
    group.add_argument(
        "--prefill-over",
        type=positive,
        default=2000,
        metavar="TOKENS",
        help="with --prefill-from: hand over prompts with more unknown tokens than this (default: "
        "2000)",
    )


def _add_drafts(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--draft-shared-tokens",
        type=positive,
        default=0,
        metavar="N",
        help="with --draft-model ngram: learn also from the N latest tokens of other requests with "
        "the same cache_salt or API key (default: 0)",
    )


def _add_limits(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--admission",
        choices=["optimistic", "reserve"],
        default="optimistic",
        help="optimistic begins a request when its prompt and a few tokens fit; if memory gets "
        "short later, the latest requests wait, and continue where they were. reserve begins a "
        "request when its prompt and max_tokens fit, and never interrupts it (default: optimistic)",
    )
    group.add_argument(
        "--model-ttl",
        type=_seconds,
        metavar="SECONDS",
        help="unload the model after this time without a request; the next request loads it again "
        "(default: it stays)",
    )
    group.add_argument(
        "--admission-timeout",
        type=_seconds,
        default=60.0,
        help="seconds that a request waits for its turn before it gets 503; 0 refuses requests "
        "that cannot begin at once (default: 60)",
    )
    group.add_argument(
        "--held-share",
        type=_share,
        default=0.5,
        metavar="SHARE",
        help="the largest share of the memory that marks of /v1/messages (cache_control) may hold "
        "until their ttl ends; one API key or cache_salt may hold half of it. Requests that need "
        "the memory get it all the same. 0 holds nothing (default: 0.5)",
    )
    group.add_argument(
        "--max-requests-per-key",
        type=positive,
        metavar="NUMBER",
        help="the most requests with the same API key that run or wait at once, or of all clients "
        "where there are no keys; more get 429 (default: any number)",
    )
    group.add_argument(
        "--priorities",
        type=priorities,
        default=priorities("0:100"),
        metavar="LOW:HIGH",
        help="which priorities requests may ask for; of those that wait, the lowest begins first. "
        "With 0 as LOW clients can only wait longer (default: 0:100)",
    )
    group.add_argument(
        "--shutdown-timeout",
        type=_seconds,
        default=30.0,
        help="seconds that running requests have to finish after SIGTERM or SIGINT; 5 more, and "
        "the process ends whatever it does (default: 30)",
    )
    group.add_argument(
        "--max-body-bytes",
        type=parse_size,
        default=8_000_000,
        help="the longest body of a request; longer ones get 413 (default: 8MB)",
    )
    group.add_argument(
        "--max-prompt-tokens",
        type=positive,
        help="the longest prompt; longer ones get 400 (default: the context length in the model's "
        "config, if it names one)",
    )
    group.add_argument(
        "--max-connections",
        type=positive,
        default=512,
        help="the most connections at once; more get 503 (default: 512)",
    )
    for name, what, default in (
        ("--header-timeout", "the head of a request may take to arrive", 10.0),
        ("--body-timeout", "the body of a request may take to arrive", 60.0),
        ("--write-timeout", "a client may take to read what was sent", 60.0),
    ):
        group.add_argument(
            name,
            type=_seconds,
            default=default,
            help=f"seconds that {what} (default: {default:g})",
        )


def _add_responses(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-responses",
        type=_count,
        default=1000,
        metavar="N",
        help="the most responses of /v1/responses to keep in memory, which clients can continue "
        "and read; 0 keeps none (default: 1000)",
    )
    group.add_argument(
        "--max-response-bytes",
        type=parse_size,
        default=64_000_000,
        metavar="SIZE",
        help="the most bytes of their JSON, requests included (default: 64MB)",
    )
    group.add_argument(
        "--response-ttl",
        type=_seconds,
        default=86_400.0,
        metavar="SECONDS",
        help="forget a response after this time (default: 86400)",
    )


def _redefine(parser: argparse.ArgumentParser, name: str, meaning: str) -> None:
    """Replace the help text of one of mlx-lm's options; its default becomes None."""
    (action,) = [action for action in parser._actions if action.dest == name]
    action.help, action.default = meaning, None


class _Stopped(Exception):
    """Leaves mlx-lm's `main` where it would parse its options and serve."""


class _UnusedParser(argparse.ArgumentParser):
    def parse_args(self, *_: Any) -> NoReturn:  # type: ignore[override]  # it never returns
        raise _Stopped(self)


def _mlx_lm_parser() -> argparse.ArgumentParser:
    """The parser that mlx-lm's `main` makes but does not return.

    A copy of its options would lack those that a later mlx-lm adds. So `main` runs with a parser
    that stops it when it would parse. Only mlx-lm's server sees that parser.
    """
    from mlx_lm import server

    known = vars(argparse) | {"ArgumentParser": _UnusedParser}
    with patch.object(server, "argparse", SimpleNamespace(**known)):
        try:
            server.main()
        except _Stopped as stopped:
            parser: argparse.ArgumentParser = stopped.args[0]
            return parser
    raise AssertionError("mlx-lm's server has ended without parsing its options")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _http_url(text: str) -> str:
    url = urlsplit(text)
    if url.scheme not in ("http", "https") or not url.hostname or url.username or url.query:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not the address of a server, such as http://other:8080"
        )
    return text


def _alias(text: str) -> tuple[str, str]:
    name, _, model = text.partition("=")
    if not name or not model:
        raise argparse.ArgumentTypeError(f"NAME=MODEL is needed, got {text!r}")
    return name, model


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"a number from 0 on is needed, got {text!r}")
    return int(text)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"a share from 0 to 1 is needed, got {text!r}")
    return share


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1
    if not 0 <= seconds <= MOST_SECONDS:
        raise argparse.ArgumentTypeError(
            f"a number of seconds is needed, up to {MOST_SECONDS:,.0f}, got {text!r}"
        )
    return seconds
