"""Names mlx-vlm's cache classes."""

from mlx_vlm.models.cache import ChunkedKVCache, KVCache, RotatingKVCache

from paged_kv.integrations.cache_library import CacheLibrary
from paged_kv.integrations.mlx_vlm.hooks import MLX_VLM_HOOKS, stock_make_prompt_cache

MLX_VLM = CacheLibrary(
    name="mlx-vlm",
    make_prompt_cache=stock_make_prompt_cache,
    full=KVCache,
    window=RotatingKVCache,
    chunked=ChunkedKVCache,
    unpaged=frozenset({"mlx_vlm.models.cache.ArraysCache"}),
    hooks=MLX_VLM_HOOKS,
)
