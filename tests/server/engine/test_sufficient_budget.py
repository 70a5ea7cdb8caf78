"""A --max-kv-bytes that holds no prompt ends the server before it starts, and it says what is
needed."""

import re

import pytest

from paged_kv.server.engine.paged_model_provider import PagedModelProvider
from paged_kv.server.engine.sufficient_budget import require_sufficient_budget
from paged_kv.server.options import ServerOptions, parsed_server_options
from tests.support.tiny_model import tiny_folder


def parsed(budget: int, *options: str) -> ServerOptions:
    return parsed_server_options(["--max-kv-bytes", str(budget), *options])


def needed(*options: str) -> int:
    """What the refusal of a budget of one byte says."""
    with pytest.raises(ValueError, match=r"^--max-kv-bytes gives pages 1 B") as error:
        require_sufficient_budget(parsed(1, *options))
    found = re.search(r"at least .* \(([\d,]+) bytes\)", str(error.value))
    assert found is not None, error.value
    return int(found[1].replace(",", ""))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with windows."""
    return tiny_folder(
        tmp_path_factory.mktemp("models") / "gemma", "gemma3_text", query_pre_attn_scalar=32
    )


OPTIONS = [["--page-format", "q4"], ["--page-format", "auto"], ["--dtype", "bfloat16"]]
OPTIONS += [["--draft-model", "ngram"], ["--draft-model", "TINY"], ["--model", "GEMMA"]]
OPTIONS += [["--model", "GEMMA", "--page-format", "q8"]]


SLOW = [pytest.param(options, marks=pytest.mark.slow) for options in OPTIONS]


@pytest.mark.parametrize("options", [[], *SLOW], ids=" ".join)
def test_what_is_named_suffices_and_a_byte_less_does_not(
    options: list[str], tiny: str, gemma: str
) -> None:
    folders = {"TINY": tiny, "GEMMA": gemma}
    options = ["--model", tiny, *[folders.get(option, option) for option in options]]
    least = needed(*options)
    require_sufficient_budget(parsed(least, *options))
    with pytest.raises(ValueError, match=r"^--max-kv-bytes gives"):
        # Two bytes for each pool that is rounded.
        require_sufficient_budget(parsed(least - 4, *options))
    provider = PagedModelProvider(parsed(least, *options))
    provider.load_default()  # type: ignore[no-untyped-call]  # mlx-lm's
    try:
        assert provider.factories[0].pool.size.longest > 0
    finally:
        provider.reset()
