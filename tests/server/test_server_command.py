"""The options of `paged-kv server`."""

import json
import socket
import subprocess
import sys
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from paged_kv.command_line import main
from paged_kv.server.engine.paged_model_provider import PagedModelProvider
from paged_kv.server.options import server_parser
from tests.support.folders import MODEL_FOLDERS
from tests.support.patience import PATIENCE_S, wait_until
from tests.support.ports import free_port

MODEL = MODEL_FOLDERS["stdlib-llama"]


def test_all_options_of_mlx_lm_are_taken_beside_ours() -> None:
    parsed = server_parser().parse_args(
        ["--model", "m", "--temp", "0.5", "--decode-concurrency", "4", "--max-kv-bytes", "1.5GB"]
    )
    assert (parsed.model, parsed.temp, parsed.decode_concurrency) == ("m", 0.5, 4)
    assert (parsed.max_kv_bytes, parsed.page_format) == (1_500_000_000, "fp16")
    assert (parsed.prompt_cache_size, parsed.prompt_cache_bytes) == (None, None)
    assert parsed.admission_timeout == 60


def test_the_model_and_its_draft_are_converted_to_another_number_format() -> None:
    told = ["--model", str(MODEL), "--draft-model", str(MODEL), "--dtype", "float32"]
    provider = PagedModelProvider(server_parser().parse_args([*told, "--max-kv-bytes", "64MB"]))
    provider.load_default()  # type: ignore[no-untyped-call]  # mlx-lm's
    loaded: list[Any] = [provider.model, provider.draft_model]
    for model in loaded:
        parameters: Any = tree_flatten(model.parameters())
        assert {each.dtype for _, each in parameters} == {mx.float32}
    provider.reset()


def test_help_names_both(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["server", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for part in ("paged-kv server", "--chat-template-args", "--max-kv-bytes", "(default: auto)"):
        assert part in text


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--max-kv-bytes", "10GBB"], "'10GBB' is not a size"),
        (["--page-format", "q5"], "argument --page-format: 'q5' is no"),
        (["--admission-timeout", "-1"], "up to 1,000,000, got '-1'"),
        (["--shutdown-timeout", "soon"], "up to 1,000,000, got 'soon'"),
        (["--max-connections", "0"], "'0' is not a positive integer"),
        (["--max-body-bytes", "long"], "'long' is not a size"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_wrong_options_are_named(
    options: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["server", *options])
    assert ended.value.code == 2
    assert part in capsys.readouterr().err


def test_a_server_needs_something_to_serve(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["server"]) == 1
    assert "there is nothing to serve: name a --model" in capsys.readouterr().err


def test_an_mlx_lm_before_the_server_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_lm.__version__", "0.32.0")
    assert main(["server", "--model", str(MODEL)]) == 1
    assert "needs mlx-lm 0.32.1 or newer, and mlx-lm 0.32.0 is" in capsys.readouterr().err


def test_other_commands_still_refuse_what_they_do_not_know(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--prompt", "a", "--port", "8080"])
    error = capsys.readouterr().err
    assert error == (
        "paged-kv generate: unrecognized arguments: --port 8080\n"
        "`paged-kv generate --help` lists the options\n"
    )


def options(port: int) -> list[str]:
    return ["--model", str(MODEL), "--port", str(port), "--max-kv-bytes", "64MB"]


@pytest.mark.slow
def test_a_process_of_its_own_answers_and_quantised_pages_do_too() -> None:
    port = free_port()
    command = [sys.executable, "-m", "paged_kv", "server", *options(port)]
    with subprocess.Popen([*command, "--page-format", "q8"]) as process:
        try:
            body = json.dumps({"prompt": "import os\n", "max_tokens": 4}).encode()
            url = f"http://127.0.0.1:{port}/v1/completions"
            answer = json.loads(opened(Request(url, body), process))
            assert answer["choices"][0]["text"]
            assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        finally:
            process.terminate()


def test_a_port_in_use_ends_the_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Settings for a process of its own would stay in this one.
    monkeypatch.setattr("logging.basicConfig", lambda **_: None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["server", *options(taken.getsockname()[1])]) == 1
    said = capsys.readouterr().err
    assert "paged-kv server: " in said
    assert "in use" in said


def opened(request: Request, process: subprocess.Popen[bytes]) -> bytes:
    """The answer of a server that may still be starting."""
    answers: list[bytes] = []

    def has_answered() -> bool:
        try:
            with urlopen(request, timeout=PATIENCE_S) as response:
                answers.append(response.read())
        except URLError:
            assert process.poll() is None
        return bool(answers)

    wait_until(has_answered)
    return answers[0]
