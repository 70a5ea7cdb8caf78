"""`paged-kv run` runs programs as they are."""

import subprocess
import sys
from pathlib import Path

import pytest

from paged_kv.command_line import main
from paged_kv.integrations.servers.run_command import _program
from tests.support.folders import MODEL_FOLDERS

PROGRAM = f"""
import logging, sys
logging.basicConfig(level="INFO", format="logged %(message)s")
logging.info("as configured")
from mlx_lm import generate, load
model, tokenizer = load({str(MODEL_FOLDERS["stdlib-llama"])!r})
print(__name__, sys.argv[1:], generate(model, tokenizer, "import", max_tokens=2))
sys.exit(3)
"""


@pytest.mark.slow
def test_a_program_runs_with_pages_as_it_does_without(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, *command, "program.py", "--", "-x"]
        return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)

    stock = run()
    paged = run("-m", "paged_kv", "run", "--max-kv-bytes", "50MB", "--", "python")
    assert (paged.returncode, paged.stdout) == (stock.returncode, stock.stdout)
    assert stock.returncode == 3
    assert "logged as configured" in paged.stderr
    assert "paged-kv: pages for llama: at most 50.00 MB\n" in paged.stderr


@pytest.mark.parametrize("words", [["a_program"], ["-m", "a_program"], ["a_program.py"]])
def test_modules_and_files_are_programs(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "a_program.py").write_text("import sys; print(__name__, sys.argv[1:])")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(sys, "argv", ["paged-kv"])
    _program([*words, "-x"])()
    assert capsys.readouterr().out == "__main__ ['-x']\n"


def test_an_installed_command_is_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["paged-kv"])
    with pytest.raises(SystemExit):
        _program(["some/bin/mlx_lm.generate", "--help"])()


@pytest.mark.parametrize(
    "words", [["--", "absent"], ["--"], ["--offload", "there", "--", "absent"]]
)
def test_what_cannot_be_run_is_a_wrong_argument(words: list[str]) -> None:
    assert main(["run", *words]) == 2
