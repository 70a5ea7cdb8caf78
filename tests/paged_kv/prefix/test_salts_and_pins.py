"""The salts under which a prompt hits, and the pins that keep it."""

import copy

import pytest

from paged_kv import PagedCacheFactory
from tests.support.stored_prompts import TEXT, read, shallow_model


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
