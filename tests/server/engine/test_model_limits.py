"""A --max-kv-bytes that holds no prompt ends the server before it starts, and it says what is
needed. While a server has a model, MLX keeps few freed buffers, and arrays do not become more.
Context lengths are those of models."""

import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread
from typing import Any

import mlx.core as mx
import pytest

from paged_kv.kernels.pages.memory import limited_freed_buffers
from paged_kv.server.engine.model_limits import (
    context_length,
    freed_buffers_limit,
    require_sufficient_budget,
)
from paged_kv.server.engine.paged_model_provider import PagedModelProvider
from paged_kv.server.options import ServerOptions, parsed_server_options
from tests.support.live_arrays import live_arrays
from tests.support.running_server import paged_server
from tests.support.server_process import metrics, post
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


SMALL = ["--max-kv-bytes", "64MB"]
# Of each round. One array for each request would be noticed.
REQUESTS, FEW = 25, 10
FORMER = 123 << 20  # more than any server here allows


@pytest.fixture(autouse=True)
def _former() -> Iterator[None]:
    before = mx.set_cache_limit(FORMER)
    yield
    assert limit() == FORMER
    mx.set_cache_limit(before)


def limit() -> int:
    """MLX's limit of freed buffers, which only setting it tells."""
    found = mx.set_cache_limit(FORMER)
    mx.set_cache_limit(found)
    return found


def test_a_smaller_limit_stays() -> None:
    with limited_freed_buffers(FORMER + 1):
        assert limit() == FORMER
    with limited_freed_buffers(5):
        assert limit() == 5
    assert limit() == FORMER


def test_a_server_limits_freed_buffers_until_it_ends(tiny: str) -> None:
    options = ["--model", tiny, *SMALL, "--prefill-step-size", "300"]
    with paged_server(*options) as running:
        assert limit() == freed_buffers_limit(running.provider.model, 300) < FORMER
        assert metrics(running.port)["mlx_active_bytes"] > 0
    assert limit() == FORMER


@pytest.mark.slow
def test_requests_of_mixed_lengths_leave_nothing_behind(tiny: str) -> None:
    rng = random.Random(3)

    def ask(_: int) -> int:
        prompt = rng.choices(range(10, 4000), k=round(16 * 60 ** rng.random()))
        answer = post(running.port, prompt=prompt, max_tokens=rng.randint(1, 24))
        answer.read()
        return answer.status

    with paged_server("--model", tiny, *SMALL, "--prefill-step-size", "64") as running:
        allowed, counts, kept, ended = limit(), list[int](), list[int](), Event()
        watching = Thread(target=lambda: watch(kept, ended))
        watching.start()
        with ThreadPoolExecutor(8) as clients:
            for _ in range(3):  # the first round fills what is kept
                assert {*clients.map(ask, range(REQUESTS))} == {200}
                running.wait_until_idle()
                for pool in running.pools:
                    pool.clear()
                counts.append(live_arrays())
        ended.set()
        watching.join()
    assert 0 < max(kept) <= allowed
    assert counts[-1] < counts[0] + FEW


def watch(kept: list[int], ended: Event) -> None:
    """Note what MLX keeps of freed buffers, every millisecond."""
    while not ended.wait(0.001):
        kept.append(mx.get_cache_memory())


def scaled(length: int, kind: str, factor: float, original: int | None = None) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    return {"max_position_embeddings": length, "rope_scaling": scaling}


GEMMA = {"model_type": "gemma3_text", **scaled(131072, "linear", 8.0)}


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 4096, "rope_scaling": None}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"model_type": "mamba"}, None),
        ({"max_position_embeddings": None}, None),
        # Llama 3.1: the length is the scaled one. DeepSeek V3: so it is, and says what it was.
        (scaled(131072, "llama3", 8.0, 8192), 131072),
        (scaled(163840, "yarn", 40, 4096), 163840),
        # Qwen 2.5 with YaRN: it is not.
        (scaled(32768, "yarn", 4.0, 32768), 131072),
        # Vicuna 1.5 16K.
        ({**scaled(4096, "linear", 4.0), "max_sequence_length": 16384}, 16384),
        # Gemma 3, a vision model.
        ({"model_type": "gemma3", "text_config": GEMMA}, 131072),
        # Command R.
        ({"max_position_embeddings": 8192, "model_max_length": 131072}, 131072),
    ],
)
def test_the_longest_length_that_a_config_names_counts(
    config: dict[str, Any], length: int | None
) -> None:
    assert context_length(config) == length
