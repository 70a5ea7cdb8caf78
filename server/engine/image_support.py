"""Decides which library loads a model: mlx-vlm if it is to read images, else mlx-lm. Some models of
mlx-lm embed images themselves."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import mlx.core as mx
from mlx_lm.processors import PROCESSORS
from mlx_lm.server import Vision

from paged_kv.extras import extra_module, install_command
from paged_kv.integrations.mlx_lm_internals import knows_model

_TEXT_ONLY = "this model takes no images: send text only"


def loading_with_mlx_vlm() -> Any:
    """The module that loads models with mlx-vlm.

    Raises:
        ValueError: the extra vlm is not installed.
    """
    return extra_module("paged_kv.integrations.mlx_vlm.image_generation", "vlm")


def refusal_of_mlx_vlm(config: dict[str, Any], mlx_lm_options: dict[str, Any]) -> str | None:
    """Why mlx-vlm does not load a model, as a client that sends an image is told; None if it does.

    mlx-vlm loads what mlx-lm does not know, or would load without a part that sees images.

    Args:
        config: of the model.
        mlx_lm_options: options that only models of mlx-lm take, and their values or None.

    Raises:
        ValueError: mlx-lm does not know the model, and mlx-vlm is missing, does not know it either,
            or does not take an option.
    """
    # A checkpoint with a "model_file" brings its own code.
    kind, is_known = config.get("model_type"), "model_file" in config or knows_model(config)
    if is_known and (kind in PROCESSORS or "vision_config" not in config):
        return _TEXT_ONLY
    if find_spec("mlx_vlm") is None:
        if not is_known:
            raise ValueError(
                f"mlx-lm has no model of the type {kind!r}: a newer one may (pip install --upgrade "
                f"mlx-lm), and mlx-vlm if the model reads images ({install_command('vlm')})"
            )
        return (
            "this server reads no images, as the extra for them is not installed: pip install "
            "'paged-kv[vlm]' where it runs, or send text only"
        )
    if not loading_with_mlx_vlm().knows(config):
        if not is_known:
            raise ValueError(
                f"neither mlx-lm nor mlx-vlm has a model of the type {kind!r}: newer ones may (pip "
                "install --upgrade mlx-lm mlx-vlm)"
            )
        return (
            f"this server reads no images, as mlx-vlm has no model of the type {kind!r}: send "
            "text only"
        )
    if used := [option for option, value in mlx_lm_options.items() if value is not None]:
        if not is_known:
            raise ValueError(
                f"{used[0]} does not work with models of mlx-vlm, and mlx-lm has none of the type "
                f"{kind!r}: leave it out"
            )
        return f"this server reads no images, as it was started with {used[0]}: send text only"
    return None


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
