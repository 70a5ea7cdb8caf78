"""Every command of paged-kv, as a user runs it: the installed script, in processes of their own,
from another folder."""

import json
import os
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from paged_kv.command_line import _parser
from tests.support.folders import MODEL_FOLDERS
from tests.support.patience import PATIENCE_S, wait_until

SCRIPT = Path(sysconfig.get_path("scripts")) / "paged-kv"
PROMPT = "import os\n" * 90  # more than a page of tokens


@pytest.fixture(autouse=True)
def _another_folder(tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.delenv("PYTHONPATH", raising=False)


def done(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """A command that has ended."""
    command = [str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, **options)


def printed(*arguments: str, **options: Any) -> str:
    """What a command that succeeds prints."""
    ended = done(*arguments, **options)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command that runs until it is terminated."""
    process = subprocess.Popen(
        [str(SCRIPT), *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)


def wait_until_shown(process: subprocess.Popen[str], holds: Callable[[Any], bool]) -> None:
    """Wait until `paged-kv stats` shows a pool of this process of which the condition holds."""

    def is_shown() -> bool:
        assert process.poll() is None, process.communicate()
        shown = done("stats", "--json")
        if shown.returncode:
            assert "no process of yours has a pool of pages" in shown.stderr
            return False
        view = json.loads(shown.stdout)
        assert view["pid"] == process.pid
        return any(holds(pool["stats"]) for pool in view["pools"])

    wait_until(is_shown)


def uses_blocks(stats: Any) -> bool:
    return bool(stats["blocks_used"])


def test_stats_shows_generate_while_it_runs_and_what_was_saved_afterwards() -> None:
    with running("generate", "--prompt", "import os", "--max-tokens", "100000") as process:
        wait_until_shown(process, uses_blocks)
        Path("saved.json").write_text(printed("stats", "--json", "--pid", str(process.pid)))
    assert "no process of yours has a pool of pages" in done("stats").stderr
    assert f"process {process.pid}: " in printed("stats", "saved.json")


@pytest.mark.slow
def test_stats_shows_the_prompts_that_server_keeps() -> None:
    model = str(MODEL_FOLDERS["stdlib-llama"])
    with running("server", "--model", model, "--port", "0", "--max-kv-bytes", "64MB") as process:
        assert process.stderr is not None
        port = next(line.split()[-1] for line in process.stderr if "listening at" in line)
        body = json.dumps({"prompt": PROMPT, "max_tokens": 2}).encode()
        urlopen(Request(f"http://127.0.0.1:{port}/v1/completions", body), timeout=PATIENCE_S).read()
        wait_until_shown(process, lambda stats: stats["blocks_cached"] and not uses_blocks(stats))
        assert str(process.pid) in printed("stats", "--list")


@pytest.mark.slow
def test_stats_shows_bench() -> None:
    with running("bench", "--quick") as process:
        wait_until_shown(process, uses_blocks)


@pytest.mark.slow
def test_trace_replays_what_generate_has_recorded() -> None:
    environment = os.environ | {"PAGED_KV_TRACE": "trace.txt"}
    printed("generate", "--prompt", PROMPT, "--max-tokens", "3", env=environment)
    replay = json.loads(printed("trace", "replay", "trace.txt", "--json"))
    assert replay["recorded"] == replay["replayed"]
    assert replay["recorded"]["tokens_asked"] > 256
    printed("trace", "synthesize", "made-up.txt", "--sequences", "4")
    assert "block tables 4" in printed("stats", "made-up.txt")


@pytest.mark.slow
def test_store_knows_the_pages_that_generate_has_written() -> None:
    for _ in range(2):
        last = done("generate", "--prompt", PROMPT, "--max-tokens", "3", "--store", "pages")
        assert last.returncode == 0, last.stderr
    assert "269 of them cached" in last.stderr
    assert json.loads(printed("store", "list", "--store", "pages", "--json"))
    printed("store", "verify", "--store", "pages")


@pytest.mark.slow
def test_doctor_finds_every_kernel_right() -> None:
    assert "all checks passed" in printed("doctor")


@pytest.mark.slow
def test_plan_says_what_fits() -> None:
    assert json.loads(printed("plan", "--json"))["fits"]


@pytest.mark.slow
def test_completion_knows_the_commands() -> None:
    script = printed("completion", "bash")
    assert all(name in script for name in commands())


def test_every_command_is_in_the_name_of_a_test() -> None:
    words = {word for name in globals() if name.startswith("test_") for word in name.split("_")}
    assert commands() <= words


def commands() -> set[str]:
    """The names of the subcommands."""
    (actions,) = [each for each in _parser()._actions if each.dest == "command"]
    assert actions.choices is not None
    return set(actions.choices)
