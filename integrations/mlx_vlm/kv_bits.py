"""Refuses mlx-vlm's quantisation of caches that are pages."""

from collections.abc import Callable
from typing import Any

from mlx_vlm.generate import common

from paged_kv.integrations.batching.unpaged_caches import paged_caches

stock_maybe_quantize: Callable[..., None] = common.maybe_quantize_kv_cache


def maybe_quantize_kv_cache(
    prompt_cache: list[Any], quantized_kv_start: int, kv_group_size: int, kv_bits: Any, **more: Any
) -> None:
    """mlx-vlm's function of this name, for caches that are not pages.

    Raises:
        ValueError: it is to quantise pages.
    """
    if paged_caches(prompt_cache):
        require_no_kv_bits(kv_bits)
    stock_maybe_quantize(prompt_cache, quantized_kv_start, kv_group_size, kv_bits, **more)


def require_no_kv_bits(kv_bits: float | None) -> None:
    """Raise ValueError if mlx-vlm is to quantise caches, which are pages."""
    if kv_bits is not None:
        raise ValueError(
            f"kv_bits={kv_bits} is for mlx-vlm's own caches, and a paged_kv factory is installed "
            "for this model: leave it out, and make the factory with page_format='q8' or 'q4'"
        )
