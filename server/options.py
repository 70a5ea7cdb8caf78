"""The options of `paged-kv server`: mlx-lm's server's, those of paged caches, and its own."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from paged_kv.checks import parse_size
from paged_kv.integrations.cache_options import CacheOptions
from paged_kv.options import (
    ModelOptions,
    Parser,
    PriorityRange,
    add_options,
    count,
    duration,
    examples,
    named_model,
    option,
    parsed_options,
    part,
    positive,
    priorities,
    seconds,
    share,
    temperature,
)
from paged_kv.pool.options import AUTO, PoolOptions
from paged_kv.store.options import StoreOptions

# Of the replayed loads in benches/store_writes.py this halves the bytes written, or better where
# prompts come once, and loses few hits.
STORE_AFTER = 2


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _port(text: str) -> int:
    port = count(text)
    if port > 65535:
        raise ValueError(f"{text} is no port: give one up to 65535, or 0 for any free one")
    return port


def _http_url(text: str) -> str:
    url = urlsplit(text)
    is_complete = url.scheme in ("http", "https") and url.hostname and url.port != 0
    if not is_complete or url.username or url.query:
        raise ValueError(f"{text!r} is not the address of a server, such as http://other:8080")
    return text


def _reserved(text: str) -> float:
    """A share, or one of the two words for 0 and 1."""
    words = {"optimistic": 0.0, "reserve": 1.0}
    return words[text] if text in words else share(text)


def _part(text: str) -> float:
    """A share that is less than the whole."""
    if (value := share(text)) < 1:
        return value
    raise ValueError(f"a number from 0 to less than 1 is needed, got {text!r}")


def _wired(text: str) -> int | None:
    """Bytes of wired memory: 0 for "off", and None for "auto"."""
    return None if text == "auto" else 0 if text == "off" else parse_size(text)


def _alias(text: str) -> tuple[str, str]:
    name, _, model = text.partition("=")
    if not name or not model:
        raise ValueError(f"NAME=MODEL is needed, got {text!r}")
    return name, named_model(model)


def _template_arguments(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError("""a JSON object such as '{"enable_thinking": false}' is needed""")
    return found


@dataclass(frozen=True)
class ServerOptions(ModelOptions):
    """How a server serves.

    Attributes:
        adapter_path: the folder of an adapter's weights and configuration.
        host: the name or address to listen at.
        port: the port to listen at; 0 takes a free one.
        allowed_origins: origins whose web pages may send requests, with commas between them.
        num_draft_tokens: the most tokens to draft for a request in a step.
        trust_remote_code: run the code that a tokenizer comes with.
        log_level: the least severe level to log.
        chat_template: the chat template, in the place of the tokenizer's.
        use_default_chat_template: use the tokenizer's default chat template where it has no other.
        temp: the temperature where a request names none.
        top_p: top_p where a request names none.
        top_k: top_k where a request names none; 0 for all tokens.
        min_p: min_p where a request names none.
        max_tokens: the most tokens of an answer where a request names no number.
        chat_template_args: variables of the chat template, as JSON, such as '{"enable_thinking":
            false}'.
        decode_concurrency: the most requests that decode as one batch.
        prompt_concurrency: the most prompts that are read as one batch.
        prefill_step_size: the most tokens of a prompt step.
        prompt_cache_size: the most prompts to cache, not counting prefixes of others.
        prompt_cache_bytes: the most memory for pages of requests and cached prompts; above it,
            prompts are evicted. Requests alone may take more, up to --max-kv-bytes.
        kv_bits: mlx-lm's name for --page-format: 8 is q8, and 4 is q4.
        kv_group_size: no effect here: quantised pages have their own groups.
        quantized_kv_start: no effect here: a page is quantised once it is full.
        pipeline: let processes that share a model have some layers each, and not a part of every
            one.
        cache: the options of its caches.
        served_model_name: other names for the model, in requests and in /v1/models.
        model_alias: names for other models, each a folder or a repository, which requests by this
            name load in the place of the loaded one, also without --allow-model-switch.
        allow_model_switch: load any model that a request names, replacing the loaded one. Without
            this, a request for another model gets 404.
        api_key: serve only requests with one of the keys in this file, one a line, or in an
            environment variable: env:NAME. Only requests with the same key share prompts. Behind a
            key, requests=NUMBER and priorities=LOW:HIGH say what differs from the options
            --max-requests-per-key and --priorities.
        open_status: answer /kv, /kv/data and /metrics without a key too. They tell of all clients'
            requests.
        allowed_hosts: names under which /kv, /kv/data and /metrics are served, beside addresses and
            the names of this machine, such as a service's name in a cluster; * for any name.
        skip_system_lines: leave out lines with such a beginning at the start of system blocks in
            /v1/messages. They change with every request and mean nothing to the model, which would
            compute the whole prompt again; without a value, none.
        drop_tools: answer requests with tools without them where the model's chat template has
            none; they get 400 otherwise.
        allow_image_urls: fetch images that requests name by http URLs, from any host this machine
            can reach.
        draft_shared_tokens: with --draft-model ngram: learn also from the N latest tokens of other
            requests with the same cache_salt or API key.
        prefill_from: another paged-kv server, which computes long prompts and publishes their pages
            in a tier that both share (--store redis://... or s3://...), such as http://other:8080.
        prefill_key: the API key to send to the other server, in a file or in an environment
            variable: env:NAME.
        prefill_over: hand over prompts with more unknown tokens than this.
        admission: the share of an answer's max_tokens that memory must hold, beside its prompt and
            a few tokens, for a request to begin. With 0 (or: optimistic) most requests run at a
            time; if memory gets short later, the latest ones wait, and continue where they were.
            With 1 (or: reserve) none is interrupted.
        decode_share: the share of the time that running answers have a right to while a prompt is
            computed, from 0 to less than 1; with 0.5 a third beside two prompts, and so on. So
            nobody's answer stands still for a long prompt of somebody else. With 0 a step computes
            as much of the prompts as --prefill-step-size says.
        prepare_next: compute what the next turn of a chat begins with while no request is there, so
            that it waits only for its own message: "on" or "off". It is off on battery power, where
            several processes share the model, and when later prompts find too little of it.
        model_ttl: unload the model after this time without a request; the next request loads it
            again.
        admission_timeout: seconds that a request waits for its turn before it gets 503; 0 refuses
            requests that cannot begin at once.
        step_timeout: a step that takes longer, and 20 times as long as the latest ones, hangs:
            /health answers 503, and the log names the step's sequences.
        wired_limit: how much memory to keep wired: "off", "auto" for as much as Metal recommends,
            or a size. Wired memory is not compressed or swapped, but panics of macOS's kernel were
            traced to it, under loads of several clients.
        held_share: the largest share of the memory that marks of /v1/messages (cache_control) may
            hold until their ttl ends; one API key or cache_salt may hold half of it. Requests that
            need the memory get it all the same. 0 holds nothing.
        max_requests_per_key: the most requests with the same API key that run or wait at once, or
            of all clients where there are no keys; more get 429.
        priorities: which priorities requests may ask for; of those that wait, the lowest begins
            first. With 0 as LOW clients can only wait longer; a lower one is given as
            --priorities=-10:100.
        shutdown_timeout: seconds that running requests have to finish after SIGTERM or SIGINT; 5
            more, and the process ends whatever it does.
        max_body_bytes: the longest body of a request; longer ones get 413.
        max_prompt_tokens: the longest prompt; longer ones get 400.
        max_connections: the most connections at once; more get 503.
        header_timeout: seconds that the head of a request may take to arrive.
        body_timeout: seconds that the body of a request may take to arrive.
        write_timeout: seconds that a client may take to read what was sent.
        max_responses: the most responses of /v1/responses to keep in memory, which clients can
            continue and read; 0 keeps none.
        max_response_bytes: the most bytes of the JSON of kept responses, requests included.
        response_ttl: forget a response after this time.
    """

    # Those of mlx-lm's server, most of which its classes read: they keep its names and defaults.
    adapter_path: str | None = option(None)
    host: str = option("127.0.0.1")
    port: int = option(8080, parse=_port)
    allowed_origins: Sequence[str] = option(("*",), parse=_names, usual="*")
    num_draft_tokens: int = option(3, parse=count)
    trust_remote_code: bool = option(False)
    log_level: str = option("INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"])
    chat_template: str = option("")
    use_default_chat_template: bool = option(False)
    temp: float = option(0.0, parse=temperature)
    top_p: float = option(1.0, parse=share)
    top_k: int = option(0, parse=count)
    min_p: float = option(0.0, parse=share)
    max_tokens: int = option(512, parse=count)
    chat_template_args: dict[str, Any] = option({}, parse=_template_arguments)
    decode_concurrency: int = option(32, parse=positive)
    prompt_concurrency: int = option(8, parse=positive)
    prefill_step_size: int = option(2048, parse=positive)
    prompt_cache_size: int | None = option(
        None,
        parse=count,
        usual="as many as memory allows; requests evict them when they need their pages",
    )
    prompt_cache_bytes: int | None = option(None, parse=parse_size, usual="only --max-kv-bytes")
    kv_bits: int | None = option(None, parse=positive)
    kv_group_size: int = option(64, parse=positive)
    quantized_kv_start: int = option(5000, parse=count)
    pipeline: bool = option(False)

    cache: CacheOptions = part(
        CacheOptions(max_bytes=AUTO, store_options=StoreOptions(after=STORE_AFTER)),
        group="paged caches",
    )

    served_model_name: Sequence[str] = option(
        (), group="models and clients", nargs="+", metavar="NAME"
    )
    model_alias: Sequence[tuple[str, str]] = option(
        (), parse=_alias, nargs="+", metavar="NAME=MODEL"
    )
    allow_model_switch: bool = option(False)
    api_key: str | None = option(None, metavar="FILE")
    open_status: bool = option(False, needs="api_key")
    allowed_hosts: Sequence[str] = option((), parse=_names, metavar="NAME,...")
    skip_system_lines: Sequence[str] = option(
        ("x-anthropic-billing-header:",),
        usual="x-anthropic-billing-header:",
        nargs="*",
        metavar="BEGINNING",
    )
    drop_tools: bool = option(False)
    allow_image_urls: bool = option(False)
    draft_shared_tokens: int = option(
        0, parse=positive, group="drafts", metavar="N", needs="draft_model"
    )
    prefill_from: str | None = option(None, parse=_http_url, group="several servers", metavar="URL")
    prefill_key: str | None = option(None, metavar="FILE", needs="prefill_from")
    prefill_over: int = option(2000, parse=positive, metavar="TOKENS", needs="prefill_from")
    admission: float = option(0.0, parse=_reserved, group="limits", metavar="SHARE")
    decode_share: float = option(0.5, parse=_part, metavar="SHARE")
    prepare_next: str = option("on", choices=["off", "on"])
    model_ttl: float | None = option(None, parse=duration, usual="it stays", metavar="SECONDS")
    admission_timeout: float = option(60.0, parse=duration)
    step_timeout: float = option(120.0, parse=duration, metavar="SECONDS")
    wired_limit: int | None = option(0, parse=_wired, usual="off", metavar="off|auto|BYTES")
    held_share: float = option(0.5, parse=share, metavar="SHARE")
    max_requests_per_key: int | None = option(
        None, parse=positive, usual="any number", metavar="NUMBER"
    )
    priorities: PriorityRange = option(
        PriorityRange(0, 100), parse=priorities, usual="0:100", metavar="LOW:HIGH"
    )
    shutdown_timeout: float = option(30.0, parse=duration)
    max_body_bytes: int = option(8_000_000, parse=parse_size, usual="8MB")
    max_prompt_tokens: int | None = option(
        None, parse=positive, usual="the context length in the model's config, if it names one"
    )
    max_connections: int = option(512, parse=positive)
    header_timeout: float = option(10.0, parse=seconds)
    body_timeout: float = option(60.0, parse=seconds)
    write_timeout: float = option(60.0, parse=seconds)
    max_responses: int = option(1000, parse=count, group="kept responses", metavar="N")
    max_response_bytes: int = option(64_000_000, parse=parse_size, usual="64MB", metavar="SIZE")
    response_ttl: float = option(86_400.0, parse=duration, metavar="SECONDS")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_bits is None:
            return
        page_format = f"q{self.kv_bits}"
        if self.cache.page_format not in (PoolOptions.page_format, page_format):
            raise ValueError(
                f"--kv-bits {self.kv_bits} is --page-format {page_format}, and --page-format "
                f"{self.cache.page_format} was given: leave one of them out"
            )
        object.__setattr__(self, "cache", replace(self.cache, page_format=page_format))


SERVER_OPTIONS = ServerOptions()


def server_parser() -> argparse.ArgumentParser:
    """The parser of all options."""
    parser: argparse.ArgumentParser = Parser(
        "paged-kv server",
        description="Serves OpenAI's API like mlx-lm's server, on paged caches.",
        **examples(
            "paged-kv server --model mlx-community/Llama-3.2-1B-Instruct-4bit --max-kv-bytes 4GB",
            "paged-kv server --model MODEL --page-format auto --store --api-key env:KEY",
            "paged-kv server --model MODEL --draft-model ngram --num-draft-tokens 8",
        ),
    )
    add_options(parser, SERVER_OPTIONS)
    return parser


def parsed_server_options(words: Sequence[str]) -> ServerOptions:
    """The options that the words of a command line give. A wrong one ends the process.

    Raises:
        ValueError: an option is given without the one that it needs.
    """
    return parsed_options(server_parser().parse_args(words), SERVER_OPTIONS)
