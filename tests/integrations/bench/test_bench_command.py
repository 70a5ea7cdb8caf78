"""`paged-kv bench` compares both kinds of caches, and says where it could not."""

from typing import Any

from paged_kv import PagedCacheFactory
from paged_kv.integrations.bench.comparisons import QUICK, Bench
from paged_kv.integrations.bench.turns import (
    Measurement,
    Skipped,
    compared,
)
from tests.support.zoo import small_model


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


def test_what_takes_too_long_is_skipped() -> None:
    found = compared("slow", lambda: None, lambda: None, 0)
    assert isinstance(found, Skipped)
    assert "a turn takes" in found.reason


def test_caches_that_cannot_be_filled_are_not_compared() -> None:
    model = small_model("deepseek_v41")
    first = next(Bench(model, PagedCacheFactory(model), QUICK).outcomes())
    assert isinstance(first, Skipped)


def test_to_fill_pages_counts_as_no_gather() -> None:
    """The first gather is warned of, as if the model did not read pages."""
    model = small_model("llama")
    factory = PagedCacheFactory(model)
    Bench(model, factory, QUICK).filled(300, 2)
    assert factory.stats().gather_fallbacks == 0
