"""`./demo` and `./test` install in one line, and show pip's output only if it fails."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.folders import ROOT

# Stand for Python with pip, and for the command.
PYTHON = """#!/bin/sh
case "$*" in
*"pip install"*)
    for line in 1 2 3; do echo "pip says $line"; done
    exit $(cat ../pip-status) ;;
*"-m tests"*) echo tested ;;
esac
"""
COMMAND = """#!/bin/sh
printf ' \\n\\303\\251 %s' "$*"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with what the scripts need, and an environment of stand-ins."""
    folder = tmp_path / "checkout"
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    (folder / "kernels").mkdir()
    (folder / ".ci").mkdir()
    for name in ("demo", "test", "pyproject.toml", ".ci/environment.sh"):
        shutil.copy(ROOT / name, folder / name)
    for name, text in (("python", PYTHON), ("paged-kv", COMMAND)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (tmp_path / "pip-status").write_text("0")
    return folder


def run(checkout: Path, *command: str) -> tuple[int, str, str]:
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("script", "extra"), [("demo", "cpu"), ("test", "test")])
def test_the_first_run_says_in_one_line_that_it_installs(
    checkout: Path, script: str, extra: str
) -> None:
    said = f"{script}: installing paged-kv[{extra}] into .venv, which takes a minute or two\n"
    first, second = (run(checkout, f"./{script}", "--prompt=a") for _ in range(2))
    assert (first[0], first[2]) == (0, said)
    assert (second[0], second[2]) == (0, "")


def test_what_pip_says_is_shown_if_it_fails(checkout: Path) -> None:
    (checkout.parent / "pip-status").write_text("1")
    for _ in range(2):  # nothing was installed by the first
        status, out, error = run(checkout, "./demo")
        assert (status, out) == (1, "")
        assert error.splitlines()[1:] == [
            *(f"pip says {line}" for line in (1, 2, 3)),
            "demo: pip could not install paged-kv[cpu] into .venv, see above",
        ]


def test_the_demo_prints_its_prompt_before_the_text(checkout: Path) -> None:
    status, out, _ = run(checkout, "./demo", "--max-tokens", "5")
    assert status == 0
    assert out.startswith("def read_file(path): \né generate ")
    assert "--prompt def read_file(path): --max-tokens 5" in out
    assert run(checkout, "./demo", "--prompt", "import")[1].startswith(" \né generate ")
