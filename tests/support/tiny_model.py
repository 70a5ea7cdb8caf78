"""A random model of one layer in a folder, and a server of it, for tests in which the model does
not matter."""

import json
import shutil
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from tests.support.folders import MODEL_FOLDERS
from tests.support.running_server import (
    PATIENCE_S,
    PagedRunningServer,
    assert_idle_pools_hold_nothing,
    paged_server,
)
from tests.support.zoo import ZOO, small_model

# Of the one-layer llama in float32: keys and values of two heads, in pages of 256 tokens.
BLOCK = 256 * 2 * 2 * 32 * 4
ONE_LAYER = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}


def tiny_folder(folder: Path, family: str = "llama", *, seed: int = 0, **changes: Any) -> str:
    """Make a folder with a model of the zoo that has the embedded model's tokenizer; a llama has
    one layer."""
    changes = {**(ONE_LAYER if family == "llama" else {}), "vocab_size": 4096, **changes}
    others = shutil.ignore_patterns("config.json", "*.safetensors", "draft_head")
    shutil.copytree(MODEL_FOLDERS["stdlib-llama"], folder, ignore=others)
    model: Any = small_model(family, seed=seed, **changes)
    weights: Any = tree_flatten(model.parameters())
    mx.save_safetensors(str(folder / "model.safetensors"), dict(weights))
    config = {**ZOO[family], **changes, "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the one-layer llama."""
    return tiny_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def server(tiny: str) -> Iterator[PagedRunningServer]:
    """A module's server; one with other options takes its place."""
    options = ["--model", tiny, "--max-kv-bytes", "64MB", "--max-tokens", "4"]
    with paged_server(*options) as started:
        yield started


@pytest.fixture
def running(server: PagedRunningServer) -> Iterator[PagedRunningServer]:
    """The module's server, which holds nothing after a test."""
    yield server
    assert_idle_pools_hold_nothing(server)


def asked(
    running: PagedRunningServer, path: str, body: Any = None, *, method: str = "", **headers: str
) -> tuple[int, Any]:
    """The status of an answer to a request, posted if it has a body, and its JSON."""
    client = HTTPConnection("127.0.0.1", running.port, timeout=PATIENCE_S)
    content = None if body is None else json.dumps(body)
    client.request(method or ("GET" if body is None else "POST"), path, content, headers)
    with client.getresponse() as answer:
        return answer.status, json.loads(answer.read())


def completion(running: PagedRunningServer, prompt: Any, **body: Any) -> tuple[str, int]:
    """The text of a greedy completion that does not end by itself, and the number of cached tokens
    of the prompt."""
    sent: dict[str, Any] = {"temperature": 0, "logit_bias": {"0": -1000}, "max_tokens": 8, **body}
    create: Any = running.client().completions.create
    answer = create(model="default_model", prompt=prompt, **sent)
    details = answer.usage.prompt_tokens_details
    return answer.choices[0].text, details.cached_tokens if details else 0


def tokens_of(number: int, length: int) -> list[int]:
    """A prompt that shares no page with those of other numbers."""
    return [(11 * i * i + 5 * i + number) % 500 + 1 for i in range(length)]
