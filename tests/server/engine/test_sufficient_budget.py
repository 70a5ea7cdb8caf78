"""A --max-kv-bytes that holds no prompt ends the server before it starts, and it says what is
needed."""

import argparse
import re
import subprocess
import sys
from typing import Any

import pytest

from paged_kv.command_line import main
from paged_kv.server.engine.paged_model_provider import PagedModelProvider
from paged_kv.server.engine.sufficient_budget import require_sufficient_budget
from paged_kv.server.options import server_parser
from tests.support.folders import MODEL_FOLDERS
from tests.support.patience import PATIENCE_S

LLAMA, GEMMA = (str(MODEL_FOLDERS[name]) for name in ("stdlib-llama", "stdlib-gemma3"))


def parsed(budget: int, *options: str) -> argparse.Namespace:
    told = ["--model", LLAMA, "--max-kv-bytes", str(budget), *options]
    return server_parser().parse_args(told)


def needed(*options: str) -> int:
    """What the refusal of a budget of one byte says."""
    with pytest.raises(ValueError, match=r"^--max-kv-bytes gives pages 1 B") as error:
        require_sufficient_budget(parsed(1, *options))
    found = re.search(r"at least .* \(([\d,]+) bytes\)", str(error.value))
    assert found is not None, error.value
    return int(found[1].replace(",", ""))


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--page-format", "q4"],
        ["--page-format", "auto"],
        ["--dtype", "float32"],
        ["--draft-model", "ngram"],
        ["--draft-model", LLAMA],
        ["--model", GEMMA],
        ["--model", GEMMA, "--page-format", "q8"],
    ],
    ids=" ".join,
)
def test_what_is_named_suffices_and_a_byte_less_does_not(options: list[str]) -> None:
    least = needed(*options)
    require_sufficient_budget(parsed(least, *options))
    with pytest.raises(ValueError, match=r"^--max-kv-bytes gives"):
        # Two bytes for each pool that is rounded.
        require_sufficient_budget(parsed(least - 4, *options))
    provider = PagedModelProvider(parsed(least, *options))
    provider.load_default()  # type: ignore[no-untyped-call]  # mlx-lm's
    try:
        assert all(size.bytes_for(1) <= size.promisable for size in provider.pool_sizes())
    finally:
        provider.reset()


def test_a_model_that_is_found_too_large_while_it_loads_names_the_option(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as one that had to be downloaded first."""
    for options in ([], ["--draft-model", LLAMA]):
        provider = PagedModelProvider(parsed(1000, *options))
        with pytest.raises(ValueError, match=r"^--max-kv-bytes gives pages 1\.00 kB"):
            provider.load_default()  # type: ignore[no-untyped-call]  # mlx-lm's


def test_a_model_that_cannot_be_read_is_left_to_its_loading(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "model.safetensors").touch()
    require_sufficient_budget(parsed(1, "--model", str(tmp_path)))
    require_sufficient_budget(parsed(1, "--model", "nobody/nothing"))


@pytest.mark.slow
def test_the_server_ends_before_it_listens() -> None:
    command = [sys.executable, "-m", "paged_kv", "server", "--model", LLAMA, "--port", "0"]
    done = subprocess.run(
        [*command, "--max-kv-bytes", "100kB"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    assert "listening" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("paged-kv server: --max-kv-bytes gives pages 100.00 kB, and the model")


@pytest.mark.parametrize("draft", [[], ["--draft-model", LLAMA]])
def test_generate_names_options_too(draft: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "a", "--max-kv-bytes", "100kB", *draft]) == 1
    said = capsys.readouterr().err
    assert "raise --max-kv-bytes" in said
    assert "max_bytes" not in said
    assert "can_admit" not in said
