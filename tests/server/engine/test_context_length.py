"""The context lengths of configs as models have them."""

from typing import Any

import pytest

from paged_kv.server.engine.context_length import context_length


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 4096, "rope_scaling": None}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"model_type": "mamba"}, None),
        ({"max_position_embeddings": None}, None),
        # Llama 3.1: the length is the scaled one.
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            131072,
        ),
        # Qwen 2.5 with YaRN: it is not.
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32768,
                },
            },
            131072,
        ),
        # DeepSeek V3: it is, and says what it was.
        (
            {
                "max_position_embeddings": 163840,
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 40,
                    "original_max_position_embeddings": 4096,
                },
            },
            163840,
        ),
        # Vicuna 1.5 16K.
        (
            {
                "max_position_embeddings": 4096,
                "max_sequence_length": 16384,
                "rope_scaling": {"type": "linear", "factor": 4.0},
            },
            16384,
        ),
        # Gemma 3, a vision model.
        (
            {
                "model_type": "gemma3",
                "text_config": {
                    "model_type": "gemma3_text",
                    "max_position_embeddings": 131072,
                    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                },
            },
            131072,
        ),
        # Command R.
        ({"max_position_embeddings": 8192, "model_max_length": 131072}, 131072),
    ],
)
def test_the_longest_length_that_a_config_names_counts(
    config: dict[str, Any], length: int | None
) -> None:
    assert context_length(config) == length
