"""`paged-kv store` lists, verifies and cleans what servers hold."""

import json
from pathlib import Path
from typing import Any

import pytest

from paged_kv.command_line import main
from paged_kv.store.entry_file import Seal, encode
from tests.support.store_entries import entry, links, prompt
from tests.support.tier_servers import SECRET, RedisServer
from tests.support.tier_servers import redis as redis
from tests.support.tier_servers import shared_redis as shared_redis

pytestmark = pytest.mark.slow


@pytest.fixture
def secret(tmp_path: Path) -> list[str]:
    (tmp_path / "secret").write_bytes(SECRET)
    return ["--store-secret", str(tmp_path / "secret")]


def told(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_verify_names_what_gc_removes(
    redis: RedisServer, secret: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    client, seal = redis.client(), Seal(SECRET)
    for made in map(entry, links(prompt(0, 3 * 256))):
        name = seal.name(made.place.key)
        client.set(f"paged-kv:{name}", b"".join(seal.sealed(name, encode(made))))
    first, second, _ = sorted(client.scan_iter())
    client.append(first, b"x")
    client.set(second, b"".join(Seal(b"guess" * 8).sealed(second.decode()[9:], [b"pages"])))
    client.set("paged-kv:" + "f" * 64, b"short")
    client.set("somebody else's", b"content")
    place = ["--store", redis.address, *secret]
    capsys.readouterr()
    assert main(["store", "verify", *place, "--json"]) == 1
    found = told(capsys)
    assert (found["entries"], len(found["findings"])) == (4, 3)
    assert main(["store", "gc", *place]) == 0
    assert "3 entries removed" in capsys.readouterr().out
    assert main(["store", "verify", *place]) == 0
    assert main(["store", "clear", "--dry-run", *place]) == 0
    assert client.dbsize() == 2
    assert main(["store", "clear", *place]) == 0
    assert client.keys() == [b"somebody else's"]


def test_a_server_that_is_gone_is_an_error_without_its_password(
    secret: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OF_THE_STORE", "hunter2")
    place = "redis://127.0.0.1:1/0?password=env:OF_THE_STORE"
    assert main(["store", "list", "--store", place, *secret]) == 1
    shown = capsys.readouterr()
    assert "a call to the server failed with ConnectionError" in shown.err
    assert "hunter2" not in shown.err + shown.out
    assert main(["store", "list", "--store", place]) != 0
    assert "needs a secret" in capsys.readouterr().err
