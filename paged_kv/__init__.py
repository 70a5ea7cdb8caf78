"""A paged block-allocator KV cache for MLX and mlx-lm.

    from paged_kv import PagedCacheFactory

    factory = PagedCacheFactory(model)
    generate(model, tokenizer, prompt, prompt_cache=factory.make_cache())

Importing the package loads nothing: each name is imported at its first use, so that code that
needs only the allocator does not load mlx. Before mlx-lm loads a saved prompt cache, the process
must have used one of these names, so that mlx-lm knows the cache's class.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from paged_kv.extras import backend_named

if TYPE_CHECKING:
    from paged_kv.allocator.errors import (
        BlockStateError,
        NotPinned,
        PagedKVError,
        PoolExhausted,
        RollbackError,
    )
    from paged_kv.allocator.prefixes.eviction import (
        EvictionPolicy,
        FirstInFirstOut,
        LeastFrequentlyUsed,
        LeastRecentlyUsed,
    )
    from paged_kv.allocator.requantisation import OldestFirst, RequantisationPolicy
    from paged_kv.cache.paged_kv_cache import PagedKVCache
    from paged_kv.integrations.paged_cache_factory import PagedCacheFactory
    from paged_kv.integrations.samples import generate_samples
    from paged_kv.integrations.speculation.generator import SpeculativeBatchGenerator
    from paged_kv.integrations.speculation.model_draft import ModelDraft
    from paged_kv.integrations.speculation.ngram_draft import NGramDraft
    from paged_kv.integrations.speculation.speculative_generation import speculative_batch_generate
    from paged_kv.kernels.pages.errors import PagesNotRead, ThreadConflict
    from paged_kv.pool.page_pool import PagePool
    from paged_kv.pool.stats import PoolStats
    from paged_kv.sequences.sequence import Sequence
    from paged_kv.store.errors import StoreError

__version__ = "0.1.0"

__all__ = [
    "BlockStateError",
    "EvictionPolicy",
    "FirstInFirstOut",
    "LeastFrequentlyUsed",
    "LeastRecentlyUsed",
    "ModelDraft",
    "NGramDraft",
    "NotPinned",
    "OldestFirst",
    "PagePool",
    "PagedCacheFactory",
    "PagedKVCache",
    "PagedKVError",
    "PagesNotRead",
    "PoolExhausted",
    "PoolStats",
    "RequantisationPolicy",
    "RollbackError",
    "Sequence",
    "SpeculativeBatchGenerator",
    "StoreError",
    "ThreadConflict",
    "__version__",
    "generate_samples",
    "speculative_batch_generate",
]

_HOMES = {
    "EvictionPolicy": "allocator.prefixes.eviction",
    "FirstInFirstOut": "allocator.prefixes.eviction",
    "LeastFrequentlyUsed": "allocator.prefixes.eviction",
    "LeastRecentlyUsed": "allocator.prefixes.eviction",
    "BlockStateError": "allocator.errors",
    "RequantisationPolicy": "allocator.requantisation",
    "NotPinned": "allocator.errors",
    "OldestFirst": "allocator.requantisation",
    "PagedKVError": "allocator.errors",
    "PoolExhausted": "allocator.errors",
    "RollbackError": "allocator.errors",
    "PagedCacheFactory": "integrations.paged_cache_factory",
    "PagePool": "pool.page_pool",
    "PagedKVCache": "cache.paged_kv_cache",
    "PoolStats": "pool.stats",
    "Sequence": "sequences.sequence",
    "StoreError": "store.errors",
    "PagesNotRead": "kernels.pages.errors",
    "ThreadConflict": "kernels.pages.errors",
    "generate_samples": "integrations.samples",
    "ModelDraft": "integrations.speculation.model_draft",
    "NGramDraft": "integrations.speculation.ngram_draft",
    "SpeculativeBatchGenerator": "integrations.speculation.generator",
    "speculative_batch_generate": "integrations.speculation.speculative_generation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'paged_kv' has no attribute {name!r}")
    with backend_named():
        home = import_module(f"paged_kv.{_HOMES[name]}")
        if "paged_kv.pool.page_pool" in sys.modules:
            # A process with pools publishes them to `paged-kv stats`.
            import_module("paged_kv.monitor.publishing")
    return getattr(home, name)
