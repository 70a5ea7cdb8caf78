"""Heads that come with a model's weights, in files as they are published."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_map

from paged_kv.integrations.heads.loading import has_own_head
from paged_kv.integrations.heads.model_parts import ModelParts
from paged_kv.integrations.heads.mtp_head import FAMILIES, MtpHead, load_mtp_head
from tests.support.zoo import small_model

OWN = ("embedding_norm", "hidden_norm", "join", "norm")


def published(head: MtpHead, name: str, layers: int) -> dict[str, mx.array]:
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


def saved(model: Any, name: str, folder: Path, **others: mx.array) -> MtpHead:
    """A head with random weights, which the files in `folder` hold."""
    parts = ModelParts(model)
    layers = parts.backbone.layers
    layer = type(layers[-1])
    arguments = (parts.arguments,) if name == "mimo" else (parts.arguments, len(layers) - 1)
    head = MtpHead(FAMILIES[name], layer(*arguments), parts.hidden_size, parts.vocab_size, 1e-5)
    mx.random.seed(2)
    head.update(tree_map(lambda each: 0.3 * mx.random.normal(each.shape), head.parameters()))  # type: ignore[no-untyped-call]
    weights = published(head, name, len(layers)) | others
    weights["model.embed_tokens.weight"] = mx.zeros((2, 2))
    mx.save_safetensors(str(folder / "model-00001-of-00001.safetensors"), weights)
    return head


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "glm4_moe", "mimo"])
def test_a_head_is_read_as_it_is_published(name: str, tmp_path: Path) -> None:
    model = small_model(name)
    assert not has_own_head(model, tmp_path)
    wanted = saved(model, name, tmp_path)
    assert has_own_head(model, tmp_path)
    found = load_mtp_head(model, tmp_path)
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
    head = MtpHead(family, lambda states, mask, cache: 3 * states, width, 8, 1e-9)
    half = mx.concatenate([mx.eye(width), mx.zeros((width, width))], axis=1)
    head.join.weight = half  # takes what stands first
    embeddings, hidden = mx.array([[[1.0, 0, 0, 0]]]), mx.array([[[0, 1.0, 0, 0]]])
    states = head(embeddings, hidden)
    first = [0.0, 2, 0, 0] if name == "mimo" else [2.0, 0, 0, 0]  # of mean square 1
    feeds_normed = name not in ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
    wanted = mx.array([[first]]) * (1 if feeds_normed else 3)
    assert mx.allclose(states, wanted, atol=1e-4)
