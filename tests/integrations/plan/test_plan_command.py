"""The command says what fits, and what to change."""

import json
from pathlib import Path

import pytest

from paged_kv.command_line import main


def test_what_fits_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--memory", "1GB", "--context", "1000", "--sessions", "2"]) == 0
    text = capsys.readouterr().out
    for words in ("weights", "prompt step of 1,000", "2 sessions, fp16", "left to the system"):
        assert words in text
    assert "fits, as would" in text


def test_what_does_not_fit_names_changes_and_exits_with_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = ["plan", "--memory", "96MB", "--sessions", "9"]
    assert main(small) == 1
    text = capsys.readouterr().out
    assert "does not fit, but these would: " in text
    for words in ("--page-format q8: ", "--prefill-step-size 256: ", "--sessions "):
        assert words in text
    assert main([*small, "--json"]) == 1
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] is False
    assert plan["memory"] == 96_000_000
    assert {"change", "saves", "fits"} == set(plan["changes"][0])
    assert plan["needed"] > plan["memory"]


def test_a_memory_that_weights_alone_exceed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--memory", "4MB"]) == 1
    assert "does not fit. What changes give:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "holds no configuration"),
        ({"config.json": '{"model_type": "llama"}'}, "holds no weights"),
        ({"config.json": '{"model_type": "no_such"}', "model.safetensors": ""}, "cannot be loaded"),
        ({"config.json": "{", "model.safetensors": ""}, "cannot be loaded"),
    ],
)
def test_a_folder_that_is_no_model(
    files: dict[str, str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert main(["plan", "--model", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("paged-kv plan: ")
    assert said in line
