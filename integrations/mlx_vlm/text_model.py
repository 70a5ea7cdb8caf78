"""Lets mlx-lm's generators run a model of mlx-vlm."""

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_vlm.generate.common import _chunked_prefill_enabled

from paged_kv.integrations.batching.unpaged_caches import leaves
from paged_kv.integrations.cache_library import model_file
from paged_kv.integrations.mlx_vlm.hooks import stock_make_prompt_cache
from paged_kv.integrations.model_trial import NOTED_POSITIONS

# Folders of mlx-vlm whose rows come out wrong in a batch padded on the right: their layers count
# columns, or attend to later tokens. For the others that are named here, no small model has shown
# that they are right. `benches/vision_families.py` tries all.
_WRONG_IN_BATCHES = frozenset({"falcon_perception", "inkling", "mllama", "zaya1_vl"})
_NOT_TRIED = frozenset(
    {
        *("glm4v_moe", "glm5_next", "hunyuan_vl", "jina_vlm", "kimi_k3", "mimo_v2", "molmo"),
        *("moondream3", "muse_spark", "nemotron_parse", "phi3_v", "phi4mm", "qwen3_omni_moe"),
    }
)


class TextModel(Module):
    """A model of mlx-vlm, called as mlx-lm's models are: with tokens and a prompt cache.

    Args:
        whole: the model as `mlx_vlm.load` returns it.

    Attributes:
        is_batchable: whether rows of texts can be a batch, and continue behind cached prefixes.
    """

    def __init__(self, whole: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # MLX's
        self.whole = whole
        is_known = model_file(whole) not in _WRONG_IN_BATCHES | _NOT_TRIED
        can_merge = all(hasattr(each, "merge") for each in self.make_cache())
        self.is_batchable = is_known and can_merge and self.reads_in_parts(mx.array([[0, 0]]), {})

    @property
    def decoder(self) -> Any:
        """The part that has the caches and makes logits."""
        return self.whole.language_model

    @property
    def layers(self) -> list[Any]:
        """The decoder's layers."""
        found: list[Any] = self.decoder.layers
        return found

    def make_cache(self) -> list[Any]:
        """mlx-vlm's own prompt cache."""
        return stock_make_prompt_cache(self.decoder)

    def reads_in_parts(self, tokens: mx.array, inputs: dict[str, Any]) -> bool:
        """Whether a prompt may be computed in several steps: not if its images, or its texts,
        attend to later tokens.

        Args:
            tokens: the prompt, integers [1, T].
            inputs: what the processor made besides.
        """
        return bool(_chunked_prefill_enabled(self.whole, input_ids=tokens, prefill_kwargs=inputs))

    def positions(self) -> dict[str, Any]:
        """What the decoder has noted about the positions of its latest prompt."""
        noted = [name for name in NOTED_POSITIONS if hasattr(self.decoder, name)]
        return {name: getattr(self.decoder, name) for name in noted}

    def set_positions(self, noted: dict[str, Any]) -> None:
        """Let the decoder continue a prompt that it noted this about."""
        for name in self.positions():
            setattr(self.decoder, name, noted.get(name))

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None) -> mx.array:
        """The logits [B, T, vocabulary] of texts [B, T].

        A token's position is the number of tokens before it, whatever prompt came before.
        """
        for each in leaves(cache or []):
            _look_for_padding_on_the_right(each)
        self.set_positions({"_rope_deltas": mx.zeros((inputs.shape[0], 1), mx.int32)})
        logits: mx.array = self.decoder(inputs, cache=cache).logits
        return logits


def _look_for_padding_on_the_right(cache: Any) -> None:
    """mlx-lm pads prompts of a batch on the right, and tells their lengths. mlx-vlm's recurrent
    layers do not look at the lengths in a new batch, which has a left padding of 0."""
    if getattr(cache, "lengths", None) is not None and hasattr(cache, "left_padding"):
        cache.left_padding = None
