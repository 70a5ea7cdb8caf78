"""Names of models that are paths, or no names at all, on a server that loads others."""

import json
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from paged_kv.integrations.speculation import draft_models
from tests.support.folders import MODEL_FOLDERS
from tests.support.running_server import (
    PATIENCE_S,
    PagedRunningServer,
    paged_server,
    with_small_model,
)

LLAMA = str(MODEL_FOLDERS["stdlib-llama"])
SECRET = "hunter2"
# None has the form of a repository, which would be looked for on the network.
PATHS = [
    "/",
    ".",
    "..",
    "../..",
    "models/../../etc",
    "~",
    "-",
    "/etc/passwd",
    "/proc/self/environ",
    "/dev/zero",
    "file:///etc/passwd",
    "http://127.0.0.1:9/a",
    "a\0b",
    "\n",
    "a b",
    "C:\\x",
    "\u00e9\U0001f600",
    "x" * 4096,
    "/" + "x/" * 2000,
]


@pytest.fixture(scope="module")
def running() -> Iterator[PagedRunningServer]:
    options = ["--model", LLAMA, "--allow-model-switch", "--max-kv-bytes", "32MB"]
    with with_small_model(), paged_server(*options) as server:
        yield server


def asked(running: PagedRunningServer, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    client = HTTPConnection("127.0.0.1", running.port, timeout=PATIENCE_S)
    client.request(method, path, json.dumps(body) if body else None)
    with client.getresponse() as answer:
        return answer.status, json.loads(answer.read())


def completion(running: PagedRunningServer, **body: Any) -> tuple[int, Any]:
    return asked(running, "POST", "/v1/completions", {"prompt": "a", "max_tokens": 1, **body})


@pytest.mark.parametrize("field", ["model", "adapters", "draft_model"])
def test_what_cannot_be_loaded_is_named_and_leaves_what_is(
    running: PagedRunningServer, tmp_path: Path, field: str
) -> None:
    (pool,) = running.pools
    (tmp_path / "config.json").write_text(json.dumps({"model_type": SECRET, "quiet": SECRET}))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"fine_tune_type": 5, "q": SECRET}))
    for name in (*PATHS, str(tmp_path), str(Path(LLAMA).parent)):
        status, answer = completion(running, **{field: name})
        assert status == 404, (name, answer)
        error = answer["error"]
        assert (error["param"], error["code"]) == (field, "model_not_found")
        assert error["message"].startswith(f"{field}=")
        assert "cannot be loaded" in error["message"]
        assert len(error["message"]) < 10_000
        assert f'"quiet": "{SECRET}"' not in error["message"]
    assert running.pools == [pool]
    assert completion(running)[0] == 200


def test_a_draft_model_of_another_vocabulary_is_named(
    running: PagedRunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other:
        vocab_size = 7

    monkeypatch.setattr(draft_models, "load", lambda name, **_: (None, Other()))
    (pool,) = running.pools
    status, answer = completion(running, draft_model=LLAMA)
    assert (status, answer["error"]["param"]) == (404, "draft_model")
    assert "has a vocabulary of 7 tokens" in answer["error"]["message"]
    assert running.pools == [pool]


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "../../etc", "..%2f..%2fetc", "%00", "%ff%fe", "", "x" * 5000],
)
def test_no_path_is_described(running: PagedRunningServer, name: str) -> None:
    status, answer = asked(running, "GET", f"/v1/models/{name}")
    assert status == 404
    assert answer["error"]["code"] == "model_not_found"
    assert len(answer["error"]["message"]) < 500
    # The server has it.
    assert "--allow-model-switch" not in answer["error"]["message"]
