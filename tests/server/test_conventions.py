"""What people and clients of other servers try first, each with an answer that leads on."""

from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from paged_kv import embedded_model
from paged_kv.command_line import main
from paged_kv.options import named_model
from paged_kv.server.completions.model_names import typed_name
from paged_kv.server.http import request_body
from paged_kv.server.lifecycle import ready_line
from paged_kv.server.options import parsed_server_options
from paged_kv.server.server_command import require_servable
from tests.support.running_server import (
    PATIENCE_S,
    PagedRunningServer,
    noted_prompts,
    paged_server,
    with_small_model,
)
from tests.support.tiny_model import asked

MESSAGES = [{"role": "user", "content": "os"}]
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}
CHAT = "/v1/chat/completions"
# Shows the variables that clients set.
TEMPLATE = (
    "{{ messages[0]['content'] }} effort={{ reasoning_effort }} thinking={{ enable_thinking }}"
)


@pytest.fixture(scope="module")
def running() -> Iterator[PagedRunningServer]:
    options = ["--model", embedded_model(), "--max-kv-bytes", "32MB", "--max-tokens", "1"]
    with with_small_model(), paged_server(*options) as server:
        yield server


def chat(running: PagedRunningServer, **body: Any) -> tuple[int, Any]:
    return asked(running, CHAT, {"messages": MESSAGES, **body})


@pytest.mark.parametrize("path", ["/v1/embeddings", "/docs", "/api/tags"])
def test_an_unknown_path_is_told_the_routes(running: PagedRunningServer, path: str) -> None:
    status, answer = asked(running, path)
    assert status == 404
    said = answer["error"]["message"]
    assert f"no route '{path}'" in said
    for route in (CHAT, "/v1/models/{name}", "/tokenize", "/kv", "/metrics"):
        assert route in said


