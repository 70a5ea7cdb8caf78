"""Prompts with images continue behind any cached prefix as mlx-vlm computes them at once."""

from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map

pytest.importorskip("mlx_vlm", reason="needs the extra vlm")

from mlx_vlm.generate import ar
from mlx_vlm.models import qwen3_vl

from paged_kv import PagedCacheFactory
from paged_kv.integrations.mlx_vlm.image_generation import MediaPrompt, PromptSteps, TextModel
from tests.support.vision_zoo import IMAGE, drawn

START = 98
NEW_TOKENS = 6
GRIDS = [(1, 4, 4), (1, 4, 6)]
"""The patches of two images; four of them make a token."""

TEXTS = [[(5 * at + 3) % 90 for at in range(count)] for count in (30, 20, 25)]
TOKENS = [*TEXTS[0], START, *[IMAGE] * 4, *TEXTS[1], START, *[IMAGE] * 6, *TEXTS[2]]
MEDIA_END = len(TOKENS) - len(TEXTS[2])
CONFIG = {
    "model_type": "qwen3_vl",
    "image_token_id": IMAGE,
    "image_token_index": IMAGE,
    "video_token_id": 99,
    "video_token_index": 99,
    "vision_start_token_id": START,
    "text_config": {
        "model_type": "qwen3_vl_text",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "vocab_size": 128,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3], "mrope_interleaved": True},
    },
    "vision_config": {
        "model_type": "qwen3_vl",
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 32,
        "out_hidden_size": 64,
        "num_heads": 2,
        "deepstack_visual_indexes": [0, 1],
        "num_position_embeddings": 64,
        "patch_size": 14,
    },
}


@pytest.fixture(scope="module")
def model() -> TextModel:
    """A small random Qwen3-VL, whose images also change its first layers."""
    config = qwen3_vl.ModelConfig.from_dict(dict(CONFIG))
    config.text_config = qwen3_vl.TextConfig.from_dict(CONFIG["text_config"])
    config.vision_config = qwen3_vl.VisionConfig.from_dict(CONFIG["vision_config"])
    mx.random.seed(0)
    whole: Any = qwen3_vl.Model(config)
    whole.update(tree_map(drawn, whole.parameters()))
    whole.eval()
    return TextModel(whole)


@pytest.fixture(scope="module")
def prompt() -> MediaPrompt:
    mx.random.seed(1)
    patches = sum(height * width for _, height, width in GRIDS)
    pixel_values = mx.random.normal((patches, 3 * 2 * 14 * 14))
    key = [-at if token == IMAGE else token for at, token in enumerate(TOKENS, 1)]
    mask = mx.ones((1, len(TOKENS)), mx.int32)
    return MediaPrompt(TOKENS, key, pixel_values, mask, {"image_grid_thw": mx.array(GRIDS)})


def test_the_end_of_images_is_known(prompt: MediaPrompt) -> None:
    assert prompt.media_end == MEDIA_END
    assert MediaPrompt(TEXTS[0], TEXTS[0]).media_end == 0


@pytest.mark.parametrize("cached", [0, 10, 33, 50, MEDIA_END, len(TOKENS) - 1])
def test_tokens_behind_any_prefix_are_mlx_vlms(
    model: TextModel, prompt: MediaPrompt, cached: int
) -> None:
    """Before all images, within one, between them, and behind; while texts are computed too."""
    images = (prompt.pixel_values, prompt.mask)
    options: Any = {"max_tokens": NEW_TOKENS, "temperature": 0.0, **(prompt.inputs or {})}
    generated = ar.generate_step(mx.array([TOKENS]), model.whole, *images, **options)
    expected = [token for token, _ in generated]
    factory = PagedCacheFactory(model, max_bytes=64 << 20)
    cache = factory.make_cache()

    def step(steps: PromptSteps, tokens: list[int]) -> mx.array:
        logits = steps(mx.array([tokens]), cache)
        model(mx.array([TEXTS[1]]), cache=factory.make_cache())
        return logits

    if cached:
        step(prompt.begin(model, 0), TOKENS[:cached])
    steps = prompt.begin(model, cached)
    assert steps.start == cached
    for at in range(cached, len(TOKENS) - 1, 7):
        step(steps, TOKENS[at : min(at + 7, len(TOKENS) - 1)])
    got: list[int] = []
    token = TOKENS[-1]
    for _ in range(NEW_TOKENS):
        best: Any = mx.argmax(step(steps, [token])[0, -1])
        token = best.item()
        got.append(token)
    assert got == expected
    assert factory.stats().gather_fallbacks == 0
