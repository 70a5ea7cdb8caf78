"""Commands of paged-kv, as a user runs them: the installed script, in processes of their own, from
another folder."""

import json
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from paged_kv.monitor.processes import running_processes
from paged_kv.pool.stats import PoolStats
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


@pytest.mark.soak
def test_doctor_and_plan_find_that_all_is_right() -> None:
    assert "WRONG" not in printed("doctor --again")
    assert json.loads(printed("plan", "--json"))["fits"]
