"""Computes prompts with images for the models of mlx-lm that embed images themselves."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.server import Vision


class EmbeddedImages:
    """The images of a prompt.

    Args:
        tokens: of the prompt.
        vision: mlx-lm's, whose arrays are computed.

    Attributes:
        cache_key: the tokens; those of images differ by the image's content.
    """

    def __init__(self, tokens: list[int], vision: Vision) -> None:
        self.cache_key = vision.cache_key
        self._tokens = tokens
        self._vision = vision

    def begin(self, model: Any, cached: int) -> EmbeddedSteps:
        """The model's steps behind a cached prefix of so many tokens."""
        seen = sum(start < cached for start in self._vision.starts)
        rest = mx.array(self._tokens[cached:])
        pixels = self._vision.pixel_values[seen:]
        embeddings = model.embed_inputs(rest, pixel_values=pixels) if pixels else None
        if embeddings is not None:
            mx.eval(embeddings)  # the prompt is computed on another stream
        return EmbeddedSteps(model, cached, embeddings)


class EmbeddedSteps:
    """A model's steps for one prompt and the tokens after it, called as the model is.

    Attributes:
        start: the tokens of the prompt that the prompt cache has to hold before the first step.
    """

    in_parts = True

    def __init__(self, model: Any, start: int, embeddings: mx.array | None) -> None:
        self.start = start
        self._model = model
        self._embeddings = embeddings

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        """The logits of the tokens [1, T], which continue those of the step before."""
        if self._embeddings is None:
            logits: mx.array = self._model(inputs, cache=cache)
            return logits
        part, self._embeddings = mx.split(self._embeddings, [inputs.shape[1]])
        if not len(self._embeddings):
            self._embeddings = None
        logits = self._model(inputs, cache=cache, input_embeddings=part[None])
        return logits
