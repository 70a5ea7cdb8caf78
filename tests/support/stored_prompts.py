"""Prompts that factories compute, store and reuse."""

from pathlib import Path
from typing import Any

import mlx.core as mx

from paged_kv import PagedCacheFactory, StoreOptions
from paged_kv.store.tiered_store import TieredStore
from tests.support.generation import Run, greedy
from tests.support.zoo import small_model

TEXT = [(11 * i * i + 5 * i + 7) % 97 for i in range(1200)]

# The fewest that have one of each kind.
_LAYERS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"num_hidden_layers": 2, "sliding_window_pattern": 2},
    "gpt_oss": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3_next": {"num_hidden_layers": 2},
}


def shallow_model(name: str, **changes: Any) -> Any:
    """A model of the zoo with as few layers as show how its kinds of layers work together."""
    return small_model(name, **{**_LAYERS.get(name, {"num_hidden_layers": 1}), **changes})


def stored_factory(model: Any, folder: Path, **options: Any) -> PagedCacheFactory:
    return PagedCacheFactory(
        model, store=folder, **{"max_bytes": 1 << 28, "store_bytes": "1GB", **options}
    )


def store_of(factory: PagedCacheFactory) -> TieredStore:
    assert factory.store is not None
    return factory.store


def warm(model: Any, factory: PagedCacheFactory, prompt: list[int]) -> tuple[Run, int]:
    cache, cached = factory.fetch_cache(prompt)
    run = greedy(model, prompt[cached:], cache, 4)
    factory.pool.check()
    return run, cached


def cold(model: Any, prompt: list[int], count: int = 4, **options: Any) -> Run:
    """The run of a factory that has cached nothing."""
    return greedy(model, prompt, PagedCacheFactory(model, **options).make_cache(), count)


def computed(model: Any, factory: PagedCacheFactory, prompt: list[int]) -> None:
    """Compute a prompt, and insert it."""
    cache = factory.make_cache()
    for start in range(0, len(prompt), 256):
        model(mx.array([prompt[start : start + 256]]), cache=cache)
        mx.eval([layer.state for layer in cache])
    factory.insert_cache(prompt, cache)


def read(model: Any, factory: PagedCacheFactory, tokens: list[int]) -> None:
    """Compute tokens, generate nothing, and insert the result."""
    cache = factory.make_cache()
    model(mx.array([tokens]), cache=cache)
    assert factory.insert_cache(tokens, cache) == len(tokens)


def found(model: Any, folder: Path, prompt: list[int], **options: Any) -> int:
    """The number of a prompt's tokens that a new factory finds."""
    factory = stored_factory(model, folder, **options)
    _, cached = factory.fetch_cache(prompt)
    factory.close()
    return cached


def remote_factory(model: Any, secret: Path, *tiers: Any, **options: Any) -> PagedCacheFactory:
    return PagedCacheFactory(
        model,
        store=list(tiers),
        max_bytes=1 << 28,
        store_bytes="1GB",
        store_options=StoreOptions(secret=secret, **options),
    )


def filled(model: Any, secret: Path, address: str, tokens: list[int]) -> None:
    """Let one machine compute a prompt, and share it."""
    factory = remote_factory(model, secret, address)
    computed(model, factory, tokens)
    assert store_of(factory).flush()
    factory.close()
