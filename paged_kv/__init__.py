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

    from paged_kv.allocator.errors import BlockStateError as BlockStateError
    from paged_kv.allocator.errors import NotPinned as NotPinned
    from paged_kv.allocator.errors import NotReproducible as NotReproducible
    from paged_kv.allocator.errors import OutOfMemory as OutOfMemory
    from paged_kv.allocator.errors import PagedKVError as PagedKVError
    from paged_kv.allocator.errors import PoolExhausted as PoolExhausted
    from paged_kv.allocator.errors import RollbackError as RollbackError
    from paged_kv.allocator.errors import UnknownSession as UnknownSession
    from paged_kv.allocator.prefixes.eviction import BetterOfTwo as BetterOfTwo
    from paged_kv.allocator.prefixes.eviction import EvictionPolicy as EvictionPolicy
    from paged_kv.allocator.prefixes.eviction import FirstInFirstOut as FirstInFirstOut
    from paged_kv.allocator.prefixes.eviction import LeastFrequentlyUsed as LeastFrequentlyUsed
    from paged_kv.allocator.prefixes.eviction import LeastRecentlyUsed as LeastRecentlyUsed
    from paged_kv.allocator.prefixes.eviction import LeastWorth as LeastWorth
    from paged_kv.allocator.requantisation import OldestFirst as OldestFirst
    from paged_kv.allocator.requantisation import RequantisationPolicy as RequantisationPolicy
    from paged_kv.cache.paged_kv_cache import PagedKVCache as PagedKVCache
    from paged_kv.integrations.batching.last_responses import PromptCacheTaken as PromptCacheTaken
    from paged_kv.integrations.cache_options import CacheOptions as CacheOptions
    from paged_kv.integrations.grammar.processor import GrammarProcessor as GrammarProcessor
    from paged_kv.integrations.heads.loading import load_head as load_head
    from paged_kv.integrations.paged_cache_factory import PagedCacheFactory as PagedCacheFactory
    from paged_kv.integrations.samples import generate_samples as generate_samples
    from paged_kv.integrations.servers.every_model import use_pages as use_pages
    from paged_kv.integrations.speculation.drafts import HeadDraft as HeadDraft
    from paged_kv.integrations.speculation.drafts import ModelDraft as ModelDraft
    from paged_kv.integrations.speculation.drafts import NGramDraft as NGramDraft
    from paged_kv.integrations.speculation.generator import (
        SpeculativeBatchGenerator as SpeculativeBatchGenerator,
    )
    from paged_kv.integrations.speculation.generator import (
        speculative_batch_generate as speculative_batch_generate,
    )
    from paged_kv.kernels.pages.errors import PagesNotRead as PagesNotRead
    from paged_kv.kernels.pages.errors import ThreadConflict as ThreadConflict
    from paged_kv.offload.offloading import OffloadError as OffloadError
    from paged_kv.options import embedded_model as embedded_model
    from paged_kv.pool.page_pool import PagePool as PagePool
    from paged_kv.pool.stats import PoolStats as PoolStats
    from paged_kv.prefix.keeping import Unstored as Unstored
    from paged_kv.steps.sequence import Sequence as Sequence
    from paged_kv.store.folder_store import StoreError as StoreError
    from paged_kv.store.options import StoreOptions as StoreOptions

__version__ = "0.2.0"

new_pool_listeners: "list[Callable[[], None]]" = []
"""Called, one at a time, for each new pool."""

# Each module, and the names that come from it. Type checkers find them above.
_NAMES = {
    "allocator.errors": (
        "BlockStateError NotPinned NotReproducible OutOfMemory PagedKVError PoolExhausted "
        "RollbackError UnknownSession"
    ),
    "allocator.prefixes.eviction": (
        "BetterOfTwo EvictionPolicy FirstInFirstOut LeastFrequentlyUsed LeastRecentlyUsed "
        "LeastWorth"
    ),
    "allocator.requantisation": "OldestFirst RequantisationPolicy",
    "cache.paged_kv_cache": "PagedKVCache",
    "integrations.batching.last_responses": "PromptCacheTaken",
    "integrations.cache_options": "CacheOptions",
    "integrations.grammar.processor": "GrammarProcessor",
    "integrations.heads.loading": "load_head",
    "integrations.paged_cache_factory": "PagedCacheFactory",
    "integrations.samples": "generate_samples",
    "integrations.servers.every_model": "use_pages",
    "integrations.speculation.drafts": "HeadDraft ModelDraft NGramDraft",
    "integrations.speculation.generator": "SpeculativeBatchGenerator speculative_batch_generate",
    "kernels.pages.errors": "PagesNotRead ThreadConflict",
    "offload.offloading": "OffloadError",
    "options": "embedded_model",
    "pool.page_pool": "PagePool",
    "pool.stats": "PoolStats",
    "prefix.keeping": "Unstored",
    "steps.sequence": "Sequence",
    "store.folder_store": "StoreError",
    "store.options": "StoreOptions",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = list(_HOMES)
__all__ += ["__version__"]


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
