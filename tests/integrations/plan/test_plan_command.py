"""The command says what fits, and what to change."""

from pathlib import Path

import pytest

from paged_kv.command_line import main


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
