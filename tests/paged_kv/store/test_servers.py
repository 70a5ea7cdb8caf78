"""Pages on servers that machines share: found exactly, verified before use, and every failure a
miss."""

import logging
import random
import re
from pathlib import Path
from typing import Any

import pytest

from paged_kv import PagedCacheFactory, StoreOptions
from paged_kv.extras import install_command
from paged_kv.store import tier
from paged_kv.store.entry_file import HEADER_BYTES, UNSEALED, Forged, Seal, WrongSize
from paged_kv.store.options import RedisAddress, S3Address, parse_address
from paged_kv.store.tiered_store import open_blobs, open_tiers
from paged_kv.store.writer import FULL, PAUSED
from tests.support.generation import greedy
from tests.support.patience import wait_until
from tests.support.store_damage import forged
from tests.support.stored_prompts import (
    TEXT,
    computed,
    filled,
    remote_factory,
    shallow_model,
    store_of,
    stored_factory,
    warm,
)
from tests.support.tier_servers import SECRET, RedisServer, redis_server, s3_credentials, s3_server
from tests.support.tier_servers import redis as redis
from tests.support.tier_servers import secret as secret
from tests.support.tier_servers import shared_redis as shared_redis


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "falcon_h1"])
def test_what_one_machine_has_computed_another_finds(
    redis: RedisServer, secret: Path, name: str
) -> None:
    model = shallow_model(name)
    filled(model, secret, redis.address, TEXT[:512])
    expected = greedy(model, TEXT[:700], PagedCacheFactory(model).make_cache(), 4)
    factory = remote_factory(model, secret, redis.address)
    found, cached = warm(model, factory, TEXT[:700])
    assert cached == 512
    assert found.tokens == expected.tokens
    assert factory.stats().store_hits == {"redis": 512}
    stats = store_of(factory).stats()
    assert (stats.errors, stats.dropped) == ({}, {})
    factory.close()


@pytest.mark.slow
def test_what_a_server_holds_is_kept_on_disk_too(
    redis: RedisServer, secret: Path, tmp_path: Path
) -> None:
    model, folder = shallow_model("qwen3"), tmp_path / "pages"
    filled(model, secret, redis.address, TEXT[:600])
    for kind in ("redis", "folder"):
        # Also what this machine sees for the first time: another one has seen it.
        factory = remote_factory(model, secret, folder, redis.address, after=3)
        _, cached = factory.fetch_cache(TEXT[:600])
        assert cached == 512
        hits = factory.stats().store_hits
        assert hits == {"folder": 0, "redis": 0} | {kind: 512}
        factory.close()


@pytest.mark.slow
def test_tiers_add_to_each_other(redis: RedisServer, secret: Path, tmp_path: Path) -> None:
    """The folder holds the beginning, and the server the rest."""
    model, folder = shallow_model("qwen3"), tmp_path / "pages"
    filled(model, secret, redis.address, TEXT[:1100])
    client = redis.client()
    local = stored_factory(model, folder)
    computed(model, local, TEXT[:512])
    local.close()
    factory = remote_factory(model, secret, folder, redis.address)
    before = client.info("commandstats").get("cmdstat_getrange", {"calls": 0})["calls"]
    _, cached = factory.fetch_cache(TEXT[:1100])
    assert cached == 1024
    # The folder's two pages were not read over the network.
    assert client.info("commandstats")["cmdstat_getrange"]["calls"] == before + 2
    factory.close()


@pytest.mark.slow
def test_another_secret_finds_nothing(redis: RedisServer, secret: Path, tmp_path: Path) -> None:
    model = shallow_model("qwen3")
    filled(model, secret, redis.address, TEXT[:600])
    other = tmp_path / "other"
    other.write_bytes(SECRET[::-1])
    factory = remote_factory(model, other, redis.address)
    assert factory.fetch_cache(TEXT[:600])[1] == 0
    assert store_of(factory).stats().errors == {}
    factory.close()


@pytest.mark.slow
def test_a_server_without_a_secret_is_refused(redis: RedisServer) -> None:
    model = shallow_model("qwen3")
    with pytest.raises(ValueError, match="secret"):
        PagedCacheFactory(model, store=redis.address)
    factory = PagedCacheFactory(
        model, store=redis.address, store_options=StoreOptions(unauthenticated=True)
    )
    factory.close()


@pytest.mark.slow
def test_names_say_nothing_and_entries_are_whole(redis: RedisServer, secret: Path) -> None:
    model = shallow_model("qwen3")
    filled(model, secret, redis.address, TEXT[:600])
    local = Seal(SECRET)
    for key in redis.client().scan_iter():
        name = key.decode().removeprefix("paged-kv:")
        assert len(name) == 64
        data = redis.client().get(key)
        assert len(local.opened(name, data)) == len(data) - HEADER_BYTES
        assert name.encode() not in data


