"""Finds the context length of a model in its config."""

from __future__ import annotations

from typing import Any

# Where the configs of vision models keep that of the language model.
_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")

# The names that configs have for it, as vLLM looks for them.
_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_seq_length",
    "max_sequence_length",
    "seq_length",
    "model_max_length",
)

# Of these kinds of rotary embeddings the config names the length after scaling.
_SCALED = ("longrope", "su", "llama3", "default", "mrope")


def context_length(config: dict[str, Any]) -> int | None:
    """The most tokens that a model was made for; None if its config does not say.

    Follows vLLM's `_get_and_verify_max_len`, but of several lengths the longest counts: this is
    for refusing prompts.
    """
    parts = [config, *[config[part] for part in _PARTS if isinstance(config.get(part), dict)]]
    return max((length for part in parts for length in _lengths(part)), default=None)


def _lengths(config: dict[str, Any]) -> list[int]:
    lengths = [config[name] for name in _NAMES if _is_length(config.get(name))]
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind, factor = scaling.get("rope_type", scaling.get("type")), scaling.get("factor")
    is_scaled = kind in _SCALED or str(config.get("model_type")).startswith("gemma3")
    if is_scaled or not lengths or not isinstance(factor, int | float):
        return lengths
    unscaled = (scaling.get(f"original_{_NAMES[0]}"), config.get(_NAMES[0]))
    base = next((each for each in unscaled if each is not None and _is_length(each)), max(lengths))
    return [*lengths, int(base * factor)]


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
