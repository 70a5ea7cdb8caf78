"""The command `paged-kv generate`, and several samples of one prompt."""

import gc
import io
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import generate, load
from mlx_lm.generate import generation_stream
from mlx_lm.sample_utils import make_sampler

from paged_kv import PagedCacheFactory, PoolExhausted, generate_samples
from paged_kv.command_line import main
from paged_kv.embedded import embedded_model
from paged_kv.extras import install_command
from paged_kv.integrations.generation import generate_command, text_generation
from paged_kv.integrations.generation.text_generation import TextsInTurn
from paged_kv.sizes import format_size
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


def test_the_embedded_model_writes_what_mlx_lm_writes(
    capsys: pytest.CaptureFixture[str], expected: Any
) -> None:
    assert run("--prompt", PROMPT, "--max-tokens", "10") == 0
    output = capsys.readouterr()
    assert output.out == expected(PROMPT, 10) + "\n"
    summary = [line.split()[0] for line in output.err.splitlines()]
    assert summary == ["prompt", "generation", "pages", "peak"]
    assert "7 tokens" in output.err
    assert "1 block in use" in output.err


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


@pytest.mark.slow
def test_a_model_can_be_converted_to_another_number_format(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, expected: Any
) -> None:
    monkeypatch.setattr(text_generation, "load", lambda folder: load(folder))
    assert run("--prompt", PROMPT, "--max-tokens", "8", "--dtype", "float32") == 0
    output = capsys.readouterr()
    assert output.out == expected(PROMPT, 8) + "\n"
    # A page of 256 tokens, in 6 layers with 2 x 2 heads of 64 float32 numbers.
    assert f" {format_size(256 * 6 * 4 * 64 * 4)} of " in output.err


