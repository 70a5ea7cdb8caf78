"""Fields of other servers: those that mean nothing here, and older names for what there is."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache

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
