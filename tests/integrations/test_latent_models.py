"""Models with latent attention: tokens are mlx-lm's, and decode gathers nothing."""

import gc

import mlx.core as mx
import pytest

from paged_kv import PagedCacheFactory
from paged_kv.kernels.pages.layer_pages import LayerPages
from tests.support.zoo import small_model

PROMPT = [(7 * i * i + 3 * i + 1) % 97 for i in range(270)]


def gathers(factory: PagedCacheFactory) -> int:
    gc.collect()
    return factory.stats().gather_fallbacks


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32"])
def test_a_batch_decodes_without_a_gather(
    name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it make the graph of one, but for the models that name `cache.keys`."""
    deepseek = small_model(name)
    factory = PagedCacheFactory(deepseek, max_bytes=64 << 20)
    caches = [factory.make_cache() for _ in range(2)]
    for cache, length in zip(caches, (30, 70), strict=True):
        mx.eval(deepseek(mx.array([PROMPT[:length]]), cache=cache))
    batch = [mine.merge([mine, other]) for mine, other in zip(*caches, strict=True)]
    before = gathers(factory)
    if name == "deepseek_v3":
        monkeypatch.delattr(LayerPages, "gather")
    for token in range(4):
        mx.eval(deepseek(mx.array([[token], [token + 1]]), cache=batch))
    assert gathers(factory) == before
