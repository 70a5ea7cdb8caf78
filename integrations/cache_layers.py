"""Reads a model's file name, and a layer's window from mlx-lm's cache for it."""

from mlx.nn.layers.base import Module
from mlx_lm.models.cache import RotatingKVCache

from paged_kv.pool.window import DEFAULT_WRITE_CHUNK, Window


def model_file(model: Module) -> str:
    """The name of the model's file in mlx-lm, such as "llama"."""
    return type(model).__module__.rpartition(".")[2]


def window_of(cache: RotatingKVCache, write_chunk: int | None) -> Window:
    """The window of a layer.

    Raises:
        ValueError: the cache holds only its sink tokens.
    """
    size = cache.max_size - cache.keep
    if size < 1:
        raise ValueError(
            f"max_kv_size={cache.max_size} must be more than the {cache.keep} sink tokens, which "
            "are always kept"
        )
    chunk = min(DEFAULT_WRITE_CHUNK, size) if write_chunk is None else write_chunk
    return Window(size, chunk, cache.keep)
