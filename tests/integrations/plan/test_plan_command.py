"""The command says what fits, and what to change."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import save_config

from paged_kv.command_line import main
from paged_kv.integrations import working_memory
from tests.support.zoo import ZOO, small_model


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The folder of a small model, which is measured quickly."""
    monkeypatch.setattr(working_memory, "MOST_TOKENS", working_memory.FEWEST_TOKENS)
    changes = {"num_hidden_layers": 1}
    small: Any = small_model("qwen3", **changes)
    flat: Any = tree_flatten(small.parameters())
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(flat), {"format": "mlx"})
    save_config(ZOO["qwen3"] | changes, tmp_path / "config.json")
    return str(tmp_path)


@pytest.mark.slow
def test_what_fits_is_a_table_and_what_does_not_names_changes(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["plan", "--model", model, "--context", "1000"]
    assert main([*asked, "--memory", "1GB", "--sessions", "2"]) == 0
    text = capsys.readouterr().out
    for words in ("weights", "prompt step of 1,000", "2 sessions, fp16", "left to the system"):
        assert words in text
    assert "fits, as would" in text
    small = [*asked, "--memory", "12MB", "--sessions", "20"]
    assert main(small) == 1
    text = capsys.readouterr().out
    assert "does not fit, but these would: " in text
    assert "--sessions " in text
    assert main([*small, "--json"]) == 1
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] is False
    assert plan["memory"] == 12_000_000
    assert {"change", "saves", "fits"} == set(plan["changes"][0])
    assert plan["needed"] > plan["memory"]
    assert main([*asked, "--memory", "250KB"]) == 1
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
