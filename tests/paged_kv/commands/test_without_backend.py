"""Commands that lack an extra fail with one sentence that names it, and all others work. On Linux
the package mlx has no backend without one."""

import subprocess
import sys

import pytest

from paged_kv.extras import install_command
from tests.support.folders import ROOT

# Linux's message about a package mlx without a backend.
SAID = "libmlx.so: cannot open shared object file: No such file or directory"
EXTRAS = (
    f"install one with {install_command('cpu')}, or with [cuda] or [cuda13] in the place of [cpu] "
    "for an NVIDIA GPU"
)
# Runs commands in one process that lacks some modules, and prints the status, the output and the
# error of each.
SCRIPT = f"""
import io, sys
from contextlib import redirect_stderr, redirect_stdout

missing, *lines = sys.argv[1:]

class NoBackend:
    def find_spec(self, name, path=None, target=None):
        if name == missing == "mlx.core":
            raise ImportError({SAID!r}, name="core")

sys.meta_path.insert(0, NoBackend())
sys.modules.update(dict.fromkeys(set(missing.split()) - {{"mlx.core"}}))
from paged_kv.command_line import main

for line in lines:
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


def outcomes(missing: str, work: list[str], fail: list[str]) -> list[str]:
    """What a process prints of commands that fail and of what comes behind them, where others
    work."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, missing, *work, *fail],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert [line[0] for line in lines[: len(work)]] == ["0"] * len(work), lines
    assert all(line.startswith("1 paged-kv") for line in lines[len(work) :][: len(fail)])
    return lines[len(work) :]


@pytest.mark.slow
def test_commands_that_compute_name_the_extra_and_others_work() -> None:
    work = [
        "--version",
        "--help",
        "generate --help",
        "stats --help",
        "trace --help",
    ]
    fail = ["generate --prompt a", "doctor", "server --model stdlib-llama"]
    *failed, door = outcomes("mlx.core", work, fail)
    assert len(failed) == len(fail)
    assert all(f"mlx has no backend ({SAID}): {EXTRAS}" in line for line in failed)
    assert door.startswith(f"MissingBackend mlx has no backend ({SAID}): {EXTRAS}")


@pytest.mark.slow
def test_caches_need_nothing_of_the_server_and_its_commands_name_their_extras() -> None:
    work = ["--help", "plan --help", "generate --prompt a --max-tokens 1"]
    fail = ["server --model stdlib-llama", "plan"]
    server, plan = outcomes("pydantic rich starlette uvicorn", work, fail)
    assert install_command("server") in server
    assert install_command("tables") in plan
