"""Pages on disk hit only for the model, settings and versions that computed them."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.tuner.utils import linear_to_lora_layers

from tests.support.generation import greedy
from tests.support.stored_prompts import TEXT, computed, found, stored_factory
from tests.support.zoo import small_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_salts_share_nothing(folder: Path) -> None:
    model = small_model("qwen3")
    factory = stored_factory(model, folder)
    cache = factory.make_cache()
    greedy(model, TEXT[:300], cache, 1)
    factory.insert_cache(TEXT[:300], cache, salt="alice")
    with pytest.raises(ValueError, match="salt"):
        factory.fetch_cache(TEXT[:300], salt=object())
    factory.close()
    factory = stored_factory(model, folder)
    for salt in ("bob", None, b"alice", ("alice",)):
        assert factory.fetch_cache(TEXT[:300], salt=salt)[1] == 0
    assert factory.fetch_cache(TEXT[:300], salt="alice")[1] == 299
    factory.close()


def scaled(model: Any) -> None:
    projection = model.layers[1].self_attn.k_proj
    weight = mx.array(projection.weight)
    weight[3, 5] += 0.01
    projection.weight = weight


def other_rope(model: Any) -> None:
    model.layers[0].self_attn.rope.base *= 2


def other_scale(model: Any) -> None:
    model.layers[0].self_attn.scale *= 2


def with_adapter(model: Any) -> None:
    mx.random.seed(3)
    linear_to_lora_layers(model, 1, {"rank": 2, "scale": 4.0, "dropout": 0.0})


def in_bfloat16(model: Any) -> None:
    model.set_dtype(mx.bfloat16)


def test_a_changed_model_of_the_same_name_finds_nothing(folder: Path) -> None:
    model = small_model("qwen3")
    factory = stored_factory(model, folder)
    computed(model, factory, TEXT[:300])
    factory.close()
    for change in (scaled, other_rope, other_scale, with_adapter, in_bfloat16):
        changed = small_model("qwen3")
        change(changed)
        assert found(changed, folder, TEXT[:300]) == 0
    for page_format in ("q8", "q4", "auto"):
        assert found(model, folder, TEXT[:300], page_format=page_format) == 0
    assert found(small_model("qwen3"), folder, TEXT[:300]) == 299
