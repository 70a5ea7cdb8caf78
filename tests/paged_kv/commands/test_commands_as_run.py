"""Commands of paged-kv, as a user runs them: the installed script, in processes of their own, from
another folder."""

import json
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE_S

SCRIPT = Path(sysconfig.get_path("scripts")) / "paged-kv"


@pytest.fixture(autouse=True)
def _another_folder(tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.delenv("PYTHONPATH", raising=False)


def printed(*arguments: str) -> str:
    """What a command that succeeds prints."""
    command = [str(SCRIPT), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.soak
def test_doctor_and_plan_find_that_all_is_right() -> None:
    assert "WRONG" not in printed("doctor", "--again")
    assert json.loads(printed("plan", "--json"))["fits"]
