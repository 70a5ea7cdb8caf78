"""A paged block-allocator KV cache for MLX and mlx-lm.

    from paged_kv import PagedCacheFactory

    factory = PagedCacheFactory(model)
    generate(model, tokenizer, prompt, prompt_cache=factory.make_cache())

Importing the package loads nothing: each name is imported at its first use, so that code that
needs only the allocator does not load mlx. On Linux, mlx that is imported later gets OpenBLAS.
Before mlx-lm loads a saved prompt cache, the process must have used one of these names, so that
mlx-lm knows the cache's class.
"""

import sys

# Type checkers know this name. typing itself takes most of the time of this import, in which
# nothing ends a command that is interrupted.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as AnySequence
    from types import ModuleType
    from typing import Any

    from paged_kv.allocator.errors import (
        BlockStateError,
        NotPinned,
        NotReproducible,
        OutOfMemory,
        PagedKVError,
        PoolExhausted,
        RollbackError,
        UnknownSession,
    )
    from paged_kv.allocator.prefixes.eviction import (
        BetterOfTwo,
        EvictionPolicy,
        FirstInFirstOut,
        LeastFrequentlyUsed,
        LeastRecentlyUsed,
        LeastWorth,
    )
    from paged_kv.allocator.requantisation import OldestFirst, RequantisationPolicy
    from paged_kv.cache.paged_kv_cache import PagedKVCache
    from paged_kv.integrations.batching.last_responses import PromptCacheTaken
    from paged_kv.integrations.cache_options import CacheOptions
    from paged_kv.integrations.grammar.processor import GrammarProcessor
    from paged_kv.integrations.heads.loading import load_head
    from paged_kv.integrations.paged_cache_factory import PagedCacheFactory
    from paged_kv.integrations.samples import generate_samples
    from paged_kv.integrations.servers.every_model import use_pages
    from paged_kv.integrations.speculation.generator import SpeculativeBatchGenerator
    from paged_kv.integrations.speculation.head_draft import HeadDraft
    from paged_kv.integrations.speculation.model_draft import ModelDraft
    from paged_kv.integrations.speculation.ngram_draft import NGramDraft
    from paged_kv.integrations.speculation.speculative_generation import speculative_batch_generate
    from paged_kv.kernels.pages.errors import PagesNotRead, ThreadConflict
    from paged_kv.offload.offloading import OffloadError
    from paged_kv.options import embedded_model
    from paged_kv.pool.page_pool import PagePool
    from paged_kv.pool.stats import PoolStats
    from paged_kv.prefix.keeping import Unstored
    from paged_kv.steps.sequence import Sequence
    from paged_kv.store.folder import StoreError
    from paged_kv.store.options import StoreOptions

__version__ = "0.2.0"

new_pool_listeners: "list[Callable[[], None]]" = []
"""Called, one at a time, for each new pool."""

__all__ = [
    "BetterOfTwo",
    "BlockStateError",
    "CacheOptions",
    "EvictionPolicy",
    "FirstInFirstOut",
    "GrammarProcessor",
    "HeadDraft",
    "LeastFrequentlyUsed",
    "LeastRecentlyUsed",
    "LeastWorth",
    "ModelDraft",
    "NGramDraft",
    "NotPinned",
    "NotReproducible",
    "OffloadError",
    "OldestFirst",
    "OutOfMemory",
    "PagePool",
    "PagedCacheFactory",
    "PagedKVCache",
    "PagedKVError",
    "PagesNotRead",
    "PoolExhausted",
    "PoolStats",
    "PromptCacheTaken",
    "RequantisationPolicy",
    "RollbackError",
    "Sequence",
    "SpeculativeBatchGenerator",
    "StoreError",
    "StoreOptions",
    "ThreadConflict",
    "UnknownSession",
    "Unstored",
    "__version__",
    "embedded_model",
    "generate_samples",
    "load_head",
    "speculative_batch_generate",
    "use_pages",
]

_HOMES = {
    "BetterOfTwo": "allocator.prefixes.eviction",
    "EvictionPolicy": "allocator.prefixes.eviction",
    "FirstInFirstOut": "allocator.prefixes.eviction",
    "LeastFrequentlyUsed": "allocator.prefixes.eviction",
    "LeastRecentlyUsed": "allocator.prefixes.eviction",
    "LeastWorth": "allocator.prefixes.eviction",
    "BlockStateError": "allocator.errors",
    "RequantisationPolicy": "allocator.requantisation",
    "NotPinned": "allocator.errors",
    "OldestFirst": "allocator.requantisation",
    "NotReproducible": "allocator.errors",
    "PagedKVError": "allocator.errors",
    "OutOfMemory": "allocator.errors",
    "PoolExhausted": "allocator.errors",
    "RollbackError": "allocator.errors",
    "UnknownSession": "allocator.errors",
    "CacheOptions": "integrations.cache_options",
    "PagedCacheFactory": "integrations.paged_cache_factory",
    "OffloadError": "offload.offloading",
    "PagePool": "pool.page_pool",
    "PagedKVCache": "cache.paged_kv_cache",
    "PoolStats": "pool.stats",
    "PromptCacheTaken": "integrations.batching.last_responses",
    "Sequence": "steps.sequence",
    "StoreError": "store.folder",
    "StoreOptions": "store.options",
    "Unstored": "prefix.keeping",
    "PagesNotRead": "kernels.pages.errors",
    "ThreadConflict": "kernels.pages.errors",
    "embedded_model": "options",
    "generate_samples": "integrations.samples",
    "GrammarProcessor": "integrations.grammar.processor",
    "HeadDraft": "integrations.speculation.head_draft",
    "load_head": "integrations.heads.loading",
    "ModelDraft": "integrations.speculation.model_draft",
    "NGramDraft": "integrations.speculation.ngram_draft",
    "SpeculativeBatchGenerator": "integrations.speculation.generator",
    "speculative_batch_generate": "integrations.speculation.speculative_generation",
    "use_pages": "integrations.servers.every_model",
}


def __getattr__(name: str) -> "Any":
    if name not in _HOMES:
        raise AttributeError(f"module 'paged_kv' has no attribute {name!r}")
    from importlib import import_module

    from paged_kv.extras import missing_named

    with missing_named():
        return getattr(import_module(f"paged_kv.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)


def _publish() -> None:
    """Show the pools of this process to `paged-kv stats`, from its first one on."""
    from paged_kv.monitor.publisher import publisher

    publisher.start()


class _BeforeMLX:
    """A finder of modules that finds none. It loads OpenBLAS when MLX is imported, which then takes
    it: that takes time and threads, and much of the package does without MLX."""

    def find_spec(
        self, fullname: str, path: "AnySequence[str] | None", target: "ModuleType | None" = None, /
    ) -> None:
        if fullname == "mlx.core":
            from paged_kv.openblas import load_openblas

            load_openblas()


# Here, because no module of the package can make a pool, or import MLX, before this file has run.
new_pool_listeners.append(_publish)
if sys.platform == "linux" and "mlx.core" not in sys.modules:
    sys.meta_path.insert(0, _BeforeMLX())
