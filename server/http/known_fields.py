"""Refuses fields of a body that ask for what the server does not do. Fields of other servers that
mean nothing here are taken, and for older names the error says what there is."""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping
from functools import cache
from typing import Any

from paged_kv.server.http.api_errors import shortened, wrong_value

log = logging.getLogger(__name__)

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

# vLLM's older fields, and what `structured_outputs` calls them.
_GUIDED: Mapping[str, str] = {
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json": "json",
    "guided_json_object": "json_object",
    "guided_regex": "regex",
}


@cache
def note_foreign(field: str) -> None:
    """Log once that a field of `FOREIGN` means nothing here."""
    log.warning("requests have the field %s of other servers, which means nothing here", field)


def newer_name(field: str) -> str | None:
    """What to send in the place of a field of older clients; None for any other field."""
    if field in _GUIDED:
        return f'send structured_outputs: {{"{_GUIDED[field]}": ...}}, as for newer vLLM'
    if field.startswith("guided_"):
        return "structured_outputs needs no such setting: leave it out"
    return None


# Fields that no token of an answer depends on: they are for OpenAI's accounts, caches and speed.
WITHOUT_MEANING = frozenset(
    {
        "metadata",
        "prediction",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "user",
    }
)

# Fields of OpenAI's API and of vLLM's that may have one value: what the server does anyway.
ONLY: Mapping[str, Any] = {
    "add_generation_prompt": True,
    "bad_words": [],
    "best_of": 1,
    "continue_final_message": False,
    "echo": False,
    "include_stop_str_in_output": False,
    "length_penalty": 1,
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "skip_special_tokens": True,
    "suffix": "",
    "tool_choice": "auto",
    "use_beam_search": False,
}


def require_known(
    fields: Mapping[str, Any],
    names: Container[str],
    *,
    without_meaning: Container[str] = WITHOUT_MEANING,
    only: Mapping[str, Any] = ONLY,
) -> None:
    """Check that each field of a body is null, one of the schema's names, or asks for nothing else.

    Args:
        without_meaning: fields that no token of an answer depends on.
        only: fields that may have one value.

    Raises:
        APIError: 400, with the first field that is none of these.
    """
    for name, value in fields.items():
        if value is None or name in names or name in without_meaning:
            continue
        if name in FOREIGN:
            note_foreign(name)
            continue
        field = shortened(name).strip("'\"")
        if name not in only:
            remedy = newer_name(name) or "leave it out"
            raise wrong_value(f"{field}: this server has no such field: {remedy}", field)
        if not (value == only[name] or _has_no_tools(fields, name, value)):
            raise wrong_value(
                f"{field}: only {only[name]!r} is possible here, got {shortened(value)}: leave it "
                "out",
                field,
            )


def _has_no_tools(fields: Mapping[str, Any], name: str, value: Any) -> bool:
    return name == "tool_choice" and value == "none" and not fields.get("tools")
