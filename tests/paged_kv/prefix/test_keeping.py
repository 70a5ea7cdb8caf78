"""Whether a prefix is read or computed follows what both were measured to take."""

from paged_kv.prefix.keeping import Rates


def rates(computing_s: float, reading_s: float) -> Rates:
    both = Rates()
    both.computing.record(100, computing_s)
    both.reading["folder"].record(100, reading_s)
    return both


def test_the_quicker_is_chosen_for_each_tier_and_what_was_not_measured_is_read() -> None:
    assert all(rates(each, 1.0).is_reading_quicker(50, "folder") for each in (1.0, 2.0))
    both = rates(1.0, 2.0)
    assert not both.is_reading_quicker(50, "folder")
    assert both.is_reading_quicker(50, "redis")
    only_read = Rates()
    assert only_read.is_reading_quicker(1, "folder")
    only_read.reading["folder"].record(1, 100.0)
    assert only_read.is_reading_quicker(1, "folder")


def test_a_slow_disk_is_tried_again() -> None:
    slow = rates(1.0, 10.0)
    answers = [slow.is_reading_quicker(50, "folder") for _ in range(20)]
    assert answers[0] is False
    assert answers[-1] is True
