"""Finds what a prediction head shares with its model: embeddings, hidden states, output layer."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module


class ModelParts:
    """The parts of a model that a head uses.

    Args:
        model: a language model of mlx-lm or mlx-vlm.

    Raises:
        ValueError: it is not made of a backbone and an output layer.

    Attributes:
        backbone: computes hidden states [B, S, hidden_size] behind the last norm, from tokens.
    """

    def __init__(self, model: Module) -> None:
        self._whole, self.backbone, self._embedding = _found(model)

    @property
    def arguments(self) -> Any:
        """The shape of the model, as its file in mlx-lm describes it."""
        return self._whole.args

    @property
    def hidden_size(self) -> int:
        """The width of hidden states."""
        return int(self.embed(mx.array([[0]])).shape[-1])

    @property
    def vocab_size(self) -> int:
        """How many tokens the output layer knows."""
        return int(self.logits(self.embed(mx.array([[0]]))).shape[-1])

    def embed(self, tokens: mx.array) -> mx.array:
        """Embeddings [B, S, hidden_size] of tokens [B, S], as their table has them."""
        embeddings: mx.array = self._embedding(tokens)
        return embeddings

    def logits(self, hidden: mx.array) -> mx.array:
        """The output layer's numbers [B, S, vocabulary], before any scale or cap of the model's:
        those do not change which is the largest."""
        layer = self._whole.get("lm_head")
        if layer is None:
            tied: mx.array = self._embedding.as_linear(hidden)
            return tied
        logits: mx.array = layer(hidden)
        group = getattr(self._whole, "sharding_group", None)
        if group is None:
            return logits
        # Each rank has computed a part of the vocabulary.
        parts = mx.distributed.all_gather(mx.moveaxis(logits, -1, 0), group=group)
        return mx.moveaxis(parts, 0, -1)


def _found(model: Any) -> tuple[Any, Any, Any]:
    """The module with the output layer, the backbone, and its embedding."""
    for whole in (model, model.get("language_model")):
        for backbone in whole.children().values() if isinstance(whole, Module) else ():  # type: ignore[no-untyped-call]
            if not (isinstance(backbone, Module) and "layers" in backbone):
                continue
            embedding = backbone.get("embed_tokens") or backbone.get("embeddings")
            if embedding is not None and ("lm_head" in whole or hasattr(embedding, "as_linear")):
                return whole, backbone, embedding
    raise ValueError(
        f"{type(model).__module__} has no backbone with an output layer behind it, which a "
        "prediction head reads and shares: choose another draft"
    )
