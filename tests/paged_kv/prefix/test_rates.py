"""Whether a prefix is read or computed follows what both were measured to take."""

from pathlib import Path

import pytest

from paged_kv.prefix.rates import Rate, Rates
from tests.support.stored_prompts import TEXT, computed, shallow_model, stored_factory


def test_later_measurements_count_more() -> None:
    rate = Rate()
    assert rate.seconds_for(10) is None
    rate.note(100, 1.0)
    assert rate.seconds_for(10) == pytest.approx(0.1)
    for _ in range(30):
        rate.note(100, 2.0)
    assert rate.seconds_for(10) == pytest.approx(0.2, rel=0.01)


def rates(computing_s: float, reading_s: float) -> Rates:
    both = Rates()
    both.computing.note(100, computing_s)
    both.reading("folder").note(100, reading_s)
    return both


def test_the_quicker_is_chosen_for_each_tier_and_what_was_not_measured_is_read() -> None:
    assert all(rates(each, 1.0).is_reading_quicker(50, "folder") for each in (1.0, 2.0))
    both = rates(1.0, 2.0)
    assert not both.is_reading_quicker(50, "folder")
    assert both.is_reading_quicker(50, "redis")
    only_read = Rates()
    assert only_read.is_reading_quicker(1, "folder")
    only_read.reading("folder").note(1, 100.0)
    assert only_read.is_reading_quicker(1, "folder")


def test_a_slow_disk_is_tried_again() -> None:
    slow = rates(1.0, 10.0)
    answers = [slow.is_reading_quicker(50, "folder") for _ in range(20)]
    assert answers[0] is False
    assert answers[-1] is True


def test_a_store_that_is_slower_is_left_alone(tmp_path: Path) -> None:
    model, folder = shallow_model("qwen3"), tmp_path / "pages"
    factory = stored_factory(model, folder)
    computed(model, factory, TEXT[:600])
    factory.close()
    for is_slow in (True, False):
        factory = stored_factory(model, folder)
        factory.prefixes.rates = rates(1.0, 1e9) if is_slow else Rates()
        _, cached = factory.fetch_cache(TEXT[:600])
        assert cached == (0 if is_slow else 599)
        assert factory.stats().tokens_read == cached
        assert (factory.prefixes.rates.reading("folder").seconds_for(1) or 0) > 0
        factory.close()
