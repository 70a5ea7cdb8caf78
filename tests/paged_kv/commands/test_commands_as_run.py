"""Commands of paged-kv, as a user runs them: the installed script, in processes of their own, from
another folder."""

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

from paged_kv.monitor.processes import running_processes
from paged_kv.pool.stats import PoolStats
from tests.support.folders import MODEL_FOLDERS
from tests.support.patience import PATIENCE_S, wait_until

SCRIPT = Path(sysconfig.get_path("scripts")) / "paged-kv"
PROMPT = "import os\n" * 90  # more than a page of tokens

pytestmark = pytest.mark.slow


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


def wait_until_shown(process: subprocess.Popen[str], holds: Callable[[PoolStats], bool]) -> None:
    """Wait until this process alone shows a pool of which the condition holds."""

    def is_shown() -> bool:
        assert process.poll() is None, process.communicate()
        views = running_processes()
        assert {view.pid for view in views} <= {process.pid}
        return any(holds(pool.stats) for view in views for pool in view.pools)

    wait_until(is_shown)


def test_stats_shows_the_prompts_that_server_keeps() -> None:
    model = str(MODEL_FOLDERS["stdlib-llama"])
    with running("server", "--model", model, "--port", "0", "--max-kv-bytes", "64MB") as process:
        assert process.stderr is not None
        port = next(line.split()[-1] for line in process.stderr if "listening at" in line)
        body = json.dumps({"prompt": PROMPT, "max_tokens": 2}).encode()
        urlopen(Request(f"http://127.0.0.1:{port}/v1/completions", body), timeout=PATIENCE_S).read()
        wait_until_shown(process, lambda stats: stats.blocks_cached > 0 and not stats.blocks_used)
        assert str(process.pid) in printed("stats", "--list")


def test_trace_and_store_know_what_generate_has_written() -> None:
    options = ["--prompt", PROMPT, "--max-tokens", "3", "--store", "pages"]
    for trace in ("trace.txt", "again.txt"):
        last = done("generate", *options, env=os.environ | {"PAGED_KV_TRACE": trace})
        assert last.returncode == 0, last.stderr
    assert "269 of them cached" in last.stderr
    assert json.loads(printed("store", "list", "--store", "pages", "--json"))
    replay = json.loads(printed("trace", "replay", "trace.txt", "--json"))
    assert replay["recorded"] == replay["replayed"]
    assert replay["recorded"]["tokens_asked"] > 256


@pytest.mark.soak
def test_doctor_and_plan_find_that_all_is_right() -> None:
    assert "all checks passed" in printed("doctor")
    assert json.loads(printed("plan", "--json"))["fits"]
