"""Lets models be short of memory for some tokens, or for many at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.embedding import Embedding

WHY = "[malloc] Unable to allocate 5 bytes."


def fail_where(is_short: Callable[[list[int]], bool], patch: pytest.MonkeyPatch) -> None:
    """Let models' calls fail, as where an allocation of MLX does, if that says so of a call's
    tokens, in all of its sequences."""
    stock: Any = Embedding.__call__

    def embed(layer: Any, tokens: mx.array) -> mx.array:
        found: Any = tokens.flatten().tolist()
        if is_short(found):
            raise RuntimeError(WHY)
        embedded: mx.array = stock(layer, tokens)
        return embedded

    patch.setattr(Embedding, "__call__", embed)
