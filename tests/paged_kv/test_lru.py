"""The dict that keeps what was used last."""

from paged_kv.lru import LRU


def test_beyond_the_limit_the_least_recently_used_go() -> None:
    kept = LRU[str, int](3)
    for key in "abc":
        kept[key] = 0
    assert (kept.use("a"), kept["b"], kept.use("z")) == (0, 0, None)
    kept["b"] = 1
    assert kept.put("d", 2) == [("c", 0)]
    assert list(kept.items()) == [("a", 0), ("b", 1), ("d", 2)]
    kept.most = 2
    assert kept.put("b", 3) == [("a", 0)]


def test_sizes_count_and_the_latest_entry_stays() -> None:
    kept = LRU[str, bytes](10, lambda _, value: len(value))
    kept["a"], kept["b"], kept["a"] = b"123456", b"1234", b"123"
    assert kept.put("c", b"123") == []
    assert kept.pop("b") == b"1234"
    assert kept.put("d", b"12345678901") == [("a", b"123"), ("c", b"123")]
    assert kept.put("e", b"1") == [("d", b"12345678901")]
