"""The context lengths of configs as models have them."""

from typing import Any

import pytest

from paged_kv.server.engine.paged_model_provider import context_length


def scaled(length: int, kind: str, factor: float, original: int | None = None) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    return {"max_position_embeddings": length, "rope_scaling": scaling}


GEMMA = {"model_type": "gemma3_text", **scaled(131072, "linear", 8.0)}


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 4096, "rope_scaling": None}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"model_type": "mamba"}, None),
        ({"max_position_embeddings": None}, None),
        # Llama 3.1: the length is the scaled one. DeepSeek V3: so it is, and says what it was.
        (scaled(131072, "llama3", 8.0, 8192), 131072),
        (scaled(163840, "yarn", 40, 4096), 163840),
        # Qwen 2.5 with YaRN: it is not.
        (scaled(32768, "yarn", 4.0, 32768), 131072),
        # Vicuna 1.5 16K.
        ({**scaled(4096, "linear", 4.0), "max_sequence_length": 16384}, 16384),
        # Gemma 3, a vision model.
        ({"model_type": "gemma3", "text_config": GEMMA}, 131072),
        # Command R.
        ({"max_position_embeddings": 8192, "model_max_length": 131072}, 131072),
    ],
)
def test_the_longest_length_that_a_config_names_counts(
    config: dict[str, Any], length: int | None
) -> None:
    assert context_length(config) == length
