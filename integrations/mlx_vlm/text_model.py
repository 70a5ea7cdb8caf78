"""Lets mlx-lm's generators run a model of mlx-vlm, and computes a prompt as mlx-vlm does: with the
embeddings and positions of its images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_vlm.generate.common import _chunked_prefill_enabled
from mlx_vlm.generate.dispatch import _prime_cached_prefix_rope_state

from paged_kv.integrations.batching.prompt_caches import leaves
from paged_kv.integrations.cache_library import model_file
from paged_kv.integrations.mlx_vlm.hooks import stock_make_prompt_cache
from paged_kv.integrations.model_trial import NOTED_POSITIONS
from paged_kv.integrations.states.one_by_one import alone

# Folders of mlx-vlm whose rows come out wrong in a batch padded on the right: their layers count
# columns, or attend to later tokens. For the others that are named here, no small model has shown
# that they are right. `benches/vision_families.py` tries all.
_WRONG_IN_BATCHES = frozenset({"falcon_perception", "inkling", "mllama", "zaya1_vl"})
_NOT_TRIED = frozenset(
    {
        *("glm4v_moe", "hunyuan_vl", "jina_vlm", "kimi_k3", "mimo_v2", "molmo"),
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
        found: list[Any] = self.decoder.layers
        return found

    def make_cache(self) -> list[Any]:
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
            # mlx-lm pads prompts of a batch on the right, and tells their lengths. mlx-vlm's
            # recurrent layers do not look at the lengths in a new batch, which has a left padding
            # of 0.
            if getattr(each, "lengths", None) is not None and hasattr(each, "left_padding"):
                each.left_padding = None
        self.set_positions({"_rope_deltas": mx.zeros((inputs.shape[0], 1), mx.int32)})
        logits: mx.array = self.decoder(inputs, cache=cache).logits
        return logits


@dataclass(frozen=True)
class MediaPrompt:
    """A prompt as mlx-vlm's processor made it.

    Attributes:
        tokens: their ids.
        cache_key: the same, with ids made of the content in the place of each image's tokens.
        pixel_values: of all images; None for a text.
        mask: which tokens count [1, T]; None for all.
        inputs: what else the model needs, such as the images' sizes in patches.
    """

    tokens: list[int]
    cache_key: list[int]
    pixel_values: Any = None
    mask: mx.array | None = None
    inputs: dict[str, Any] | None = None

    @property
    def media_end(self) -> int:
        """The number of tokens up to the last one of an image; 0 for a text."""
        return max((at for at, each in enumerate(self.cache_key, 1) if each < 0), default=0)

    def begin(self, model: TextModel, cached: int) -> PromptSteps:
        """See `PromptMedia`."""
        return PromptSteps(model, self, cached)


class PromptSteps:
    """See `media_keys.PromptSteps`; called as mlx-lm calls a model."""

    def __init__(self, model: TextModel, prompt: MediaPrompt, cached: int) -> None:
        self._model = model
        self._tokens = mx.array([prompt.tokens])
        inputs = dict(prompt.inputs or {})
        self.in_parts = model.reads_in_parts(self._tokens, inputs)
        self.start = self._done = cached if self.in_parts and model.is_batchable else 0
        # Of the tokens that are not computed yet; None where the decoder looks them up itself.
        self._embeddings: mx.array | None = None
        self._arguments: dict[str, Any] = {}
        self._output: Any = None
        model.set_positions({})
        # Text behind all images is computed as generated tokens are, once its positions are known.
        is_text = self.start > 0 and prompt.media_end <= self.start
        whole, tokens = model.whole, self._tokens
        if not (is_text and _prime_cached_prefix_rope_state(whole, tokens, prompt.mask, inputs)):
            self._embed(prompt, inputs)
        self._positions = model.positions()

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        """The logits [1, 1, vocabulary] of the last of the tokens [1, T], which continue those of
        the step before."""
        self._model.set_positions(self._positions)
        start, self._done = self._done, self._done + inputs.shape[1]
        if self._embeddings is None:
            logits = self._finish(self._compute(inputs, cache))
        elif self.in_parts:
            logits = self._read(start, inputs, cache)
        else:
            # The first part computes all of the prompt. The last part finds it computed.
            if self._output is None:
                self._output = self._compute(self._tokens, cache, inputs_embeds=self._embeddings)
            is_last = self._done >= self._tokens.shape[1]
            logits = self._finish(self._output) if is_last else _last_logits(self._output)
        self._positions = self._model.positions()
        return logits

    def _embed(self, prompt: MediaPrompt, inputs: dict[str, Any]) -> None:
        """Compute the embeddings of all tokens, and what else the decoder needs."""
        made = self._model.whole.get_input_embeddings(
            self._tokens, prompt.pixel_values, mask=prompt.mask, **inputs
        ).to_dict()
        embeddings: mx.array = made.pop("inputs_embeds")
        if embeddings.shape[1] != len(prompt.tokens):
            raise ValueError(
                f"this model makes {embeddings.shape[1]:,} embeddings of a prompt of "
                f"{len(prompt.tokens):,} tokens, and pages are counted in tokens"
            )
        self._arguments = inputs | {name: each for name, each in made.items() if each is not None}
        mx.eval(embeddings)
        self._embeddings = embeddings

    def _read(self, start: int, inputs: mx.array, cache: list[Any]) -> mx.array:
        """Compute the prompt's next part. The decoder cuts its other arguments itself."""
        assert self._embeddings is not None, "the prompt is not computed yet"
        part = self._embeddings[:, start : self._done]
        if self._done >= self._tokens.shape[1]:
            return self._finish(self._compute(inputs, cache, inputs_embeds=part))
        output = self._compute(inputs, cache, inputs_embeds=part, n_to_process=inputs.shape[1])
        return _last_logits(output)

    def _compute(self, inputs: mx.array, cache: list[Any], **more: Any) -> Any:
        decoder = self._model.decoder
        with alone(cache) as caches:
            return decoder(inputs, cache=caches, logits_to_keep=1, **self._arguments, **more)

    def _finish(self, output: Any) -> mx.array:
        """The logits of a step that a generated token follows, which gets what mlx-vlm's
        `generate_step` hands to it."""
        self._embeddings = self._output = None
        handed = ("cross_attention_states", "encoder_outputs")
        states = {name: getattr(output, name, None) for name in handed}
        self._arguments = {name: each for name, each in states.items() if each is not None}
        return _last_logits(output)


def _last_logits(output: Any) -> mx.array:
    logits: mx.array = output.logits[:, -1:]
    return logits
