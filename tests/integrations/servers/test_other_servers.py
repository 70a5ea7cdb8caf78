"""Servers that others made give the same texts with pages as without, and share prompts.

python -m benches.other_servers --install       fetches them; without them these tests are skipped
"""

import http.client
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from benches.other_servers import SERVERS, Running, is_installed, serving
from tests.support.folders import MODEL_FOLDERS
from tests.support.patience import PATIENCE_S
from tests.support.ports import free_port

CLIENTS = 4
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model in float32, in which texts do not depend on the order of sums."""
    folder = tmp_path_factory.mktemp("models") / "float32"
    shutil.copytree(MODEL_FOLDERS["stdlib-llama"], folder)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    wide = {name: array.astype(mx.float32) for name, array in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), wide, {"format": "mlx"})
    return folder


def post(server: Running, prompt: str, **body: Any) -> http.client.HTTPConnection:
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    known = {"model": server.model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    client.request("POST", "/v1/completions", json.dumps({**known, **body}), headers)
    return client


def complete(server: Running, prompt: str) -> str:
    answer = post(server, prompt).getresponse()
    body = json.load(answer)
    assert answer.status == 200, body
    return str(body["choices"][0]["text"])


def leave(server: Running, prompt: str) -> None:
    """Begin a stream, and close the connection after its first line."""
    client = post(server, prompt, max_tokens=400, stream=True)
    client.getresponse().readline()
    client.close()


def texts(server: Running, source: str) -> list[str]:
    """What clients read: of different prompts, of equal beginnings, and of a conversation."""
    common = source[1000:3500]
    with ThreadPoolExecutor(CLIENTS + 1) as clients:
        left = clients.submit(leave, server, source[6000:6600])
        prompts = [source[700 * at :][: 200 + 90 * at] for at in range(CLIENTS)]
        found = [*clients.map(lambda prompt: complete(server, prompt), prompts)]
        prompts = [common + source[9000:][: 80 * at + 9] for at in range(CLIENTS)]
        found += clients.map(lambda prompt: complete(server, prompt), prompts)
        left.result()
    conversation = common
    for turn in range(3):
        conversation += source[20_000 + 100 * turn :][:80]
        found.append(complete(server, conversation))
        conversation += found[-1]
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SERVERS)
def test_texts_are_equal_with_pages_and_without(name: str, model: Path, source_text: str) -> None:
    if not is_installed(name):
        pytest.skip(f"{name} is not there: python -m benches.other_servers --install")
    with serving(name, model, free_port(), pages=None) as stock:
        expected = texts(stock, source_text)
    with serving(name, model, free_port(), pages=["--max-kv-bytes", "200MB"]) as paged:
        assert texts(paged, source_text) == expected
        if name == "rapid-mlx":
            answer = json.load(post(paged, source_text[1000:4000]).getresponse())
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached > answer["usage"]["prompt_tokens"] / 2
