"""`paged-kv bench` compares both kinds of caches, and says where it could not."""

from itertools import cycle
from typing import Any

import mlx.core as mx
import pytest

from paged_kv import PagedCacheFactory, PagedKVCache
from paged_kv.integrations.batching.unpaged_caches import leaves
from paged_kv.integrations.bench.cache_pairs import CachePairs
from paged_kv.integrations.bench.measurements import BenchSizes
from paged_kv.integrations.bench.turns import (
    FEWEST_TURNS,
    Measurement,
    Skipped,
    compared,
    compared_clocks,
)
from tests.support.zoo import small_model

TINY = BenchSizes(contexts=(256,), prompt=16, prefix=300, part_s=0.5)


def measured(**changes: Any) -> Measurement:
    return Measurement(**{"name": "", "unit": "s", "mlx_lm": 3, "paged": 2, **changes})


def test_what_the_spread_explains_is_equal_or_unknown() -> None:
    assert measured(times_better=1.1, spread=1.2).verdict == "equal"
    assert measured(times_better=1 / 1.1, spread=1.2).verdict == "equal"
    # With two decimals these would be 1.00 times as good.
    assert measured(times_better=1.004).verdict == "equal"
    assert measured(times_better=1 / 1.004).verdict == "equal"
    assert measured(times_better=1 / 1.006).verdict == "mlx-lm, 1.01 times"
    assert measured(times_better=9.0, spread=1.3).verdict == "too noisy to tell (spread 1.30)"


def test_the_ratio_is_that_of_turns_and_the_spread_that_of_a_side() -> None:
    times = cycle([4.0, 8.0])
    # With less time a busy machine makes one turn seem too long.
    found = compared_clocks("x", lambda: 12.0, lambda: next(times), 0.2)
    assert isinstance(found, Measurement)
    assert found.turns >= FEWEST_TURNS
    assert found.mlx_lm == 12
    assert found.spread == 2
    assert found.is_noisy


def test_what_takes_too_long_is_skipped() -> None:
    found = compared("slow", lambda: None, lambda: None, 0)
    assert isinstance(found, Skipped)
    assert "a turn takes" in found.reason


@pytest.mark.parametrize("name", ["llama", "falcon_h1"])
def test_both_kinds_hold_the_same_numbers(name: str) -> None:
    model = small_model(name)
    pairs = CachePairs(model, PagedCacheFactory(model))
    for rows in (1, 2):
        stock, paged = (list(leaves(caches)) for caches in pairs.filled(20, rows))
        compared = 0
        for one, other in zip(stock, paged, strict=True):
            if isinstance(other, PagedKVCache):
                # The last token is the model's own, which sums in another order.
                keys, ours = (each.keys[..., :20, :] for each in (one, other))
                assert mx.array_equal(keys, ours)
                compared += 1
        assert compared


def test_to_fill_pages_counts_as_no_gather() -> None:
    """The first gather is warned of, as if the model did not read pages."""
    model = small_model("llama")
    factory = PagedCacheFactory(model)
    CachePairs(model, factory).filled(300, 2)
    assert factory.stats().gather_fallbacks == 0
