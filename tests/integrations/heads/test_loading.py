"""Heads in folders: what is one, and what is refused."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from paged_kv import HeadDraft, PagedCacheFactory
from paged_kv.commands.model_names import AUTO_HEAD
from paged_kv.integrations.heads.eagle3_head import Eagle3Args, Eagle3Head
from paged_kv.integrations.heads.loading import load_head
from paged_kv.integrations.heads.model_parts import ModelParts
from paged_kv.integrations.heads.prediction_head import LayerHead, LayerHeadArgs
from paged_kv.integrations.speculation.draft_models import load_draft_model, make_draft
from tests.support.zoo import small_model

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "vocab_size": 128,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
LAYER = {"model_type": "layer_head", **SHAPE}
EAGLE = {**SHAPE, "draft_vocab_size": 50, "torch_dtype": "bfloat16"}


def written(folder: Path, config: dict[str, Any], **changes: mx.array | None) -> Path:
    """A folder with a head of this config.json, and with some weights changed or left out."""
    folder.mkdir(exist_ok=True)
    head = (
        Eagle3Head(Eagle3Args(**SHAPE, draft_vocab_size=50))
        if "draft_vocab_size" in config
        else LayerHead(LayerHeadArgs(**SHAPE))
    )
    weights: dict[str, Any] = {**dict(tree_flatten(head.parameters())), **changes}  # type: ignore[no-untyped-call]
    kept = {name: each for name, each in weights.items() if each is not None}
    mx.save_safetensors(str(folder / "model.safetensors"), kept)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_head_of_eagle3_drafts_tokens_of_the_model(tmp_path: Path) -> None:
    offsets = mx.arange(50)
    head: Any = load_head(written(tmp_path, EAGLE, d2t=offsets))
    states = mx.random.normal((1, 9, 64))
    own = mx.argmax(head.lm_head(head.norm(states)), axis=-1)
    parts = ModelParts(small_model("llama"))
    assert mx.array_equal(head.likeliest(states, parts), 2 * own)


def test_auto_drafts_with_a_head_if_one_comes_with_the_model(tmp_path: Path) -> None:
    model, tokenizer = small_model("llama"), None
    factory = PagedCacheFactory(model)
    load = partial(load_draft_model, AUTO_HEAD, model, str(tmp_path), tokenizer)
    assert load() is None
    assert make_draft(AUTO_HEAD, None, [factory]) is None
    (written(tmp_path / "draft_head", LAYER) / "config.json").rename(tmp_path / "config.json")
    with pytest.raises(FileNotFoundError):  # not taken for a model without a head
        load()
    (tmp_path / "config.json").rename(tmp_path / "draft_head" / "config.json")
    head = load()
    assert isinstance(head, LayerHead)
    factory = PagedCacheFactory(model, head=head)
    assert isinstance(make_draft(AUTO_HEAD, head, [factory]), HeadDraft)


@pytest.mark.parametrize(
    ("config", "changes", "said"),
    [
        (LAYER, {"join.weight": None}, "join.weight"),
        (LAYER, {"other": mx.zeros(3)}, "other"),
        (LAYER, {"norm.weight": mx.zeros(65)}, "norm.weight"),
        ({"model_type": "llama"}, {}, "known"),
        ({"model_type": "layer_head", "hidden_size": 64}, {}, "num_attention_heads"),
    ],
)
def test_what_is_refused(
    config: dict[str, Any], changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        load_head(written(tmp_path, config, **changes))
