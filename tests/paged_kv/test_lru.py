"""The dict that keeps what was used last."""

from paged_kv.lru import LRU


def test_beyond_the_limit_the_least_recently_used_go_but_not_the_latest() -> None:
    kept = LRU[str, int](6, lambda _, size: size)
    kept["a"], kept["b"], kept["c"] = 1, 3, 2
    assert (kept.use("a"), kept["b"], kept.use("z")) == (1, 3, None)
    kept["b"] = 2
    assert kept.put("d", 2) == [("c", 2)]
    assert list(kept.items()) == [("a", 1), ("b", 2), ("d", 2)]
    assert kept.pop("d") == 2
    kept.most = 3
    assert kept.put("e", 9) == [("a", 1), ("b", 2)]
    assert LRU[str, int](1).put("f", 9) == []