def test_fields_without_meaning_are_taken_and_logged_once(
    running: PagedRunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    request_body.record_foreign.cache_clear()
    for _ in range(2):
        assert chat(running, keep_alive="5m", num_ctx=4096, verbosity="low")[0] == 200
        status, _ = asked(running, "/v1/responses", {"input": "a", "text": {"verbosity": "low"}})
        assert status == 200
    said = [record.getMessage() for record in caplog.records if "of other servers" in record.msg]
    assert len(said) == 3
    assert "keep_alive" in said[0]


def test_the_effort_is_a_variable_of_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--model", embedded_model(), "--chat-template", TEMPLATE, "--max-tokens", "1"]
    options += ["--chat-template-args", '{"enable_thinking": true}']
    with with_small_model(), paged_server(*options, "--max-kv-bytes", "32MB") as running:
        prompts = noted_prompts(running, monkeypatch)
        effort: Any
        for effort in ("low", "none", None):
            assert chat(running, reasoning_effort=effort)[0] == 200
        # What a client says itself counts.
        named = {"reasoning_effort": "mine"}
        assert chat(running, reasoning_effort="low", chat_template_kwargs=named)[0] == 200
    assert [prompt.partition(" effort=")[2] for prompt in prompts] == [
        "low thinking=True",
        " thinking=False",
        " thinking=True",
        "mine thinking=True",
    ]


def test_tools_that_the_model_would_not_see_are_refused(running: PagedRunningServer) -> None:
    status, answer = chat(running, tools=[TOOL])
    assert (status, answer["error"]["param"]) == (400, "tools")
    assert "--drop-tools" in answer["error"]["message"]
    assert chat(running, tools=[TOOL], tool_choice="none")[0] == 200


def test_an_option_drops_tools() -> None:
    options = ["--model", embedded_model(), "--drop-tools", "--max-tokens", "1"]
    with with_small_model(), paged_server(*options, "--max-kv-bytes", "32MB") as running:
        without, with_tools = chat(running), chat(running, tools=[TOOL])
        assert with_tools[0] == 200
        assert with_tools[1]["usage"]["prompt_tokens"] == without[1]["usage"]["prompt_tokens"]


def test_the_model_has_the_name_that_people_type(running: PagedRunningServer) -> None:
    listed = [model["id"] for model in asked(running, "/v1/models")[1]["data"]]
    assert listed == ["stdlib-llama"]
    for name in (None, "default_model", "stdlib-llama"):
        assert chat(running, model=name)[1]["model"] == "stdlib-llama"
    assert chat(running, model=embedded_model())[1]["model"] == embedded_model()
    body = {"input": "a", "max_output_tokens": 1}
    assert asked(running, "/v1/responses", body)[1]["model"] == "stdlib-llama"
    message = {"messages": MESSAGES, "max_tokens": 1}
    assert asked(running, "/v1/messages", message)[1]["model"] == "stdlib-llama"


def test_a_download_is_called_by_its_repository(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--some-org--A-Model" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    assert typed_name(snapshot) == "some-org/A-Model"
    assert typed_name(tmp_path / "mine") == "mine"


def test_the_embedded_model_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert named_model("stdlib-llama") == embedded_model()
    assert named_model("other/model") == "other/model"
    options = parsed_server_options(["--model-alias", "a=stdlib-llama"])
    assert options.model_alias == [("a", embedded_model())]
    require_servable(options)  # requests name a model
    (tmp_path / "stdlib-llama").mkdir()
    assert named_model("stdlib-llama") == "stdlib-llama"
    assert main(["server", "--model", "stdlib-llama", "--port", "0"]) == 1  # an empty folder


def test_prompts_become_tokens_and_text_again(running: PagedRunningServer) -> None:
    loaded = running.provider.loaded
    assert loaded is not None
    tokenizer = loaded.tokenizer
    tokens = tokenizer.encode("import os\n")
    status, answer = asked(running, "/tokenize", {"prompt": "import os\n"})
    assert status == 200
    assert answer == {
        "count": len(tokens),
        "max_model_len": loaded.context_length,
        "tokens": tokens,
        "token_strs": None,
    }
    bare = {"prompt": "import os\n", "add_special_tokens": False, "return_token_strs": True}
    answer = asked(running, "/tokenize", bare)[1]
    assert answer["tokens"] == tokenizer.encode("import os\n", add_special_tokens=False)
    assert answer["token_strs"] == tokenizer.convert_ids_to_tokens(answer["tokens"])
    status, text = asked(running, "/detokenize", {"tokens": answer["tokens"]})
    assert (status, text) == (200, {"prompt": "import os\n"})
    said = asked(running, "/tokenize", {"messages": MESSAGES})[1]
    assert said["count"] == chat(running)[1]["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": [1]}, "prompt"),
        ("/tokenize", {"prompt": "a", "nonsense": 1}, "nonsense"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens.0"),
    ],
)
def test_no_tokens_are_made_of_nonsense(
    running: PagedRunningServer, path: str, body: dict[str, Any], param: str
) -> None:
    status, answer = asked(running, path, body)
    assert (status, answer["error"]["param"]) == (400, param)


def test_the_root_leads_to_the_page(running: PagedRunningServer) -> None:
    client = HTTPConnection("127.0.0.1", running.port, timeout=PATIENCE_S)
    client.request("GET", "/")
    answer = client.getresponse()
    assert (answer.status, answer.headers["Location"]) == (307, "kv")


def test_older_fields_name_the_newer_one(running: PagedRunningServer) -> None:
    status, answer = chat(running, guided_json={"type": "object"})
    assert status == 400
    assert 'send structured_outputs: {"json": ...}' in answer["error"]["message"]


def test_one_line_says_what_is_ready(running: PagedRunningServer) -> None:
    line = ready_line("127.0.0.1", 8080, "stdlib-llama", running.provider)
    (backend,) = {pool.backend.name for pool in running.pools}
    for part in (
        "ready at http://127.0.0.1:8080, page http://127.0.0.1:8080/kv",
        "model stdlib-llama",
        f"backend {backend}",
        "float",
        "pages fp16, up to 32.00 MB",
    ):
        assert part in line
