"""Names of models that are paths, or no names at all, on a server that loads others."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.running_server import PagedRunningServer, paged_server
from tests.support.tiny_model import asked

SECRET = "hunter2"
# None has the form of a repository, which would be looked for on the network.
PATHS = ["/", "..", "models/../../etc", "~", "/etc/passwd", "http://127.0.0.1:9/a", "a\0b"]
PATHS += ["\n", "C:\\x", "\u00e9\U0001f600", "/" + "x/" * 2000]


@pytest.fixture(scope="module")
def server(tiny: str) -> Iterator[PagedRunningServer]:
    with paged_server("--model", tiny, "--allow-model-switch", "--max-kv-bytes", "32MB") as started:
        yield started


def completion(running: PagedRunningServer, **body: Any) -> tuple[int, Any]:
    return asked(running, "/v1/completions", {"prompt": "a", "max_tokens": 1, **body})


SLOW = [pytest.param(field, marks=pytest.mark.slow) for field in ("adapters", "draft_model")]


@pytest.mark.parametrize("field", ["model", *SLOW])
def test_what_cannot_be_loaded_is_named_and_leaves_what_is(
    running: PagedRunningServer, tiny: str, tmp_path: Path, field: str
) -> None:
    (pool,) = running.pools
    (tmp_path / "config.json").write_text(json.dumps({"model_type": SECRET, "quiet": SECRET}))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"fine_tune_type": 5, "q": SECRET}))
    for name in (*PATHS, str(tmp_path), str(Path(tiny).parent)):
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


def test_no_path_is_described(running: PagedRunningServer) -> None:
    for name in ("/etc/passwd", "../../etc", "..%2f..%2fetc", "%00", "%ff%fe", "", "x" * 5000):
        status, answer = asked(running, f"/v1/models/{name}")
        assert status == 404
        assert answer["error"]["code"] == "model_not_found"
        assert len(answer["error"]["message"]) < 500
        # The server has it.
        assert "--allow-model-switch" not in answer["error"]["message"]
