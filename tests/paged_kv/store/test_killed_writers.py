"""A killed writer leaves nothing that is read wrongly, and no folder over its limit."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.folders import ROOT


def torture(folder: Path, *options: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.store_torture", str(folder), *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_hundred_writers_are_killed(tmp_path: Path) -> None:
    counts = torture(tmp_path / "store", "--cycles", "100")
    assert counts["wrong_reads"] == 0
    assert "other_findings" not in counts
    assert counts["most_bytes"] <= counts["cap"]
    # The writers were killed while they wrote, and the test has read what they had written before.
    # The amount depends on how busy the machine is.
    assert counts["left_behind"] > 0
    assert counts["reads"] > 100


@pytest.mark.slow
def test_a_writer_is_killed_at_each_of_its_system_calls(tmp_path: Path) -> None:
    counts = torture(tmp_path / "store", "--steps", "--cycles", "1000")
    assert counts["ended"] == 1
    assert counts["wrong_reads"] == 0
    assert "other_findings" not in counts
    assert counts["most_bytes"] <= counts["cap"]
    assert counts["left_behind"] > 5
