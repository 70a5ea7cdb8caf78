"""Every program of examples/ runs with a real model, and prints what its text says."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.support.folders import MODEL_FOLDERS, ROOT
from tests.support.running_server import PagedRunningServer

EXAMPLES = ROOT / "examples"
MODEL = str(MODEL_FOLDERS["stdlib-llama"])


def run(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.syspath_prepend(str(EXAMPLES))  # as Python does for a program in that folder
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def test_every_example_is_run_here() -> None:
    tested = Path(__file__).read_text("utf-8")
    shared = "example_model"
    names = {path.stem for path in EXAMPLES.glob("*.py")} - {shared}
    assert all(f'"{name}"' in tested for name in names)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_paged_kv_is_imported_before_mlx(path: Path) -> None:
    """It loads OpenBLAS, which MLX takes only if it is there first."""
    imported = re.findall(r"^(?:from|import) (paged_kv|example_model|mlx)", path.read_text(), re.M)
    assert imported[:1] != ["mlx"]


def test_without_a_server_the_client_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"no server answers at (.|\n)*--model MODEL"):
        run("server_client", monkeypatch, "http://127.0.0.1:1/v1")


@pytest.mark.slow
@pytest.mark.parametrize("end", [EOFError, KeyboardInterrupt])
def test_chat(
    end: type[BaseException], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = iter(["def f(x):", "class A:"])

    def typed(_: str) -> str:
        for text in said:
            return text
        raise end

    monkeypatch.setattr("builtins.input", typed)
    run("chat", monkeypatch)
    assert len(capsys.readouterr().out) > 100


@pytest.mark.slow
def test_shared_system_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("shared_system_prompt", monkeypatch)
    counts = [line for line in capsys.readouterr().out.splitlines() if "tokens were cached" in line]
    assert len(counts) == 3
    assert all("(0 tokens" not in line for line in counts)


@pytest.mark.slow
def test_page_store(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    outputs = []
    for _ in range(2):
        run("page_store", monkeypatch, str(tmp_path / "pages"), MODEL)
        outputs.append(capsys.readouterr().out.split(" tokens come from "))
    assert outputs[0][0].startswith("0 of ")
    assert not outputs[1][0].startswith("0 of ")
    assert outputs[0][1] == outputs[1][1]


@pytest.mark.slow
def test_small_budget(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("small_budget", monkeypatch)
    assert "requantised: {'q" in capsys.readouterr().out


@pytest.mark.slow
def test_server_client(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    server = PagedRunningServer("--model", MODEL)
    try:
        run("server_client", monkeypatch, f"http://127.0.0.1:{server.port}/v1")
    finally:
        server.stop()
    assert "prompt tokens" in capsys.readouterr().out