@pytest.mark.slow
def test_no_forged_entry_is_used(redis: RedisServer, secret: Path) -> None:
    model, rng = shallow_model("qwen3"), random.Random(0)
    filled(model, secret, redis.address, TEXT[:1100])
    client = redis.client()
    entries = {key: client.get(key) for key in client.scan_iter()}
    factory = remote_factory(model, secret, redis.address)
    refused = 0
    for _ in range(25):
        for key, data in forged(rng, entries).items():
            client.set(key, data)
        cache, cached = factory.fetch_cache(TEXT[:1100])
        assert cached == 0
        del cache
        refused += len(entries)
        factory.clear()
    stats = store_of(factory).stats()
    assert stats.entries_read == 0
    assert set(stats.errors) == {Forged.kind, WrongSize.kind}
    for key, data in entries.items():
        client.set(key, data)
    assert factory.fetch_cache(TEXT[:1100])[1] == 1024
    factory.close()


@pytest.mark.slow
def test_an_entry_that_claims_too_much_is_not_read(
    redis: RedisServer, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shallow_model("qwen3")
    filled(model, secret, redis.address, TEXT[:600])
    monkeypatch.setattr(tier, "MOST_ENTRY_BYTES", 1000)
    factory = remote_factory(model, secret, redis.address)
    assert factory.fetch_cache(TEXT[:600])[1] == 0
    stats = store_of(factory).stats()
    assert (stats.entries_read, stats.errors) == (0, {"wrong size": 2})
    factory.close()


@pytest.mark.slow
def test_an_entry_that_grows_after_the_question_takes_no_more_memory(
    redis: RedisServer, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = open_blobs(RedisAddress("127.0.0.1", redis.port), UNSEALED)
    blobs.put([("a" * 64, [b"x" * 1000])])
    (size,) = blobs.sizes(["a" * 64])
    redis.client().append("paged-kv:" + "a" * 64, b"y" * 10**6)
    (data,) = blobs.get([("a" * 64, size)])
    assert len(data) == 1000
    blobs.close()


def ask(model: Any, factory: PagedCacheFactory, tokens: list[int]) -> list[int]:
    """The first tokens of an answer."""
    cache, cached = factory.fetch_cache(tokens)
    answer = greedy(model, tokens[cached:], cache, 4).tokens
    del cache
    factory.clear()
    return answer


@pytest.mark.slow
def test_a_server_that_is_killed_or_hangs_is_a_miss_and_comes_back(
    redis: RedisServer, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paged_kv.store.writer.FIRST_S", 0.01)
    monkeypatch.setattr("paged_kv.store.writer.LONGEST_S", 0.01)
    model = shallow_model("qwen3")
    filled(model, secret, redis.address, TEXT[:1100])
    factory = remote_factory(model, secret, redis.address)
    expected = ask(model, factory, TEXT[:1100])
    hits = factory.stats().store_hits["redis"]
    assert hits == 1024
    with redis.stopped():
        assert ask(model, factory, TEXT[:1100]) == expected
    redis.kill()
    assert ask(model, factory, TEXT[:1100]) == expected
    assert factory.stats().store_hits["redis"] == hits
    redis.start()
    filled(model, secret, redis.address, TEXT[:1100])

    def is_found_again() -> bool:
        assert ask(model, factory, TEXT[:1100]) == expected
        return factory.stats().store_hits["redis"] == 2 * hits

    wait_until(is_found_again)
    assert {"TimeoutError", "ConnectionError"} <= set(store_of(factory).stats().errors)
    factory.close()


@pytest.mark.slow
def test_during_a_pause_nobody_is_asked(redis: RedisServer, secret: Path) -> None:
    model = shallow_model("qwen3")
    factory = remote_factory(model, secret, redis.address)
    redis.kill()
    for _ in range(5):
        assert factory.fetch_cache(TEXT[:600])[1] == 0
    assert sum(store_of(factory).stats().errors.values()) == 1
    factory.close()


@pytest.mark.slow
def test_a_full_server_drops_and_counts(tmp_path: Path, secret: Path) -> None:
    model = shallow_model("qwen3")
    options = ("--maxmemory", "1mb", "--maxmemory-policy", "noeviction")
    with redis_server(tmp_path, *options) as server:
        server.client().config_set("maxmemory", server.client().info()["used_memory"] + 100)
        factory = remote_factory(model, secret, server.address)
        computed(model, factory, TEXT[:1100])
        assert store_of(factory).flush()
        dropped = store_of(factory).stats().dropped
        assert dropped[FULL] >= 1
        assert sum(dropped.values()) == 4
        assert set(dropped) <= {FULL, PAUSED}
        assert factory.fetch_cache(TEXT[:600])[1] == 599  # in memory
        factory.close()


@pytest.mark.slow
def test_a_server_that_evicts_gets_its_entries_again(redis: RedisServer, secret: Path) -> None:
    model = shallow_model("qwen3")
    factory = remote_factory(model, secret, redis.address)
    computed(model, factory, TEXT[:600])
    assert store_of(factory).flush()
    redis.client().flushall()
    factory.clear()
    assert factory.fetch_cache(TEXT[:600])[1] == 0
    computed(model, factory, TEXT[:600])
    assert store_of(factory).flush()
    assert len(redis.client().keys()) == 2
    factory.close()


@pytest.mark.parametrize("damage", [b"", b"hunter2", b"x" * 31])
def test_a_short_secret_is_refused_and_not_repeated(tmp_path: Path, damage: bytes) -> None:
    file = tmp_path / "secret"
    file.write_bytes(damage)
    with pytest.raises(ValueError, match="32") as refused:
        open_tiers([RedisAddress("nowhere")], 1 << 30, StoreOptions(secret=file))
    assert not damage or damage.decode() not in str(refused.value)


def test_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASSWORD_OF_REDIS", "hunter2")
    found = parse_address("rediss://me@host:7000/3?password=env:PASSWORD_OF_REDIS")
    assert found == RedisAddress("host", 7000, 3, True, "me", password="hunter2")
    assert "hunter2" not in f"{found} {found!r}"
    (tmp_path / "keys").write_text("id\nkey\n")
    found = parse_address(f"s3://bucket/a/b?endpoint=http://h:9&credentials={tmp_path}/keys")
    assert found == S3Address("bucket", "a/b", "http://h:9", None, "id", "key")
    assert "'key'" not in f"{found} {found!r}"


def test_wrong_addresses_are_refused_without_their_passwords() -> None:
    for text, message in (
        ("http://host", "cannot be at http://"),
        ("redis://", "names no host"),
        ("redis://:hunter2@host", "has a password in it"),
        ("redis://host/x", "must be a number"),
        ("redis://host:port", "cannot be read"),
        ("redis://host?pasword=env:X", "the option pasword"),
        ("redis://host?ca=FILE", "only password are known"),
        ("redis://host?password=env:NOT_SET_AT_ALL", "NOT_SET_AT_ALL"),
        ("redis://host?password=hunter2", "the file of a store's password"),
        ("s3:///prefix", "names no host or bucket"),
    ):
        with pytest.raises(ValueError, match=message) as refused:
            parse_address(text)
        assert "hunter2" not in str(refused.value)


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name, address in (("redis", RedisAddress("h")), ("s3", S3Address("b"))):
        monkeypatch.delitem(sys.modules, f"paged_kv.store.{name}_blobs", raising=False)
        monkeypatch.setitem(sys.modules, {"redis": "redis", "s3": "obstore"}[name], None)
        with pytest.raises(ValueError, match=re.escape(install_command(name))):
            open_blobs(address, UNSEALED)


@pytest.mark.slow
def test_a_password_is_asked_for_and_told_to_nobody(
    tmp_path: Path, secret: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shallow_model("qwen3")
    monkeypatch.setenv("STORE_PASSWORD", "hunter2")
    monkeypatch.setenv("WRONG_PASSWORD", "hunter3")
    caplog.set_level(logging.DEBUG)
    with redis_server(tmp_path, "--requirepass", "hunter2") as server:
        address = f"{server.address}?password=env:"
        filled(model, secret, address + "STORE_PASSWORD", TEXT[:600])
        for name, known in (("STORE_PASSWORD", 512), ("WRONG_PASSWORD", 0)):
            factory = remote_factory(model, secret, address + name)
            assert factory.fetch_cache(TEXT[:600])[1] == known
            assert "hunter" not in f"{store_of(factory).stats()} {factory.stats()}"
            factory.close()
    assert "hunter" not in caplog.text
    assert "redis://127.0.0.1" in caplog.text


@pytest.mark.slow
def test_a_bucket_is_a_tier_too(secret: Path) -> None:
    model = shallow_model("gemma3_text")
    with s3_server("bucket") as address, s3_credentials():
        filled(model, secret, address, TEXT[:1024])
        factory = remote_factory(model, secret, address)
        expected = greedy(model, TEXT[:1100], PagedCacheFactory(model).make_cache(), 4)
        found, cached = warm(model, factory, TEXT[:1100])
        assert cached == 1024
        assert found.tokens == expected.tokens
        assert factory.stats().store_hits == {"s3": 1024}
        assert store_of(factory).stats().errors == {}
        factory.close()
    factory = remote_factory(model, secret, address)
    assert factory.fetch_cache(TEXT[:1100])[1] == 0
    assert store_of(factory).stats().errors
    factory.close()