def test_the_prompt_may_come_from_standard_input(
    capsys: pytest.CaptureFixture[str], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal is told how to end it."""
    for named, is_terminal in ((["--prompt", "-"], False), ([], True)):
        given = io.StringIO(PROMPT)
        monkeypatch.setattr(given, "isatty", lambda: is_terminal)  # noqa: B023
        monkeypatch.setattr("sys.stdin", given)
        assert run(*named, "--max-tokens", "5") == 0
        output = capsys.readouterr()
        assert output.out == expected(PROMPT, 5) + "\n"
        assert ("Ctrl-D" in output.err) == is_terminal


@pytest.mark.parametrize("samples", ["1", "2"])
def test_the_step_that_runs_ahead_is_waited_for(
    samples: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX may crash if a rank ends before the exchanges of its last step."""
    waited_for: list[Any] = []
    monkeypatch.setattr(mx, "synchronize", waited_for.append)
    assert run("--prompt", PROMPT, "--num-samples", samples, "--max-tokens", "2") == 0
    assert waited_for == [generation_stream]


def test_several_samples_have_a_temperature(capsys: pytest.CaptureFixture[str]) -> None:
    samples = ["--prompt", PROMPT, "--num-samples", "3", "--max-tokens", "10"]
    assert run(*samples, "--seed", "1") == 0
    texts = capsys.readouterr().out.split("==> ")[1:]
    assert len({text.partition("\n")[2] for text in texts}) > 1
    assert run(*samples, "--temp", "0") == 2
    assert "--temp 0 makes 3 equal samples" in capsys.readouterr().err


def test_several_prompts_are_a_batch(capsys: pytest.CaptureFixture[str], expected: Any) -> None:
    other = "import os\nimport sys\n"
    assert run("--prompt", PROMPT, "--prompt", other, "--max-tokens", "8") == 0
    output = capsys.readouterr()
    assert output.out == (
        f"==> prompt 1: {PROMPT} <==\n{expected(PROMPT, 8)}\n\n"
        f"==> prompt 2: import os import sys <==\n{expected(other, 8)}\n\n"
    )
    assert "2 blocks in use" in output.err


@pytest.mark.slow
def test_prompts_take_turns_in_a_small_budget(
    capsys: pytest.CaptureFixture[str], expected: Any
) -> None:
    """One block is all that there is."""
    prompts = [PROMPT, "import os\nimport sys\n"]
    options = [word for prompt in prompts for word in ("--prompt", prompt)]
    assert run(*options, "--max-tokens", "8", "--max-kv-bytes", "1600000") == 0
    output = capsys.readouterr()
    assert all(f"{expected(prompt, 8)}\n\n" in output.out for prompt in prompts)
    assert "1 block in use" in output.err


def test_texts_come_in_turn(trained: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The first text is printed as it comes, another one when those before it are complete."""
    tokenizer = trained("stdlib-llama")[1]
    first, second, third = map(tokenizer.encode, ("import os\n", "def read(path):", "é class A:"))
    texts = TextsInTurn(tokenizer, ["a", "b", "c"])
    printed = capsys.readouterr().out
    for number, tokens in ((1, second), (2, third[:1])):
        for token in tokens:
            texts.add(number, token)
    texts.end(1)
    assert printed == "==> a <==\n"
    assert capsys.readouterr().out == ""
    texts.add(0, first[0])
    printed = capsys.readouterr().out
    assert printed
    assert "import os\n".startswith(printed)
    for token in first[1:]:
        texts.add(0, token)
    texts.end(0)
    for token in third[1:]:
        texts.add(2, token)
    texts.end(2)
    assert printed + capsys.readouterr().out == (
        "import os\n\n\n==> b <==\ndef read(path):\n\n==> c <==\né class A:\n\n"
    )


@pytest.mark.slow
def test_samples_of_each_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--prompt", PROMPT, "--prompt", "class A:", "--num-samples", "2", "--temp", "0.9"]
    outputs = []
    for _ in range(2):
        assert run(*arguments, "--max-tokens", "6", "--seed", "3") == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    titles = [line for line in outputs[0].splitlines() if line.startswith("==> ")]
    assert titles == [
        f"==> sample {sample} of prompt {number}: {prompt} <=="
        for number, prompt in ((1, PROMPT), (2, "class A:"))
        for sample in (1, 2)
    ]
    first, second = outputs[0].split("==> ")[1:3]
    assert first.partition("\n")[2] != second.partition("\n")[2]


@pytest.mark.slow
def test_a_long_prompt_shows_progress_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the prompt too, and the text is the same."""
    shown: list[int] = []

    class Shown(generate_command._Progress):
        def __call__(self, done: int, total: int) -> None:
            shown.append(done)
            super().__call__(done, total)

    monkeypatch.setattr(generate_command, "_Progress", Shown)
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
    generation = text_generation.TextGeneration(
        embedded_model(), page_format="fp16", max_bytes=None, max_tokens=1, temp=0, seed=None
    )
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


def test_samples_that_do_not_fit_are_refused(trained: Any) -> None:
    model, tokenizer = trained("stdlib-llama")
    small = PagedCacheFactory(model, max_bytes=4000)
    with pytest.raises(PoolExhausted):
        generate_samples(model, tokenizer, PROMPT, 2, prompt_cache=small.make_cache())


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ([], "--image needs a --model of mlx-vlm"),
        (["--model", "m", "--num-samples", "2"], "leave out --num-samples"),
        (
            ["--model", "m", "--prompt", "b", "--num-samples", "2"],
            "several --prompt",
        ),
        (["--model", "m", "--draft-model", "ngram"], "leave out --draft-model"),
    ],
)
def test_images_want_a_model_and_one_text(
    options: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--prompt", "a", "--image", "cat.png", *options) == 2
    assert part in capsys.readouterr().err


@pytest.mark.skipif(find_spec("mlx_vlm") is not None, reason="the extra vlm is installed")
def test_images_name_the_extra_that_they_need(capsys: pytest.CaptureFixture[str]) -> None:
    model = embedded_model()
    assert run("--prompt", "a", "--image", "cat.png", "--model", model) == 1
    assert f"needs the package mlx_vlm: {install_command('vlm')}" in capsys.readouterr().err
