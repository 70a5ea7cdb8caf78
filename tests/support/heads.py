"""Makes prediction heads with random weights, whose drafts are nearly always rejected."""

from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from paged_kv.integrations.heads.eagle3_head import Eagle3Args, Eagle3Head
from paged_kv.integrations.heads.model_parts import ModelParts
from paged_kv.integrations.heads.prediction_head import LayerHead, LayerHeadArgs, PredictionHead


def random_head(model: Any, kind: str = "layer_head") -> PredictionHead:
    """A head of the model's width and vocabulary."""
    parts = ModelParts(model)
    shape: dict[str, Any] = {
        "hidden_size": parts.hidden_size,
        "vocab_size": parts.vocab_size,
        "intermediate_size": 96,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
    }
    head: PredictionHead = (
        LayerHead(LayerHeadArgs(**shape))
        if kind == "layer_head"
        else Eagle3Head(Eagle3Args(**shape, draft_vocab_size=parts.vocab_size // 2))
    )
    mx.random.seed(1)
    head.update(tree_map(_random, head.parameters()))
    return head


def _random(array: mx.array) -> mx.array:
    if not mx.issubdtype(array.dtype, mx.floating):
        return mx.arange(array.size).reshape(array.shape).astype(array.dtype)
    return 0.2 * mx.random.normal(array.shape) if array.ndim > 1 else array
