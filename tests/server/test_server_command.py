"""The options of `paged-kv server`."""

from argparse import ArgumentParser
from types import SimpleNamespace
from typing import Any, NoReturn

import mlx.core as mx
import mlx_lm.server
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator

from paged_kv.server import server_command
from paged_kv.server.engine.paged_model_provider import PagedModelProvider
from paged_kv.server.options import parsed_server_options
from tests.support.folders import MODEL_FOLDERS

MODEL = MODEL_FOLDERS["stdlib-llama"]


class Stopped(Exception):
    """Leaves mlx-lm's `main` where it would parse its options."""


def mlx_lm_options(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options of mlx-lm's server, which only its `main` knows, and their defaults."""
    defaults = {}

    def parsed(parser: ArgumentParser) -> NoReturn:
        defaults.update(vars(parse_args(parser, [])))
        raise Stopped

    parse_args = ArgumentParser.parse_args
    monkeypatch.setattr(ArgumentParser, "parse_args", parsed)
    with pytest.raises(Stopped):
        mlx_lm.server.main()
    monkeypatch.undo()
    return defaults


def test_all_options_of_mlx_lm_are_taken_with_its_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = mlx_lm_options(monkeypatch)
    ours = parsed_server_options([])
    # Here None means as many as memory allows.
    assert theirs.pop("prompt_cache_size") is not ours.prompt_cache_size is None
    assert {name: getattr(ours, name) for name in theirs} == theirs | {"allowed_origins": ("*",)}


@pytest.mark.parametrize(
    ("option", "limits"), [("off", []), ("auto", [7, 7, 0]), ("3MB", [3_000_000])]
)
def test_wired_memory_is_a_choice(
    option: str, limits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlx-lm's generator would set the recommended limit, and take it back when it ends."""
    set_to: list[int] = []

    def set_limit(nbytes: int) -> int:
        set_to.append(nbytes)
        return 0

    monkeypatch.setattr(mx, "set_wired_limit", set_limit)
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 7})
    server_command._limit_wired_memory(parsed_server_options(["--wired-limit", option]).wired_limit)
    model: Any = SimpleNamespace()
    BatchGenerator(model).close()
    assert set_to == limits


def test_kv_bits_name_a_page_format() -> None:
    assert parsed_server_options(["--kv-bits", "8"]).cache.page_format == "q8"
    with pytest.raises(ValueError, match="--page-format q4"):
        parsed_server_options(["--kv-bits", "8", "--page-format", "q4"])


def test_the_model_and_its_draft_are_converted_to_another_number_format() -> None:
    told = ["--model", str(MODEL), "--draft-model", str(MODEL), "--dtype", "float32"]
    provider = PagedModelProvider(parsed_server_options([*told, "--max-kv-bytes", "64MB"]))
    provider.load_default()  # type: ignore[no-untyped-call]  # mlx-lm's
    loaded: list[Any] = [provider.model, provider.draft_model]
    for model in loaded:
        parameters: Any = tree_flatten(model.parameters())
        assert {each.dtype for _, each in parameters} == {mx.float32}
    provider.reset()
