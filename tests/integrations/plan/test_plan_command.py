"""The command says what fits, and what to change."""

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
