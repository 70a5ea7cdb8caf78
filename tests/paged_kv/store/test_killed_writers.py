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


@pytest.mark.soak
def test_writers_that_are_killed_at_random(tmp_path: Path) -> None:
    """How much they have written depends on how busy the machine is."""
    counts = torture(tmp_path / "store", "--cycles", "100")
    assert counts["wrong_reads"] == 0
    assert "other_findings" not in counts
    assert counts["most_bytes"] <= counts["cap"]


@pytest.mark.parametrize(
    "every",
    [pytest.param("1", marks=pytest.mark.soak), pytest.param("3", marks=pytest.mark.slow)],
)
def test_a_writer_is_killed_at_each_of_its_system_calls(tmp_path: Path, every: str) -> None:
    counts = torture(tmp_path / "store", "--steps", "--every", every, "--cycles", "1000")
    assert counts["ended"] == 1
    assert counts["wrong_reads"] == 0
    assert "other_findings" not in counts
    assert counts["most_bytes"] <= counts["cap"]
    assert counts["left_behind"] > 5 // int(every)
