"""Pages on disk hit only for the model, settings and versions that computed them."""

import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx_lm.tuner.utils import linear_to_lora_layers

from paged_kv import PagedCacheFactory
from paged_kv.integrations import page_identity
from paged_kv.integrations.page_identity import fingerprints
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
    greedy(model, TEXT[:600], cache, 1)
    factory.insert_cache(TEXT[:600], cache, salt="alice")
    with pytest.raises(ValueError, match="a salt of type object cannot be stored"):
        factory.fetch_cache(TEXT[:600], salt=object())
    factory.close()
    factory = stored_factory(model, folder)
    for salt in ("bob", None, b"alice", ("alice",)):
        assert factory.fetch_cache(TEXT[:600], salt=salt)[1] == 0
    assert factory.fetch_cache(TEXT[:600], salt="alice")[1] == 599
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


@pytest.mark.parametrize("change", [scaled, other_rope, other_scale, with_adapter])
def test_a_changed_model_of_the_same_name_finds_nothing(folder: Path, change: Any) -> None:
    model = small_model("qwen3")
    factory = stored_factory(model, folder)
    computed(model, factory, TEXT[:600])
    factory.close()
    changed = small_model("qwen3")
    change(changed)
    assert found(changed, folder, TEXT[:600]) == 0
    assert found(small_model("qwen3"), folder, TEXT[:600]) == 599


def test_weights_exchanged_under_a_factory_find_nothing(folder: Path) -> None:
    model = small_model("qwen3")
    factory = stored_factory(model, folder)
    computed(model, factory, TEXT[:600])
    begun = factory.make_cache()
    greedy(model, [1, *TEXT[:600]], begun, 1)
    scaled(model)
    assert factory.fetch_cache(TEXT[:600])[1] == 0
    # The sequence began with the other weights: it must not be stored under these.
    factory.insert_cache([1, *TEXT[:600]], begun)
    factory.close()
    assert found(model, folder, [1, *TEXT[:600]]) == 0
    assert found(small_model("qwen3"), folder, TEXT[:600]) == 599


@pytest.mark.parametrize(
    "options",
    [{"page_format": "q8"}, {"page_format": "q4"}, {"page_format": "auto"}],
    ids=lambda options: options["page_format"],
)
def test_other_formats_share_nothing(folder: Path, options: dict[str, Any]) -> None:
    model = small_model("qwen3")
    factory = stored_factory(model, folder)
    computed(model, factory, TEXT[:600])
    factory.close()
    assert found(model, folder, TEXT[:600], **options) == 0


def test_another_dtype_shares_nothing(folder: Path) -> None:
    model: Any = small_model("qwen3")
    factory = stored_factory(model, folder)
    computed(model, factory, TEXT[:600])
    factory.close()
    model.set_dtype(mx.bfloat16)
    assert found(model, folder, TEXT[:600]) == 0


def test_the_fingerprint_is_that_of_the_content() -> None:
    def of(model: Module) -> tuple[str, str]:
        return fingerprints(model)

    model = small_model("gemma3_text")
    first = of(model)
    assert of(small_model("gemma3_text")) == of(copy.deepcopy(model)) == first
    # Running the model changes nothing.
    greedy(model, TEXT[:20], PagedCacheFactory(model).make_cache(), 1)
    assert of(model) == first
    for change in (scaled, other_scale):
        changed = small_model("gemma3_text")
        change(changed)
        assert of(changed) != first


def test_arrays_are_told_apart_by_name_dtype_and_shape() -> None:
    """All of these have the same bytes."""

    def weights(name: str, array: mx.array) -> str:
        empty: type[Any] = Module
        model = empty()
        model[name] = array
        return fingerprints(model)[0]

    all_of_them = {
        weights("weight", mx.zeros(4, mx.float16)),
        weights("bias", mx.zeros(4, mx.float16)),
        weights("weight", mx.zeros(4, mx.bfloat16)),
        weights("weight", mx.zeros((2, 2), mx.float16)),
    }
    assert len(all_of_them) == 4
    assert weights("weight", mx.zeros(4, mx.float16)) in all_of_them


def test_no_prompt_reads_the_versions_of_packages_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes a millisecond, on the thread that generates."""
    model = small_model("qwen3")
    factory = stored_factory(model, folder)
    read: list[str] = []
    monkeypatch.setattr(page_identity, "version", read.append)
    computed(model, factory, TEXT[:600])
    assert factory.fetch_cache(TEXT[:600])[1] == 599
    factory.close()
    assert not read
