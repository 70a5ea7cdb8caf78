"""Defines prediction heads: a layer behind a model that predicts the token after the next.

A head reads, for each token, the token's embedding and the model's hidden state of the token
before it, and computes a hidden state from which the model's own output layer predicts the next
token. Behind the last token that is known, it goes on with its own hidden states, so it drafts a
chain of tokens without the model. This is EAGLE (Li et al., "EAGLE: Speculative Sampling Requires
Rethinking Feature Uncertainty", 2024), and the multi-token prediction of DeepSeek-V3.

The heads of EAGLE-3 read the outputs of three layers of a model. Their weights are named as in the
checkpoints of SafeAILab/EAGLE. Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large
Language Models via Training-Time Test", 2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.llama import MLP, Attention, ModelArgs, TransformerBlock


class ModelParts:
    """What a head shares with its model.

    Args:
        model: a language model of mlx-lm or mlx-vlm.

    Raises:
        ValueError: it is not made of a backbone and an output layer.

    Attributes:
        backbone: computes hidden states [B, S, hidden_size] behind the last norm, from tokens.
        hidden_size: the width of hidden states.
        vocab_size: how many tokens the output layer knows.
    """

    def __init__(self, model: Module) -> None:
        self._whole, self.backbone, self._embedding = _found(model)
        like = self.embed(mx.array([[0]]))
        self.hidden_size = int(like.shape[-1])
        self.vocab_size = int(self.logits(like).shape[-1])

    @property
    def arguments(self) -> Any:
        return self._whole.args

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


class PredictionHead(Module):
    """What all heads are. A head that has an output layer of its own overrides `likeliest`.

    Args:
        hidden_size: the width of its states, and of the embeddings that it reads.
        vocab_size: the tokens of its model.
    """

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.hidden_size, self.vocab_size = hidden_size, vocab_size

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

    def likeliest(self, states: mx.array, parts: ModelParts) -> mx.array:
        """The likeliest tokens [B, S] after what has these states."""
        return mx.argmax(parts.logits(states), axis=-1)

    def load(self, weights: Mapping[str, mx.array], place: str) -> None:
        """Take weights.

        Raises:
            ValueError: some are missing, too many, or of another shape; nothing was changed.
        """
        try:
            self.load_weights(list(weights.items()))
        except ValueError as error:
            why = " ".join(str(error).split()).rstrip(".")
            raise ValueError(
                f"the head in {place} does not fit its weights: {why}. Give a head that is whole, "
                "as it was trained"
            ) from None


class LayerHead(PredictionHead):
    """A layer between norms, behind a product that joins embeddings and hidden states.

    Args:
        layer: of a model of mlx-lm.
        hidden_size, vocab_size: as of all heads.
        eps: of the norms.
        is_hidden_first: whether hidden states come before embeddings.
        feeds_normed: whether the states that are fed on are those behind the last norm, as the
            model's are.
    """

    def __init__(
        self,
        layer: Any,
        hidden_size: int,
        vocab_size: int,
        eps: float,
        *,
        is_hidden_first: bool = False,
        feeds_normed: bool = True,
    ) -> None:
        super().__init__(hidden_size, vocab_size)
        self._is_hidden_first, self._feeds_normed = is_hidden_first, feeds_normed
        self.embedding_norm = RMSNorm(hidden_size, eps=eps)
        self.hidden_norm = RMSNorm(hidden_size, eps=eps)
        self.join = Linear(2 * hidden_size, hidden_size, bias=False)
        self.layer = layer
        self.norm = RMSNorm(hidden_size, eps=eps)

    def __call__(self, embeddings: mx.array, hidden: mx.array, cache: Any = None) -> mx.array:
        both = [self.embedding_norm(embeddings), self.hidden_norm(hidden)]
        if self._is_hidden_first:
            both.reverse()
        joined = self.join(mx.concatenate(both, axis=-1))
        states: mx.array = self.layer(joined, create_attention_mask(joined, cache), cache)
        return self.norm(states) if self._feeds_normed else states

    def likeliest(self, states: mx.array, parts: ModelParts) -> mx.array:
        return super().likeliest(states if self._feeds_normed else self.norm(states), parts)


@dataclass(kw_only=True)
class HeadArgs(ModelArgs):
    """The shape of a head with a layer of Llama, named as in its config.json."""

    model_type: str = "llama"
    num_hidden_layers: int = 1
    rms_norm_eps: float = 1e-5
    draft_vocab_size: int | None = None  # tokens that a head of EAGLE-3 can draft; None for all
    # The width of the model's layers; None if it is the head's
    target_hidden_size: int | None = None
    # Whether the norm of hidden states comes before the residual's branch
    norm_before_residual: bool = False


def llama_head(args: HeadArgs) -> LayerHead:
    return LayerHead(TransformerBlock(args), args.hidden_size, args.vocab_size, args.rms_norm_eps)


class _Eagle3Layer(Module):
    """A layer of Llama whose attention reads embeddings and hidden states side by side."""

    def __init__(self, args: HeadArgs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        width = args.hidden_size
        self._is_normed_first = args.norm_before_residual
        self.self_attn = Attention(args)
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = self.self_attn[name].weight.shape[0]
            self.self_attn[name] = Linear(2 * width, rows, bias=args.attention_bias)
        self.mlp = MLP(args)
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

    def __init__(self, args: HeadArgs) -> None:
        super().__init__(args.hidden_size, args.vocab_size)
        drafted = args.draft_vocab_size or args.vocab_size
        of_model = args.target_hidden_size or args.hidden_size
        self.fc = Linear(3 * of_model, args.hidden_size, bias=False)
        self.midlayer = _Eagle3Layer(args)
        self.norm = RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.lm_head = Linear(args.hidden_size, drafted, bias=False)
        self.d2t = mx.zeros((drafted,), mx.int32)  # the model's token, less the head's

    def layers_read(self, count: int) -> tuple[int, ...]:
        """The outputs of an early, a middle and a late layer, as EAGLE-3 was trained with."""
        return 1, count // 2 - 1, count - 4

    def joined(self, outputs: list[mx.array]) -> mx.array:
        hidden: mx.array = self.fc(mx.concatenate(outputs, axis=-1))
        return hidden

    def __call__(self, embeddings: mx.array, hidden: mx.array, cache: Any = None) -> mx.array:
        states: mx.array = self.midlayer(embeddings, hidden, cache)
        return states

    def likeliest(self, states: mx.array, parts: ModelParts) -> mx.array:
        found = mx.argmax(self.lm_head(self.norm(states)), axis=-1)
        return found + self.d2t[found]
