"""API keys and their limits, and the host names under which browsers may open pages."""

import asyncio
import base64
import hmac
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from starlette.requests import Request

from paged_kv.options import PriorityRange
from paged_kv.server.engine.prompt_fetcher import OtherServer
from paged_kv.server.http import access
from paged_kv.server.http.access import (
    Clients,
    Gate,
    KnownHosts,
    Limits,
    read_api_keys,
    read_prefill_key,
    salt_of,
)
from paged_kv.server.http.api_errors import APIError


def request(**headers: str) -> Request:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "headers": raw})


def clients(*keys: str) -> Clients:
    limits = Limits(PriorityRange(0, 0))
    return Clients(dict.fromkeys(keys, limits), limits)


def test_keys_are_read_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n  two \n")
    assert read_api_keys(str(file)) == ["one", "two"]
    assert read_api_keys(None) == []
    monkeypatch.setenv("SECRET", "three")
    assert read_api_keys("env:SECRET") == ["three"]
    for source in ("env:NO_SUCH_VARIABLE", str(tmp_path / "empty")):
        (tmp_path / "empty").touch()
        with pytest.raises(ValueError, match="holds no key"):
            read_api_keys(source)
    with pytest.raises(FileNotFoundError):
        read_api_keys(str(tmp_path / "none"))


def test_one_key_is_sent_to_the_other_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", " three\n")
    assert read_prefill_key("env:SECRET") == "three"
    assert read_prefill_key(None) is None
    assert "three" not in repr(OtherServer("http://other", "three"))
    for keys, message in (("three\nfour", "holds 2 keys"), ("\n", "--prefill-key.*holds no key")):
        monkeypatch.setenv("SECRET", keys)
        with pytest.raises(ValueError, match=message) as refused:
            read_prefill_key("env:SECRET")
        assert "three" not in str(refused.value)


def test_a_key_is_required_whole_and_as_a_bearer() -> None:
    keys = clients("one", "two-\u00e9")
    first = keys.require(request(authorization="Bearer one"))
    second = keys.require(request(authorization="bearer  two-\u00e9 "))
    assert first
    assert second
    assert first != second
    assert "one" not in first
    for wrong in ("Bearer on", "Bearer one2", "Basic one", "one", "Bearer", ""):
        with pytest.raises(APIError) as refused:
            keys.require(request(authorization=wrong))
        assert refused.value.status == 401
    with pytest.raises(APIError):
        keys.require(request())
    assert clients().require(request()) is None


@pytest.mark.parametrize(
    "given",
    [
        "Bearer one",
        "Basic " + base64.b64encode(b"anybody:one").decode(),
        "basic " + base64.b64encode(b":two-\xc3\xa9").decode(),
    ],
)
def test_readers_have_a_key_as_a_bearer_or_as_a_password(given: str) -> None:
    keys = clients("one", "two-\u00e9")
    keys.require_of_reader(request(authorization=given))
    if given.lower().startswith("basic"):
        with pytest.raises(APIError):
            keys.require(request(authorization=given))


def test_readers_without_a_key_are_asked_for_a_password() -> None:
    encoded = [base64.b64encode(each).decode() for each in (b"one:", b":on", b"one", b":one:")]
    for wrong in (
        "",
        "Bearer on",
        "Basic one",
        "Basic \u00e9",
        "one",
        *map("Basic ".__add__, encoded),
    ):
        with pytest.raises(APIError, match="as a password") as refused:
            clients("one").require_of_reader(request(authorization=wrong))
        assert refused.value.status == 401
        assert refused.value.headers["WWW-Authenticate"].startswith("Basic realm=")
    clients().require_of_reader(request())


def test_right_and_wrong_keys_take_the_same_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all keys, of digests of one length, each in constant time: how long an answer takes
    tells nothing of what a key begins with, how long it is, or which one it is."""
    compared: list[tuple[bytes, bytes]] = []

    def noted(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return hmac.compare_digest(one, other)

    monkeypatch.setattr(access, "hmac", SimpleNamespace(compare_digest=noted))
    keys = clients("first", "second", "x" * 1000)
    for given in ("first", "x" * 1000, "firsT", "f", "", "y" * 100_000):
        for require in (keys.require, keys.require_of_reader):
            compared.clear()
            with nullcontext() if given in ("first", "x" * 1000) else pytest.raises(APIError):
                require(request(authorization=f"Bearer {given}"))
            assert [len(each) for pair in compared for each in pair] == [32] * 6


def test_a_salt_is_of_the_key_and_of_the_request() -> None:
    salts = [salt_of(None, None), salt_of(None, "s"), salt_of("k", None), salt_of("k", "s")]
    assert salts[:2] == [None, "s"]
    assert len(set(salts)) == 4


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8080", "localhost", "LOCALHOST:1", "[::1]:8080", "10.0.0.5", "mac.lan:80"]
)
def test_addresses_and_own_names_are_known(host: str) -> None:
    KnownHosts("mac.lan").require(request(host=host))


def test_further_names_are_known_if_the_server_is_told_so() -> None:
    for others in (["A.example", "evil.example"], ["*"]):
        KnownHosts("127.0.0.1", others).require(request(host="evil.example:80"))


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "", "127.0.0.1.evil.example"]
)
def test_other_names_are_not(host: str) -> None:
    with pytest.raises(APIError, match="not served as"):
        KnownHosts("127.0.0.1").require(request(host=host))


def test_who_leaves_while_the_model_loads_leaves_no_task() -> None:
    async def leave() -> None:
        event: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(Gate().while_open(event))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(leave())


def test_requests_are_counted_by_key() -> None:
    most = Limits(PriorityRange(0, 100))
    counted = Clients({"a": Limits(PriorityRange(0, 0), 2), "b": most}, most)
    a, b = [counted.require(request(authorization=f"Bearer {key}")) for key in "ab"]
    with counted.entered(a), counted.entered(a), counted.entered(b):
        with pytest.raises(APIError) as refused, counted.entered(a):
            pass
        assert refused.value.status == 429
        assert refused.value.headers["Retry-After"]
    with counted.entered(a):
        pass
    assert not counted._inside
    counted.require_priority(b, 100)
    for client, priority in ((a, 1), (a, -1), (b, 101)):
        with pytest.raises(APIError, match="you may ask"):
            counted.require_priority(client, priority)
