"""A server that lets another one compute long prompts writes the texts that it would have written,
whatever happens to either."""

import json
import random
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from openai import OpenAI

from paged_kv.server.server_command import run
from tests.support.folders import MODEL_FOLDERS
from tests.support.ports import free_port
from tests.support.running_server import wait_until
from tests.support.server_process import ended, metrics, post, server_process
from tests.support.tier_servers import SECRET, RedisServer, redis_server
from tests.support.zoo import ZOO, small_model

PAGE = 256
EXACT = ("--dtype", "float32", "--max-tokens", "8")


def prompt(seed: int, length: int = 1500) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(1, 500) for _ in range(length)]


def text_of(port: int, tokens: list[int], **body: Any) -> str:
    answer = post(port, prompt=tokens, **body)
    content = json.loads(answer.read())
    assert answer.status == 200, content
    return str(content["choices"][0]["text"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("secret") / "secret"
    file.write_bytes(SECRET)
    return file


@pytest.fixture(scope="module")
def tier(server: RedisServer, secret: Path) -> list[str]:
    return ["--store", server.address, "--store-secret", str(secret)]


@contextmanager
def pair(tier: list[str], *options: str) -> Iterator[Any]:
    """A server that computes prompts, and one that hands them over, each a process."""
    with ExitStack() as stack:
        other, there = stack.enter_context(server_process(*EXACT, *tier, *options))
        url = f"http://127.0.0.1:{there}"
        handing = ("--prefill-from", url, "--prefill-over", "500")
        this, here = stack.enter_context(server_process(*EXACT, *tier, *options, *handing))
        yield other, there, this, here


@pytest.fixture(scope="module")
def alone() -> Iterator[int]:
    with server_process(*EXACT) as (_, port):
        yield port


def write_hybrid(folder: Path) -> Path:
    """A model with states, windows that begin within a page, and full attention."""
    config = {**ZOO["baichuan_m1"], "vocab_size": 4096, "sliding_window": 300}
    others = shutil.ignore_patterns("config.json", "model.safetensors")
    shutil.copytree(MODEL_FOLDERS["stdlib-llama"], folder, ignore=others)
    model: Any = small_model("baichuan_m1", **config)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stdlib-llama", "stdlib-gemma3", "hybrid"])
def test_the_other_computes_the_prompt_and_this_one_writes_the_text(
    tier: list[str], name: str, tmp_path: Path
) -> None:
    folder = MODEL_FOLDERS[name] if name in MODEL_FOLDERS else write_hybrid(tmp_path / name)
    model = ("--model", str(folder))
    tokens = prompt(1)
    with pair(tier, *model) as (_, there, _, here), server_process(*EXACT, *model) as (_, port):
        assert text_of(here, tokens) == text_of(port, tokens)
        counted = metrics(here)
        assert counted["prompt_tokens_cached_total"] == 1500 // PAGE * PAGE
        assert counted["store_hit_tokens_total"] == 1500 // PAGE * PAGE
        assert metrics(there)["prompt_tokens_total"] == 1500 // PAGE * PAGE + 1
        # A shorter one, one that must not be stored, and one that is known are computed here.
        for asked, body in ((prompt(2, 400), {}), (prompt(3), {"store": False}), (tokens, {})):
            assert text_of(here, asked, **body) == text_of(port, asked)
        assert metrics(there)["prompt_tokens_total"] == 1500 // PAGE * PAGE + 1
        # Of this one the rest alone is handed over.
        longer = [*tokens, *prompt(4, 800)]
        assert text_of(here, longer, cache_salt="a") == text_of(port, longer)
        assert metrics(there)["prompt_tokens_total"] > 2 * 1500


@pytest.mark.slow
def test_another_that_is_not_there_or_has_other_weights_changes_nothing(
    tier: list[str], alone: int
) -> None:
    tokens = prompt(5)
    gemma = ("--model", str(MODEL_FOLDERS["stdlib-gemma3"]))
    with server_process(*EXACT, *gemma, *tier) as (_, there):
        for port in (there, free_port()):
            handing = ("--prefill-from", f"http://127.0.0.1:{port}", "--prefill-over", "500")
            with server_process(*EXACT, *tier, *handing) as (_, here):
                assert text_of(here, tokens) == text_of(alone, tokens)
                assert metrics(here)["prompt_tokens_cached_total"] == 0


@pytest.mark.slow
def test_the_other_may_ask_for_a_key(
    tier: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY", "hunter2-\u00e9")
    (tmp_path / "clients").write_text("alice\nbob\n")
    (tmp_path / "wrong").write_text("hunter3")
    asking = ("--api-key", "env:KEY", "--open-status")
    handing = (*EXACT, *tier, "--prefill-over", "500", "--api-key", str(tmp_path / "clients"))

    def cached(port: int, key: str, tokens: list[int]) -> int | None:
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0)
        usage = client.completions.create(model="default_model", prompt=tokens).usage
        assert usage
        assert usage.prompt_tokens_details
        return usage.prompt_tokens_details.cached_tokens

    logs = []
    with server_process(*EXACT, *tier, *asking) as (other, there):
        url = f"http://127.0.0.1:{there}"
        for key, known in (("env:KEY", 1280), (str(tmp_path / "wrong"), 0)):
            options = ("--prefill-from", url, "--prefill-key", key, "--log-level", "DEBUG")
            with server_process(*handing, *options) as (this, here):
                # The two clients have nothing in common, on either server.
                for client in ("alice", "bob"):
                    assert cached(here, client, prompt(10 if known else 11)) == known
                counted = metrics(there)
                assert counted["prompt_tokens_total"] == 2 * 1281
                assert counted["prompt_tokens_cached_total"] == 0
                this.terminate()
                logs.append(ended(this)[1])
        other.terminate()
        logs.append(ended(other)[1])
    assert "hunter" not in "".join(logs)
    assert ["give its API key with --prefill-key" in log for log in logs] == [False, True, False]


@pytest.mark.slow
def test_either_side_may_be_killed_at_any_time(
    server: RedisServer, tier: list[str], alone: int
) -> None:
    rng = random.Random(6)
    for seed in range(6):
        tokens = prompt(100 + seed, 3000)
        with pair(tier) as (other, there, this, here):
            server.client().flushall()
            answers: list[str] = []

            def ask(port: int = here, asked: list[int] = tokens, told: Any = answers) -> None:
                try:
                    told.append(text_of(port, asked))
                except (OSError, ValueError):
                    told.append("")

            asking = threading.Thread(target=ask)
            asking.start()
            pages = rng.randrange(9)
            wait_until(lambda n=pages, a=answers: server.client().dbsize() >= n or a)
            killed = (other, this)[seed % 2]
            killed.send_signal(signal.SIGKILL)
            asking.join()
            if killed is other:
                assert answers == [text_of(alone, tokens)]
            else:
                # The other one notices that nobody waits, and serves its own clients.
                wait_until(lambda at=there: metrics(at)["num_requests_running"] == 0)
                assert text_of(there, tokens) == text_of(alone, tokens)


@pytest.mark.slow
def test_a_tier_that_hangs_or_is_killed_changes_nothing(
    tmp_path: Path, secret: Path, alone: int
) -> None:
    with redis_server(tmp_path) as own:
        tier = ["--store", own.address, "--store-secret", str(secret)]
        with pair(tier) as (_, there, _, here):
            assert text_of(here, prompt(7)) == text_of(alone, prompt(7))
            with own.stopped():
                assert text_of(here, prompt(12)) == text_of(alone, prompt(12))
            # Nobody waited for pages that could not come.
            assert metrics(there)["prompt_tokens_total"] == 1281
            own.kill()
            assert text_of(here, prompt(8)) == text_of(alone, prompt(8))


def test_a_shared_tier_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", str(MODEL_FOLDERS["stdlib-llama"]), "--prefill-from", "http://other:8080"]
    with pytest.raises(ValueError, match="needs a tier that both servers share"):
        run([*options, "--store"])
    with pytest.raises(ValueError, match="--prefill-key is sent to the server of --prefill-from"):
        run([*options[:2], "--prefill-key", "env:KEY"])
    with pytest.raises(SystemExit):
        run(["--prefill-from", "other:8080"])
    assert "is not the address of a server" in capsys.readouterr().err


@pytest.mark.slow
def test_a_server_without_a_shared_tier_refuses_to_prefill(alone: int) -> None:
    import http.client

    client = http.client.HTTPConnection("127.0.0.1", alone, timeout=30)
    client.request("POST", "/v1/prefill", json.dumps({"prompt": prompt(9), "max_tokens": 1}))
    answer = client.getresponse()
    assert answer.status == 400
    assert "shares no tier" in answer.read().decode()
