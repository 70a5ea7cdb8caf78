"""Pages for models of mlx-vlm. `.ci/check_versions` runs these: they need the extra vlm."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module

pytest.importorskip("mlx_vlm", reason="needs the extra vlm")

import mlx_vlm
from mlx_lm.generate import BatchGenerator
from mlx_vlm.generate import ar, dispatch
from mlx_vlm.models import cache as vlm_cache

from benches.model_families import NEW_TOKENS, PROMPTS
from benches.vision_families import alone, batched, greedy
from paged_kv import PagedCacheFactory, PagedKVCache
from paged_kv.command_line import main
from paged_kv.integrations.mlx_vlm.image_generation import TextModel
from tests.support.vision_folder import IMAGE as IMAGE_MARKS
from tests.support.vision_folder import MARKS, write_model_and_pictures
from tests.support.vision_zoo import IMAGE, small_language_model, whole_model

FAMILIES = ["qwen2_vl", "qwen3_vl", "gemma3", "gemma3n", "gemma4", "pixtral", "idefics3", "llava"]
BYTES = 64 << 20
# Their attention reads what an indexer chooses.
INDEXED = ["glm5_next", "minimax_m3_vl", "qwen4_exp"]
TEXT = [(5 * i + 3) % 97 for i in range(300)]
PROMPT = [*TEXT, *[IMAGE] * 16, 7, 8, 9]


# Qwen3.5's compute row by row, with rows that are padding for several steps; zaya1_vl masks hidden
# states.
@pytest.mark.parametrize("folder", [*FAMILIES, "qwen3_5", "minicpmv4_6", "zaya1_vl"])
def test_tokens_are_equal_and_nothing_is_gathered(folder: str) -> None:
    model = small_language_model(folder)
    factory = PagedCacheFactory(model, max_bytes=BYTES)
    assert all(
        isinstance(each, PagedKVCache) for each in factory.make_cache() if folder in FAMILIES
    )
    in_batch = expected = batched(model)
    if folder in FAMILIES:
        expected = alone(model, lambda: vlm_cache.make_prompt_cache(model))
    assert alone(model, factory.make_cache) == expected
    with factory:
        assert batched(model) == in_batch
    assert factory.stats().gather_fallbacks == 0
    assert factory.stats().bytes_active == 0


def test_windows_are_rings() -> None:
    model = small_language_model("gemma3")
    factory = PagedCacheFactory(model, max_bytes=BYTES)
    stock = vlm_cache.make_prompt_cache(model)
    windows = [at for at, each in enumerate(stock) if isinstance(each, vlm_cache.RotatingKVCache)]
    assert list(factory.pool.windows) == windows
    assert windows


def test_installed_factories_make_the_caches() -> None:
    model, other = (small_language_model("llava", seed=seed) for seed in range(2))
    factory = PagedCacheFactory(model, max_bytes=BYTES)
    stock = vlm_cache.make_prompt_cache
    with factory:
        assert isinstance(vlm_cache.make_prompt_cache(model)[0], PagedKVCache)
        assert type(vlm_cache.make_prompt_cache(other)[0]) is vlm_cache.KVCache
        assert isinstance(ar._make_cache(model, [0, 2])[0], PagedKVCache)
        with pytest.raises(ValueError, match="kv_bits=4 is for mlx-vlm's own caches"):
            ar._make_cache(model, [0, 2], kv_bits=4)
    assert vlm_cache.make_prompt_cache is stock


def test_a_chat_trims_its_cache_only_as_far_as_rings_can() -> None:
    model = small_language_model("gemma3")
    factory = PagedCacheFactory(model, max_bytes=BYTES)
    cache = factory.make_cache()
    greedy(model, cache, mx.array([TEXT * 3]))
    tokens = cache[0].offset
    with factory:
        assert dispatch._prefix_cache_trim_amount(cache, tokens) == 0
        assert dispatch._prefix_cache_trim_amount(cache, tokens - 1) == 1
        assert dispatch._prefix_cache_trim_amount(cache, 3) is None


def test_a_cache_class_that_nobody_knows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_language_model("llava")
    caches = [vlm_cache.SimpleKVCache()]
    monkeypatch.setattr(type(model), "make_cache", lambda _: caches, raising=False)
    with pytest.raises(TypeError, match=r"mlx-vlm keeps a mlx_vlm\.models\.cache\.SimpleKVCache"):
        PagedCacheFactory(model, max_bytes=BYTES)


def test_an_image_shares_what_precedes_it_and_nothing_behind_another() -> None:
    whole = whole_model()
    factory = PagedCacheFactory(whole, max_bytes=BYTES)
    first, second = (mx.full((8, 8), value) for value in (1, 2))
    cache, cached = factory.fetch_cache(PROMPT, images=[first])
    assert cached == 0
    expected = greedy(whole.language_model, cache, mx.array([PROMPT]))
    factory.insert_cache(PROMPT, cache, images=[first])
    del cache
    assert factory.fetch_cache([*PROMPT, 1], images=[second])[1] == len(TEXT)
    again, cached = factory.fetch_cache(PROMPT, images=[first])
    assert cached == len(PROMPT) - 1
    assert greedy(whole.language_model, again, mx.array([PROMPT[cached:]])) == expected
    for call in (factory.fetch_cache, lambda tokens: factory.insert_cache(tokens, again)):
        with pytest.raises(ValueError, match="16 image tokens"):
            call(PROMPT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_and_pictures(tmp_path_factory.mktemp("vision"))


ABOUT = f"{MARKS[0]}{MARKS[2]}{MARKS[1]}def read(path):"


def test_a_whole_model_says_the_same_about_a_picture(folder: Path) -> None:
    model, processor = mlx_vlm.load(str(folder / "model"))

    def said(picture: str) -> list[int]:
        options = {"image": [str(folder / picture)], "max_tokens": 12, "temperature": 0.0}
        tokens: list[int] = mlx_vlm.generate(model, processor, ABOUT, **options).token_ids
        return tokens

    expected = [said("red.png"), said("blue.png")]
    assert expected[0] != expected[1]
    factory = PagedCacheFactory(model, max_bytes=BYTES, processor=processor)
    with factory:
        assert [said("red.png"), said("blue.png")] == expected
    assert factory.stats().gather_fallbacks == 0
    assert factory.pool.is_open


def test_the_command_says_what_mlx_vlm_says_and_stores_the_image(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, processor = mlx_vlm.load(str(folder / "model"))
    picture = str(folder / "red.png")

    def told(prompt: str, *options: str) -> tuple[str, str]:
        asked = ["--prompt", prompt, "--image", picture, "--max-tokens", "12", *options]
        assert main(["generate", "--model", str(folder / "model"), *asked]) == 0
        captured = capsys.readouterr()
        return captured.out.strip(), captured.err

    def expected(prompt: str) -> str:
        options = {"image": [picture], "max_tokens": 12, "temperature": 0.0}
        return str(mlx_vlm.generate(model, processor, prompt, **options).text).strip()

    text, summary = told(ABOUT, "--ignore-chat-template", "--max-kv-bytes", "9MB")
    assert text == expected(ABOUT)
    assert "1 block in use" in summary
    prompt = "def read(path):" * 60  # more than a page
    for is_stored in (False, True):
        text, summary = told(prompt, "--store", str(tmp_path / "store"))
        assert text == expected(IMAGE_MARKS + prompt)
        assert ("of them cached" in summary) == is_stored
    options = ["--temp", "1", "--seed", "3"]
    assert told(prompt, *options)[0] == told(prompt, *options)[0]


def test_a_model_that_counts_columns_of_keys_is_refused_in_a_ragged_batch() -> None:
    model: Any = small_language_model("inkling")
    with PagedCacheFactory(model, max_bytes=BYTES):
        with pytest.raises(NotImplementedError, match="among its keys, and pages hold no padding"):
            batched(model)
        rows = [generation_batch(model, prompt) for prompt in PROMPTS[:2]]
        with pytest.raises(NotImplementedError, match="give it prompts one at a time"):
            rows[0].extend(rows[1])
    rows = [generation_batch(model, prompt) for prompt in PROMPTS[:2]]
    rows[0].extend(rows[1])
    assert len(rows[0].uids) == 2


def generation_batch(model: Any, prompt: list[int]) -> ar.GenerationBatch:
    """What mlx-vlm's server decodes after it has computed a prompt."""
    cache = ar.cache.make_prompt_cache(model)
    logits = model(mx.array([prompt]), cache=cache).logits[:, -1]
    return ar.GenerationBatch(
        model=model,
        uids=[len(prompt)],
        inputs=mx.argmax(logits, axis=-1),
        prompt_cache=cache,
        sampler=lambda logits: mx.argmax(logits, axis=-1),
        stop_criteria=None,
        max_tokens=[4],
    )


