"""The heads of EAGLE-3, which read the outputs of three layers of a model.

Weights are named as in the checkpoints of SafeAILab/EAGLE. Li et al., "EAGLE-3: Scaling up
Inference Acceleration of Large Language Models via Training-Time Test", 2025.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.llama import MLP, Attention, ModelArgs

from paged_kv.integrations.heads.model_parts import ModelParts
from paged_kv.integrations.heads.prediction_head import PredictionHead


@dataclass
class Eagle3Args:
    """The shape of an `Eagle3Head`, named as in its config.json.

    Attributes:
        draft_vocab_size: tokens that the head can draft; None for all.
        target_hidden_size: the width of the model's layers; None if it is the head's.
        norm_before_residual: whether the norm of hidden states comes before the residual's branch.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    vocab_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    norm_before_residual: bool = False

    def of_layer(self) -> ModelArgs:
        """The shape of the layer."""
        return ModelArgs(
            model_type="llama",
            num_hidden_layers=1,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            rms_norm_eps=self.rms_norm_eps,
            vocab_size=self.vocab_size,
            rope_theta=self.rope_theta,
            rope_scaling=self.rope_scaling,
            max_position_embeddings=self.max_position_embeddings,
            attention_bias=self.attention_bias,
            mlp_bias=self.mlp_bias,
        )


class _Layer(Module):
    """A layer of Llama whose attention reads embeddings and hidden states side by side."""

    def __init__(self, args: Eagle3Args) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        of_layer, width = args.of_layer(), args.hidden_size
        self._is_normed_first = args.norm_before_residual
        self.self_attn = Attention(of_layer)
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = self.self_attn[name].weight.shape[0]
            self.self_attn[name] = Linear(2 * width, rows, bias=args.attention_bias)
        self.mlp = MLP(of_layer)
        self.input_layernorm = RMSNorm(width, eps=args.rms_norm_eps)
        self.hidden_norm = RMSNorm(width, eps=args.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(width, eps=args.rms_norm_eps)

    def __call__(self, embeddings: mx.array, hidden: mx.array, cache: Any) -> mx.array:
        normed = self.hidden_norm(hidden)
        residual = normed if self._is_normed_first else hidden
        both = mx.concatenate([self.input_layernorm(embeddings), normed], axis=-1)
        mask = create_attention_mask(both, cache)
        attended = residual + self.self_attn(both, mask, cache)
        states: mx.array = attended + self.mlp(self.post_attention_layernorm(attended))
        return states


class Eagle3Head(PredictionHead):
    """A head of EAGLE-3. Its states are those before its last norm."""

    def __init__(self, args: Eagle3Args) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.hidden_size, self.vocab_size = args.hidden_size, args.vocab_size
        drafted = args.draft_vocab_size or args.vocab_size
        of_model = args.target_hidden_size or args.hidden_size
        self.fc = Linear(3 * of_model, args.hidden_size, bias=False)
        self.midlayer = _Layer(args)
        self.norm = RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.lm_head = Linear(args.hidden_size, drafted, bias=False)
        self.d2t = mx.zeros((drafted,), mx.int32)  # the model's token, less the head's

    def layers_read(self, count: int) -> tuple[int, ...]:
        """The outputs of an early, a middle and a late layer, as EAGLE-3 was trained with."""
        return 1, count // 2 - 1, count - 4

    def joined(self, outputs: list[mx.array]) -> mx.array:
        """See `PredictionHead.joined`."""
        hidden: mx.array = self.fc(mx.concatenate(outputs, axis=-1))
        return hidden

    def __call__(self, embeddings: mx.array, hidden: mx.array, cache: Any = None) -> mx.array:
        states: mx.array = self.midlayer(embeddings, hidden, cache)
        return states

    def likeliest(self, states: mx.array, parts: ModelParts) -> mx.array:
        """See `PredictionHead.likeliest`."""
        found = mx.argmax(self.lm_head(self.norm(states)), axis=-1)
        return found + self.d2t[found]
