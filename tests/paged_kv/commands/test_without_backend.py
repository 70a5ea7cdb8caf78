"""On Linux the package mlx has no backend of its own: without an extra, commands that compute fail
with one sentence, and all others work."""

import subprocess
import sys
from pathlib import Path

import pytest

from paged_kv.extras import install_command
from tests.support.folders import ROOT

# Linux's message about a package mlx without a backend.
SAID = "libmlx.so: cannot open shared object file: No such file or directory"
EXTRAS = (
    f"install one with {install_command('cpu')}, or with [cuda] or [cuda13] in the place of [cpu] "
    "for an NVIDIA GPU"
)
# Runs commands in one process, and prints the status, the output and the error of each.
SCRIPT = f"""
import io, sys
from contextlib import redirect_stderr, redirect_stdout

class NoBackend:
    def find_spec(self, name, path=None, target=None):
        if name == "mlx.core":
            raise ImportError({SAID!r}, name="core")

sys.meta_path.insert(0, NoBackend())
from paged_kv.command_line import main

for line in sys.argv[1:]:
    out, error = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(error):
        try:
            status = main(line.split())
        except SystemExit as ended:
            status = ended.code
    print(status, (out.getvalue() + error.getvalue()).replace(chr(10), " "))
import paged_kv
try:
    paged_kv.PagedCacheFactory
except ImportError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.slow
def test_commands_that_compute_name_the_extra_and_others_work(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    work = [
        "--version",
        "--help",
        "generate --help",
        "stats --help",
        f"trace synthesize {trace} --sequences 2",
        f"trace replay {trace}",
        f"stats {trace}",
    ]
    fail = ["generate --prompt a", "generate --prompt a --page-format q8", "doctor", "server"]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *work, *fail],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert [line[0] for line in lines[: len(work)]] == ["0"] * len(work)
    for line in lines[len(work) : -1]:
        assert line.startswith("1 paged-kv")
        assert f"mlx has no backend ({SAID}): {EXTRAS}" in line
    assert len(lines) == len(work) + len(fail) + 1
    assert lines[-1].startswith(f"MissingBackend mlx has no backend ({SAID}): {EXTRAS}")
