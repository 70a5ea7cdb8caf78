"""Reads a request's body with limits of size and time, checks it against its schema, and notices
that its client leaves.

A body may have fields of other servers that mean nothing here, and no others: they would change the
answer if they worked.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
import zlib
from collections.abc import Coroutine, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

import pydantic_core
from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from paged_kv.server.http.api_errors import APIError, from_validation, shortened, wrong_value
from paged_kv.server.http.schema import BodyFields

log = logging.getLogger(__name__)

Kind = TypeVar("Kind", bound=BodyFields)

# Most clients read an error only after sending the whole body, so discard up to so many times the
# limit.
MOST_DISCARDED = 8

# Of texts, and of objects and lists. Reading, copying and freeing 500,000 keys or lists holds
# Python's lock, and with it the event loop, for up to 0.6 s. Honest requests have hundreds for each
# tool and a few for each message.
MOST_PARTS = 100_000
# Fields whose values are the client's own, in which null is a value: schemas, arguments of calls,
# variables of templates, tokens.
_OWN = frozenset(
    {
        *("arguments", "chat_template_kwargs", "input_schema", "json", "logit_bias", "metadata"),
        *("parameters", "prompt", "schema", "tokens"),
    }
)

# What may be a number beyond any float, which JSON can hold.
_LARGE = re.compile(rb"[0-9][eE]\+?[0-9]{3}|(?<![0-9])[0-9]{309}")

# Values after another one. Prompts of token ids have many, which are quick to read.
MOST_COMMAS = 2_000_000


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """The bytes of a body, decoded, at most so many. Raises APIError 413 or 408: it is too long or
    arrives too slowly, 415 or 400: it has an unknown encoding, or not the one that it names; and
    ClientDisconnect: the client has left."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(request, max_bytes)
    except TimeoutError:
        raise APIError(
            408, f"the body did not arrive in {timeout_s:g} s", code="timeout", headers=_CLOSE
        ) from None


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run work for a client whose request was received completely. Raises ClientDisconnect: the
    client has left, and the work was cancelled."""
    left = asyncio.ensure_future(_disconnected(receive))
    working = asyncio.ensure_future(work)
    try:
        await asyncio.wait({left, working}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        working.result()
    finally:
        left.cancel()
        working.cancel()
        await asyncio.gather(left, working, return_exceptions=True)


def parse_body(content: bytes, kind: type[Kind]) -> Kind:
    """The bytes of a body as an object of a schema. Raises APIError 400: the body is not JSON, has
    too many values or a number beyond any float, or does not fit the schema."""
    fields = parsed_json(content)
    body = checked(fields, kind)
    if _LARGE.search(content):
        _require_finite(fields)
    return body


def parsed_json(content: bytes) -> dict[str, Any]:
    """The fields of a body, without those that are null, at any depth. Raises APIError 400: the
    body is not JSON, not an object, or has too many values."""
    _require_few_values(content)
    try:
        fields: Any = pydantic_core.from_json(content, allow_inf_nan=False)
    except ValueError as error:
        raise wrong_value(f"the body is not JSON in UTF-8: {error}") from None
    if not isinstance(fields, dict):
        raise wrong_value("the body must be a JSON object")
    _drop_nulls(fields)
    return fields


def checked(fields: dict[str, Any], kind: type[Kind]) -> Kind:
    """The fields of a body as an object of a schema. Raises APIError 400: they do not fit it, or
    some ask for what the server does not do."""
    for name, value in fields.items():
        if name not in kind.model_fields:
            _require_no_meaning(name, value)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise from_validation(error, fields) from None


# Fields of these interfaces that change no token of an answer: accounts, caches and speed.
IGNORED = frozenset(
    {
        # OpenAI
        *("access_programs", "client_metadata", "max_tool_calls", "metadata", "prediction"),
        *("prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier"),
        "user",
        # Anthropic
        *("diagnostics", "inference_geo", "speed", "user_profile_id", "workspace_id"),
    }
)

# They ask how another server holds a model or spends its time, or how many words a hosted model
# makes. No answer is wrong without them, and clients cannot always leave them out.
FOREIGN = frozenset(
    {
        # OpenAI
        "verbosity",
        # Ollama
        *("keep_alive", "num_ctx", "num_batch", "num_gpu", "num_keep", "num_thread", "main_gpu"),
        *("low_vram", "numa", "use_mlock", "use_mmap"),
        # llama.cpp and LM Studio
        *("cache_prompt", "id_slot", "return_progress", "slot_id", "timings_per_token", "ttl"),
        # vLLM and SGLang
        *("kv_transfer_params", "request_id", "rid"),
        # OpenRouter and LiteLLM
        *("num_retries", "provider", "route", "transforms"),
    }
)

# Fields that may have these values alone, which ask for what the server does anyway. Completions
# have no tools to choose from.
ONLY: Mapping[str, Sequence[Any]] = {
    "add_generation_prompt": [True],
    "background": [False],
    "bad_words": [[]],
    "best_of": [1],
    "context_management": [[], {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}],
    "continue_final_message": [False],
    "echo": [False],
    "include_stop_str_in_output": [False],
    "length_penalty": [1],
    "mcp_servers": [[]],
    "modalities": [["text"]],
    "parallel_tool_calls": [True],
    "skip_special_tokens": [True],
    "suffix": [""],
    "thread": [{"type": "create"}],
    "tool_choice": ["auto", "none"],
    "truncation": ["disabled"],
    "use_beam_search": [False],
}

# vLLM's older fields, and what `structured_outputs` calls them.
_GUIDED: Mapping[str, str] = {
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json": "json",
    "guided_json_object": "json_object",
    "guided_regex": "regex",
}


@cache
def record_foreign(field: str) -> None:
    """Log once that a field of `FOREIGN` means nothing here."""
    log.warning("requests have the field %s of other servers, which means nothing here", field)


def _require_no_meaning(name: str, value: Any) -> None:
    """Raise APIError for a field that is not in the schema, unless it asks for nothing else than
    what the server does."""
    if name in IGNORED or value in ONLY.get(name, ()):
        return
    if name in FOREIGN:
        record_foreign(name)
        return
    field = shortened(name).strip("'\"")
    if name not in ONLY:
        remedy = "leave it out"
        if name in _GUIDED:
            remedy = f'send structured_outputs: {{"{_GUIDED[name]}": ...}}, as for newer vLLM'
        elif name.startswith("guided_"):
            remedy = "structured_outputs needs no such setting: leave it out"
        raise wrong_value(f"{field}: this server has no such field: {remedy}", field)
    possible = " or ".join(map(repr, ONLY[name]))
    raise wrong_value(
        f"{field}: only {possible} is possible here, got {shortened(value)}: leave it out", field
    )


_CLOSE = {"Connection": "close"}


def _drop_nulls(value: Any) -> None:
    """Clients send answers back with all that their packages know of, and most of that is null."""
    if isinstance(value, list):
        for each in value:
            if isinstance(each, dict | list):
                _drop_nulls(each)
    elif isinstance(value, dict):
        for name in [name for name, each in value.items() if each is None]:
            del value[name]
        for name, each in value.items():
            # The input of a call of Messages is an object, that of Responses a list of items.
            if name not in _OWN and not (name == "input" and isinstance(each, dict)):
                _drop_nulls(each)


def _require_finite(fields: Mapping[str, Any]) -> None:
    """Raise APIError if a number that a schema leaves open, as those in schemas of tools, became
    infinite: no answer could repeat it, and no template could write it."""
    try:
        json.dumps(fields, allow_nan=False)
    except ValueError:
        raise wrong_value("the body has a number beyond 1.8e308: send a smaller one") from None


def _require_few_values(content: bytes) -> None:
    """Raise APIError if JSON has more values than a request needs, whatever its texts hold."""
    bare = content.replace(b"\\\\", b"").replace(b'\\"', b"")
    texts = bare.count(b'"') // 2
    _require_at_most(MOST_PARTS, texts, "texts")
    structure = b"".join(bare.split(b'"')[::2])
    lists = structure.count(b"{") + structure.count(b"[")
    _require_at_most(MOST_PARTS, lists, "objects and lists")
    _require_at_most(MOST_COMMAS, structure.count(b","), "commas between values")


def _require_at_most(most: int, number: int, what: str) -> None:
    if number > most:
        raise wrong_value(
            f"the body has {number:,} {what}, and at most {most:,} are possible: send less in one "
            "request"
        )


async def _read(request: Request, max_bytes: int) -> bytes:
    too_long = APIError(
        413,
        f"the body has more than {max_bytes} bytes: send less, or start the server with a larger "
        "--max-body-bytes",
        code="too_large",
        headers=_CLOSE,
    )
    decoder = BodyDecoder(", ".join(request.headers.getlist("content-encoding")))
    content, received = bytearray(), 0
    try:
        async for part in request.stream():
            received += len(part)
            if received > MOST_DISCARDED * max_bytes:
                break
            if len(content) <= max_bytes:
                content += decoder.decode(part, max_bytes + 1 - len(content))
    except ClientDisconnect:
        if len(content) > max_bytes:
            raise too_long from None
        raise
    if len(content) > max_bytes:
        raise too_long
    decoder.require_end()
    return bytes(content)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


ENCODINGS = "gzip, deflate, zstd"

# zlib finds out by the first bytes which of its two containers it is.
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS
# The window that a sender may ask for is memory of this process: 8 MB, as RFC 9659 says.
_WINDOW_LOG = 23
_ZSTD = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"


class BodyDecoder:
    """Decodes one body of a `Content-Encoding`, empty if it is not compressed, part by part. Raises
    APIError 415: the server does not know it."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding.strip().lower()
        self._decoder = _decoder(self._encoding)

    def decode(self, part: bytes, most: int) -> bytes:
        """What the next part adds, up to `most` bytes. Who gets so many asks for no more. Raises
        APIError 400: it is not in this encoding."""
        if self._decoder is None or not part:
            return part[:most]
        if self._decoder.eof:
            raise self._wrong("something follows its end")
        try:
            decoded: bytes = self._decoder.decompress(part, most)
        except Exception as error:  # zlib and zstd have one of their own each
            raise self._wrong(str(error)) from None
        return decoded

    def require_end(self) -> None:
        """Raise APIError 400 unless the body has ended where its encoding does."""
        if self._decoder is not None and not self._decoder.eof:
            raise self._wrong("its end is missing")
        if self._decoder is not None and self._decoder.unused_data:
            raise self._wrong("something follows its end")

    def _wrong(self, why: str) -> APIError:
        return wrong_value(f"the body is not in {self._encoding}, as Content-Encoding says: {why}")


def _decoder(encoding: str) -> Any:
    """What decodes an encoding; None for a body as it is."""
    if encoding in ("", "identity"):
        return None
    if encoding in ("gzip", "deflate"):
        return zlib.decompressobj(_GZIP_OR_ZLIB)
    if encoding != "zstd":
        raise _unsupported(f"Content-Encoding {shortened(encoding)}: send one of {ENCODINGS}")
    try:
        zstd = import_module(_ZSTD)
    except ImportError:
        extra = "install it with the extra zstd: pip install 'paged-kv[zstd]'"
        raise _unsupported(f"this server reads no zstd: send gzip, or {extra}") from None
    options = {zstd.DecompressionParameter.window_log_max: _WINDOW_LOG}
    return zstd.ZstdDecompressor(options=options)


def _unsupported(message: str) -> APIError:
    code, headers = "unsupported_encoding", {"Accept-Encoding": ENCODINGS}
    return APIError(415, message, code=code, headers=headers)
