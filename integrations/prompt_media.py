"""How prompts with images are computed: by steps of their own instead of the model's."""

from __future__ import annotations

from typing import Any, Protocol

import mlx.core as mx


class PromptSteps(Protocol):
    """A model's steps for one prompt and the tokens after it."""

    @property
    def start(self) -> int:
        """The tokens of the prompt that the prompt cache has to hold before the first step: those
        that were found, or 0 if the model cannot continue behind them."""
        ...

    @property
    def in_parts(self) -> bool:
        """Whether each step computes its own tokens, and not the first one all of the prompt."""
        ...

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        """The logits of tokens [1, T], which continue those of the step before."""
        ...


class PromptMedia(Protocol):
    """The images of a prompt."""

    @property
    def cache_key(self) -> list[int]:
        """The prompt's tokens; those of images differ by the image's content."""
        ...

    def begin(self, model: Any, cached: int) -> PromptSteps:
        """The model's steps behind a cached prefix of `cached` tokens.

        Raises:
            ValueError: the model cannot read the images.
        """
        ...
