"""Heads in folders of their own, and those that come with a model's weights as published."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_map

from paged_kv import HeadDraft, PagedCacheFactory
from paged_kv.integrations.heads.loading import FAMILIES, load_head, load_own_head
from paged_kv.integrations.heads.prediction_head import (
    Eagle3Head,
    HeadArgs,
    LayerHead,
    ModelParts,
    llama_head,
)
from paged_kv.integrations.speculation.draft_models import load_draft_model, make_draft
from paged_kv.options import AUTO_HEAD, OWN_HEAD
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
OWN = ("embedding_norm", "hidden_norm", "join", "norm")


def written(folder: Path, config: dict[str, Any], **changes: mx.array | None) -> Path:
    """A folder with a head of this config.json, and with some weights changed or left out."""
    folder.mkdir(exist_ok=True)
    head = (
        Eagle3Head(HeadArgs(**SHAPE, draft_vocab_size=50))
        if "draft_vocab_size" in config
        else llama_head(HeadArgs(**SHAPE))
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


def test_a_head_of_one_layer_is_read_as_it_was_trained_whatever_else_its_config_says(
    tmp_path: Path,
) -> None:
    others = {"rope_scaling": {"rope_type": "linear", "factor": 4}, "attention_bias": True}
    config = LAYER | others | {"num_hidden_layers": None}
    heads: list[Any] = [
        load_head(written(tmp_path / str(at), each)) for at, each in enumerate((LAYER, config))
    ]
    heads[1].update(heads[0].parameters())
    read = mx.random.normal((1, 9, 64))
    assert mx.array_equal(heads[0](read, read), heads[1](read, read))


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


def published(head: LayerHead, name: str, layers: int) -> dict[str, mx.array]:
    """The weights of a head as a family's files have them."""
    family, weights = FAMILIES[name], {}
    names = {ours: getattr(family, ours) for ours in OWN}
    for path, array in dict(tree_flatten(head.parameters())).items():  # type: ignore[no-untyped-call]
        ours, _, rest = path.partition(".")
        given = array - 1 if family.norms_less_one and "norm" in path else array
        stem = names.get(ours, family.layer.rstrip("."))
        key = f"{stem}.{rest}" if stem else rest
        if "switch_mlp" in key and "qwen3_5" not in name:
            for at, expert in enumerate(given):
                weights[key.replace("switch_mlp", f"experts.{at}")] = expert
        else:
            weights[key] = given
    prefix = family.prefix.format(layers=layers)
    return {prefix + key: array for key, array in weights.items()}


def saved(model: Any, name: str, folder: Path, **others: mx.array) -> LayerHead:
    """A head with random weights, which the files in `folder` hold."""
    parts = ModelParts(model)
    layers = parts.backbone.layers
    layer = type(layers[-1])
    arguments = (parts.arguments,) if name == "mimo" else (parts.arguments, len(layers) - 1)
    head = FAMILIES[name].head(layer(*arguments), parts.hidden_size, parts.vocab_size, 1e-5)
    mx.random.seed(2)
    head.update(tree_map(lambda each: 0.3 * mx.random.normal(each.shape), head.parameters()))  # type: ignore[no-untyped-call]
    weights = published(head, name, len(layers)) | others
    weights["model.embed_tokens.weight"] = mx.zeros((2, 2))
    mx.save_safetensors(str(folder / "model-00001-of-00001.safetensors"), weights)
    return head


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "glm4_moe", "mimo"])
def test_a_head_is_read_as_it_is_published(name: str, tmp_path: Path) -> None:
    model = small_model(name)
    with pytest.raises(ValueError, match="no prediction head"):
        load_draft_model(OWN_HEAD, model, str(tmp_path), None)
    wanted = saved(model, name, tmp_path)
    found = load_own_head(model, tmp_path)
    assert found is not None
    embeddings, hidden = (mx.random.normal((1, 7, 64), key=mx.random.key(at)) for at in (1, 2))
    states = found(embeddings, hidden)
    assert mx.allclose(states, wanted(embeddings, hidden), atol=1e-5)
    parts = ModelParts(model)
    assert mx.array_equal(found.likeliest(states, parts), wanted.likeliest(states, parts))


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_what_stands_around_the_layer(name: str) -> None:
    """As vLLM has it: MiMo joins hidden states and embeddings, the others the reverse; DeepSeek's
    and GLM's heads go on from states that are not normed."""
    family, width = FAMILIES[name], 4
    head = family.head(lambda states, mask, cache: 3 * states, width, 8, 1e-9)
    half = mx.concatenate([mx.eye(width), mx.zeros((width, width))], axis=1)
    head.join.weight = half  # takes what stands first
    embeddings, hidden = mx.array([[[1.0, 0, 0, 0]]]), mx.array([[[0, 1.0, 0, 0]]])
    states = head(embeddings, hidden)
    first = [0.0, 2, 0, 0] if name == "mimo" else [2.0, 0, 0, 0]  # of mean square 1
    feeds_normed = name not in ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
    wanted = mx.array([[first]]) * (1 if feeds_normed else 3)
    assert mx.allclose(states, wanted, atol=1e-4)
