"""The salts under which a prompt hits, and the pins that keep it."""

import copy

import mlx.core as mx
import pytest

from paged_kv import NotPinned, PagedCacheFactory
from tests.support.generation import assert_same_run, greedy
from tests.support.stored_prompts import TEXT, read, shallow_model


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "falcon_h1"])
@pytest.mark.slow
def test_a_cache_is_found_under_every_salt_that_it_was_inserted_under(name: str) -> None:
    model = shallow_model(name)
    factory = PagedCacheFactory(model)
    asked = [*TEXT[:600], 1, 2]
    expected = greedy(model, asked, PagedCacheFactory(model).make_cache(), 4)
    cache, _ = factory.fetch_cache(TEXT[:600])
    model(mx.array([TEXT[:600]]), cache=cache)
    for salt in (None, "alice"):
        assert factory.insert_cache(TEXT[:600], cache, salt=salt) == 600
    del cache
    # A cache that was fetched under one salt and inserted under another.
    cache, cached = factory.fetch_cache([*TEXT[:600], 1], salt="alice")
    assert cached == 600
    assert factory.insert_cache(TEXT[:600], cache, salt="bob") == 600
    del cache
    assert factory.stats().blocks_used == 0
    for salt in (None, "alice", "bob"):
        cache, cached = factory.fetch_cache(asked, salt=salt)
        assert cached == 600
        assert_same_run(greedy(model, asked[cached:], cache, 4), expected, 1e-3)
    del cache
    assert factory.fetch_cache(asked, salt="carol")[1] == 0
    # The prompt stays as long as one of them is pinned, and no longer.
    assert factory.pin(TEXT[:600], salt="alice") == 600
    factory.clear()
    found = {salt: factory.fetch_cache(asked, salt=salt)[1] for salt in (None, "alice", "bob")}
    assert found == {None: 0, "alice": 600, "bob": 0}
    factory.pool.check()
    assert factory.unpin(TEXT[:600], salt="alice") == 600
    factory.clear()
    factory.pool.check()
    assert (factory.stats().bytes_mapped, factory.prefixes.nbytes) == (0, 0)
    with pytest.raises(NotPinned):
        factory.unpin(TEXT[:600], salt="alice")


@pytest.mark.parametrize(("name", "found"), [("qwen3", 500), ("falcon_h1", 0)])
def test_insert_returns_what_is_found(name: str, found: int) -> None:
    """A state is that after all tokens, so nothing can resume from fewer of them."""
    model = shallow_model(name)
    factory = PagedCacheFactory(model)
    cache = factory.make_cache()
    model(mx.array([TEXT[:600]]), cache=cache)
    assert factory.insert_cache(TEXT[:500], cache) == found
    assert factory.fetch_cache([*TEXT[:500], 1])[1] == found
    assert factory.insert_cache(TEXT[:600], cache) == 600
    assert factory.fetch_cache([*TEXT[:600], 1])[1] == 600


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next"])
def test_unpin_undoes_a_pin_of_what_was_known_then(name: str) -> None:
    """Also if the factory has inserted more since, and under other weights."""
    model = copy.deepcopy(shallow_model(name))
    factory = PagedCacheFactory(model)
    read(model, factory, TEXT[:300])
    assert factory.pin(TEXT[:600]) == 300
    read(model, factory, TEXT[:600])
    assert factory.pin(TEXT[:300]) == 300
    # A longer prompt that shares more of the block in which a pin ends.
    read(model, factory, [*TEXT[:280], *TEXT[400:420]])
    projection = model.layers[-1].self_attn.k_proj
    projection.weight = projection.weight * 1.5
    assert factory.fetch_cache(TEXT[:301])[1] == 0
    assert factory.unpin(TEXT[:600]) == 300
    assert factory.unpin(TEXT[:300]) == 300
    factory.clear()
    assert (factory.stats().bytes_mapped, factory.prefixes.nbytes) == (0, 0)
