"""The command `paged-kv generate`, and several samples of one prompt."""

import gc
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlx_lm import generate
from mlx_lm.sample_utils import make_sampler

from paged_kv import PagedCacheFactory, embedded_model, generate_samples
from paged_kv.command_line import main
from paged_kv.extras import install_command
from paged_kv.integrations.generation import generate_command, text_generation
from paged_kv.integrations.generation.options import GenerateOptions
from tests.support.heads import folder_of_head

PROMPT = "def read_file(path):"


@pytest.fixture(scope="module")
def expected(trained: Any) -> Any:
    """A function of prompt and tokens: the text that mlx-lm generates with its own caches."""
    model, tokenizer = trained("stdlib-llama")
    return lambda prompt, count: generate(model, tokenizer, prompt, max_tokens=count)


@pytest.fixture(autouse=True)
def _loaded(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded model, loaded once, in numbers that a CPU computes quickly."""
    monkeypatch.setattr(text_generation, "load", lambda _: trained("stdlib-llama"))


def run(*arguments: str) -> int:
    return main(["generate", *arguments])


@pytest.fixture(params=["ngram", "a head"])
def draft(request: pytest.FixtureRequest, tmp_path: Path, trained: Any) -> str:
    is_head = request.param == "a head"
    return folder_of_head(trained("stdlib-llama")[0], tmp_path) if is_head else request.param


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [1, 2])
def test_drafts_change_no_text(
    prompts: int, draft: str, capsys: pytest.CaptureFixture[str], expected: Any
) -> None:
    told = ["--prompt", PROMPT] * prompts
    assert run(*told, "--max-tokens", "10", "--draft-model", draft) == 0
    output = capsys.readouterr()
    text = expected(PROMPT, 10)
    titled = [f"==> prompt {number}: {PROMPT} <==\n{text}\n\n" for number in (1, 2)]
    assert output.out == (text + "\n" if prompts == 1 else "".join(titled))
    summary = [line.split()[0] for line in output.err.splitlines()]
    assert summary == ["prompt", "generation", "pages", "drafts", "peak"]


def test_several_samples_have_a_temperature(capsys: pytest.CaptureFixture[str]) -> None:
    samples = ["--prompt", PROMPT, "--num-samples", "3", "--max-tokens", "10"]
    assert run(*samples, "--seed", "1") == 0
    texts = capsys.readouterr().out.split("==> ")[1:]
    assert len({text.partition("\n")[2] for text in texts}) > 1
    assert run(*samples, "--temp", "0") == 2
    assert "--temp 0 makes 3 equal samples" in capsys.readouterr().err


@pytest.mark.slow
def test_a_long_prompt_shows_progress_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the prompt too, and the text is the same."""
    shown: list[int] = []

    progress = generate_command._progress

    def recorded(tokens: int) -> Callable[[int, int], None] | None:
        show = progress(tokens)

        def record(done: int, total: int) -> None:
            shown.append(done)
            if show is not None:
                show(done, total)

        return show and record

    monkeypatch.setattr(generate_command, "_progress", recorded)
    asked = ["--prompt", "import os\n" * 300, "--max-tokens", "8"]
    assert run(*asked) == 0
    plain = capsys.readouterr()
    assert "prompt:" not in plain.err
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert run(*asked) == 0
    told = capsys.readouterr()
    assert "prompt:" in told.err
    assert shown == [0, 512, 899, 900]
    assert told.out == plain.out


def test_all_ranks_take_the_same_steps_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one of them may have a terminal."""
    generation = text_generation.TextGeneration(GenerateOptions(max_tokens=1))
    monkeypatch.setattr(generation, "_ranks", SimpleNamespace(rank=0, size=2))
    shown: list[int] = []
    generation.stream([7] * 900, lambda done, total: shown.append(done))
    generation.close()
    assert shown == [0, 899, 900]


@pytest.mark.slow
def test_samples_share_the_prompts_pages(trained: Any, source_text: str) -> None:
    model, tokenizer = trained("stdlib-llama")
    prompt = tokenizer.encode(source_text)[:700]
    factory = PagedCacheFactory(model, max_bytes=64 << 20)
    cache = factory.make_cache()
    response = generate_samples(
        model,
        tokenizer,
        prompt,
        4,
        prompt_cache=cache,
        max_tokens=10,
        sampler=make_sampler(temp=1.0),
        return_prompt_caches=True,
    )
    assert len(set(response.texts)) > 1
    assert cache[0].offset == 699
    stats = factory.stats()
    # All five share two full blocks. Each has a third block of its own, partly filled.
    assert (stats.blocks_used, stats.blocks_shared, stats.table_entries) == (2 + 5, 2, 15)
    assert stats.cow_copies == 4
    del response, cache
    gc.collect()
    assert factory.stats().blocks_used == 0


def test_greedy_samples_are_what_generate_gives(trained: Any) -> None:
    model, tokenizer = trained("stdlib-llama")
    options: dict[str, Any] = {"max_tokens": 5, "sampler": make_sampler(temp=0)}
    for prompt in (PROMPT, tokenizer.encode(PROMPT)[:1]):
        alone = generate(model, tokenizer, prompt, max_tokens=5)
        assert generate_samples(model, tokenizer, prompt, 3, **options).texts == [alone] * 3


@pytest.mark.skipif(find_spec("mlx_vlm") is not None, reason="the extra vlm is installed")
def test_images_name_the_extra_that_they_need(capsys: pytest.CaptureFixture[str]) -> None:
    model = embedded_model()
    assert run("--prompt", "a", "--image", "cat.png", "--model", model) == 1
    assert f"needs the package mlx_vlm: {install_command('vlm')}" in capsys.readouterr().err
