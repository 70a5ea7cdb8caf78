"""Defines a prediction head: a layer behind a model that predicts the token after the next.

A head reads, for each token, the token's embedding and the model's hidden state of the token
before it, and computes a hidden state from which the model's own output layer predicts the next
token. Behind the last token that is known, it goes on with its own hidden states, so it drafts a
chain of tokens without the model. This is EAGLE (Li et al., "EAGLE: Speculative Sampling Requires
Rethinking Feature Uncertainty", 2024), and the multi-token prediction of DeepSeek-V3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.llama import ModelArgs, TransformerBlock

from paged_kv.integrations.heads.model_parts import ModelParts


class PredictionHead(Module):
    """What all heads are. A head that has an output layer of its own overrides `likeliest`.

    Attributes:
        hidden_size: the width of its states, and of the embeddings that it reads.
        vocab_size: the tokens of its model.
    """

    hidden_size: int
    vocab_size: int

    def layers_read(self, count: int) -> tuple[int, ...]:
        """The layers of a model with `count` of them whose outputs the head reads; none if it reads
        the hidden states behind the last norm."""
        return ()

    def joined(self, outputs: list[mx.array]) -> mx.array:
        """The hidden states [B, S, hidden_size] that the head reads, from those outputs."""
        (hidden,) = outputs
        return hidden

    def __call__(self, embeddings: mx.array, hidden: mx.array, cache: Any = None) -> mx.array:
        """Hidden states [B, S, hidden_size] of S tokens, which may be read for the next ones.

        Args:
            embeddings: of the tokens, [B, S, hidden_size].
            hidden: the hidden states of the tokens before them, of the same shape.
            cache: of the tokens before, one of mlx-lm's kind; None for none.
        """
        raise NotImplementedError

    def load(self, weights: Mapping[str, mx.array], place: str) -> None:
        """Take weights.

        Raises:
            ValueError: some are missing, too many, or of another shape; nothing was changed.
        """
        needed = dict(tree_flatten(self.parameters()))  # type: ignore[no-untyped-call]
        for what, names in (
            ("lacks", needed.keys() - weights.keys()),
            ("has unknown", weights.keys() - needed.keys()),
        ):
            if names:
                raise ValueError(
                    f"the head in {place} {what} weights: {', '.join(sorted(names))}; give a head "
                    "that is whole, as it was trained"
                )
        for name, like in needed.items():
            if weights[name].shape != like.shape:
                raise ValueError(
                    f"{name} of the head in {place} has the shape {weights[name].shape}, and its "
                    f"configuration says {like.shape}"
                )
        self.load_weights(list(weights.items()))

    def likeliest(self, states: mx.array, parts: ModelParts) -> mx.array:
        """The likeliest tokens [B, S] after what has these states."""
        return mx.argmax(parts.logits(states), axis=-1)


@dataclass
class LayerHeadArgs:
    """The shape of a `LayerHead`, named as in mlx-lm's `llama`."""

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0


class LayerHead(PredictionHead):
    """One layer of Llama behind a product that joins embeddings and hidden states.

    What it returns is like the model's hidden states behind its last norm.
    """

    def __init__(self, args: LayerHeadArgs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.hidden_size, self.vocab_size = args.hidden_size, args.vocab_size
        width = args.hidden_size
        self.embedding_norm = RMSNorm(width, eps=args.rms_norm_eps)
        self.hidden_norm = RMSNorm(width, eps=args.rms_norm_eps)
        self.join = Linear(2 * width, width, bias=False)
        self.layer = TransformerBlock(
            ModelArgs(
                model_type="llama",
                num_hidden_layers=1,
                hidden_size=width,
                intermediate_size=args.intermediate_size,
                num_attention_heads=args.num_attention_heads,
                num_key_value_heads=args.num_key_value_heads,
                head_dim=args.head_dim,
                rms_norm_eps=args.rms_norm_eps,
                vocab_size=args.vocab_size,
                rope_theta=args.rope_theta,
            )
        )
        self.norm = RMSNorm(width, eps=args.rms_norm_eps)

    def __call__(self, embeddings: mx.array, hidden: mx.array, cache: Any = None) -> mx.array:
        both = [self.embedding_norm(embeddings), self.hidden_norm(hidden)]
        joined = self.join(mx.concatenate(both, axis=-1))
        mask = create_attention_mask(joined, cache)
        states: mx.array = self.norm(self.layer(joined, mask, cache))
        return states
