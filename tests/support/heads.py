"""Makes prediction heads with random weights, whose drafts are nearly always rejected."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from paged_kv.integrations.heads.prediction_head import (
    Eagle3Head,
    HeadArgs,
    ModelParts,
    PredictionHead,
    llama_head,
)


def shape_of(model: Any) -> dict[str, Any]:
    """The shape of a head of the model's width and vocabulary."""
    parts = ModelParts(model)
    return {
        "hidden_size": parts.hidden_size,
        "vocab_size": parts.vocab_size,
        "intermediate_size": 96,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
    }


def random_head(model: Any, kind: str = "layer_head") -> PredictionHead:
    """A head of that shape."""
    shape = shape_of(model)
    head: PredictionHead = (
        llama_head(HeadArgs(**shape))
        if kind == "layer_head"
        else Eagle3Head(HeadArgs(**shape, draft_vocab_size=shape["vocab_size"] // 2))
    )
    mx.random.seed(1)
    head.update(tree_map(_random, head.parameters()))  # type: ignore[no-untyped-call]
    return head


def _random(array: mx.array) -> mx.array:
    if not mx.issubdtype(array.dtype, mx.floating):
        return mx.arange(array.size).reshape(array.shape).astype(array.dtype)
    return 0.2 * mx.random.normal(array.shape) if array.ndim > 1 else array


def folder_of_head(model: Any, folder: Path) -> str:
    """A folder with a random head of the model."""
    weights = dict(tree_flatten(random_head(model).parameters()))  # type: ignore[no-untyped-call]
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    config = {"model_type": "layer_head", **shape_of(model)}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