def text_model_of(model: Any) -> TextModel:
    """One of a whole model of the same folder, whose pictures no test uses."""
    kind = type("Model", (Module,), {"__module__": type(model).__module__})
    whole = kind()
    whole.language_model, whole.config = model, None
    return TextModel(whole)


@pytest.mark.parametrize("folder", [*FAMILIES, "plamo2vl", "qwen3_5_moe", *INDEXED])
def test_rows_of_mlx_lms_batches_are_right(folder: str) -> None:
    """These are padded on the right, also where layers are recurrent."""
    model = small_language_model(folder)
    expected = alone(model, lambda: vlm_cache.make_prompt_cache(model))
    text_model = text_model_of(model)
    assert text_model.is_batchable
    factory = PagedCacheFactory(text_model, max_bytes=BYTES)
    for _ in range(2):  # The second time behind cached prefixes.
        fetched = [factory.fetch_cache(prompt) for prompt in PROMPTS]
        rest = [prompt[cached:] for prompt, (_, cached) in zip(PROMPTS, fetched, strict=True)]
        generator = BatchGenerator(text_model, max_tokens=NEW_TOKENS, prefill_step_size=16)
        uids = generator.insert(rest, caches=[cache for cache, _ in fetched])
        rows: dict[int, list[int]] = {uid: [] for uid in uids}
        while responses := generator.next_generated():
            for each in responses:
                rows[each.uid].append(each.token)
                if each.finish_reason is not None:
                    written = PROMPTS[uids.index(each.uid)] + rows[each.uid][:-1]
                    factory.insert_cache(written, each.prompt_cache)
        assert [*rows.values()] == expected
    assert folder in INDEXED or factory.stats().gather_fallbacks == 0
