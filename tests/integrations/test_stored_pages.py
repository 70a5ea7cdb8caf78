"""Pages on disk hit only for the model, settings and versions that computed them. Their
states are the same after packing and unpacking."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm.models.cache import ArraysCache, KVCache, load_prompt_cache, save_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers

from paged_kv import PagedCacheFactory
from paged_kv.integrations import stored_pages
from paged_kv.integrations.model_version import ModelVersion
from paged_kv.integrations.stored_pages import can_pack, pack, page_identity, unpack
from tests.support.generation import greedy
from tests.support.stored_prompts import TEXT, computed, found, read, shallow_model, stored_factory
from tests.support.zoo import small_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


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
    with pytest.raises(ValueError, match="salt"):
        factory.fetch_cache(TEXT[:300], salt=object())
    factory.close()
    for change in (scaled, other_rope, other_scale, with_adapter, in_bfloat16):
        changed = small_model("qwen3")
        change(changed)
        assert found(changed, folder, TEXT[:300]) == 0
    for page_format in ("q8", "q4", "auto"):
        assert found(model, folder, TEXT[:300], page_format=page_format) == 0
    assert found(small_model("qwen3"), folder, TEXT[:300]) == 256


def changes_of(model: Any) -> dict[str, tuple[Any, str, float]]:
    """Settings of a model with an adapter, each with another value."""
    attention = model.layers[0].self_attn
    return {
        "scale": (attention, "scale", 0.5),
        "rope": (attention.rope, "base", 5e5),
        "adapter": (attention.q_proj, "scale", 40.0),
        "args": (model.args, "rope_theta", 5e5),
    }


@pytest.fixture
def adapted() -> Any:
    model = shallow_model("qwen3")
    linear_to_lora_layers(model, 1, {"rank": 2, "scale": 4.0, "dropout": 0.0})
    model.layers[0].self_attn.q_proj.lora_b += 0.1
    return model


@pytest.mark.parametrize("name", ["scale", "rope", "adapter", "args"])
def test_changed_settings_share_nothing_and_are_known_again(
    name: str, adapted: Any, folder: Path
) -> None:
    factory = stored_factory(adapted, folder)
    module, attribute, other = changes_of(adapted)[name]
    before = getattr(module, attribute)
    for value, cached in ((before, 0), (other, 0), (before, 299), (other, 299)):
        setattr(module, attribute, value)
        assert warm_and_insert(adapted, factory, TEXT[:300]) == cached
    factory.close()
    setattr(module, attribute, before)
    assert found(adapted, folder, TEXT[:300]) == 256


def warm_and_insert(model: Any, factory: PagedCacheFactory, prompt: list[int]) -> int:
    cache, cached = factory.fetch_cache(prompt)
    greedy(model, prompt[cached:], cache, 1)
    factory.insert_cache(prompt, cache)
    return cached


@pytest.mark.parametrize("name", ["qwen3", "mamba2"])
@pytest.mark.parametrize("known", [0, 300])
def test_a_cache_is_of_the_version_that_computed_it(name: str, known: int) -> None:
    """Not of the one that the model has when the cache is made, fetched and inserted."""
    model = shallow_model(name)
    factory = PagedCacheFactory(model, max_bytes=1 << 26)
    if known:
        read(model, factory, TEXT[:known])
    cache, cached = factory.fetch_cache(TEXT[:400])
    assert cached == known
    weights = model.parameters()
    model.update(tree_map(lambda array: array * 1.5, weights))
    model(mx.array([TEXT[cached:400]]), cache=cache)
    changed = model.parameters()
    model.update(weights)
    factory.insert_cache(TEXT[:400], cache)
    assert factory.fetch_cache(TEXT[:401])[1] == cached
    model.update(changed)
    assert factory.fetch_cache(TEXT[:401])[1] == (0 if known else 400)


def test_a_saved_cache_is_inserted_for_the_model_that_computed_it_alone(tmp_path: Path) -> None:
    model, file = shallow_model("qwen3"), str(tmp_path / "saved.safetensors")
    factory = PagedCacheFactory(model, page_format="q8", max_bytes=1 << 26)
    other = PagedCacheFactory(shallow_model("qwen3", head_dim=16), max_bytes=1 << 26)
    cache = factory.make_cache()
    greedy(model, TEXT[:300], cache, 1)
    save_prompt_cache(file, cache)
    for is_changed in (True, False):
        weight = model.layers[0].self_attn.k_proj.weight
        model.layers[0].self_attn.k_proj.weight = weight * 2 if is_changed else weight / 2
        loaded = load_prompt_cache(file)
        assert loaded[0].pool is factory.pool
        assert factory.insert_cache(TEXT[:300], loaded) == (0 if is_changed else 300)
        assert factory.fetch_cache(TEXT[:300])[1] == (0 if is_changed else 299)
    assert not other.stats().blocks_used


def test_pages_are_stored_as_of_the_version_that_computed_them(folder: Path) -> None:
    model = shallow_model("qwen3")
    factory, projection = stored_factory(model, folder), model.layers[0].self_attn.k_proj
    cache, prompt = factory.make_cache(), TEXT[:300]
    model(mx.array([prompt]), cache=cache)
    projection.weight = projection.weight * 2
    factory.insert_cache(prompt, cache)
    factory.close()
    assert found(model, folder, prompt) == 0
    projection.weight = projection.weight / 2
    assert found(model, folder, prompt) == 256


@pytest.mark.parametrize(
    "dtype", [mx.float16, mx.bfloat16, mx.float32, mx.int32, mx.int64, mx.uint8, mx.bool_]
)
def test_caches_keep_their_order_and_arrays_their_dtype_and_shape(dtype: mx.Dtype) -> None:
    keys, states = KVCache(), ArraysCache(4)
    keys.update_and_fetch(mx.ones((1, 2, 3, 4), mx.bfloat16), mx.zeros((1, 2, 3, 4), mx.bfloat16))
    numbers = mx.random.normal((2, 5), key=mx.random.key(1)) * 100
    arrays = [numbers.astype(dtype), mx.arange(6).reshape(2, 3).T, mx.zeros((), dtype)]
    for at, each in enumerate(arrays):
        states[at] = each
    assert can_pack([keys, states])
    notes, packed = pack([keys, states])
    first, second = unpack(json.loads(json.dumps(notes)), packed)
    assert (type(first), type(second)) == (KVCache, ArraysCache)
    assert first.offset == 3
    assert mx.array_equal(first.state[0], keys.state[0])
    assert second[3] is None
    for at, each in enumerate(arrays):
        assert (second[at].dtype, second[at].shape) == (each.dtype, each.shape)
        assert mx.array_equal(second[at], each)


def test_pages_name_the_version_of_the_package_that_their_model_is_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    versions = {"mlx": "1", "mlx-lm": "2", "mlx-vlm": "3"}
    monkeypatch.setattr(stored_pages, "version", versions.__getitem__)
    factory = PagedCacheFactory(small_model("qwen3"), max_bytes=1 << 26)
    factory.make_cache()
    known = ModelVersion(small_model("qwen3"))
    found = []
    for library in ("mlx-lm", "mlx-vlm"):
        identity = page_identity(known, factory.pool, "qwen3", library)((0, "fp16", None))
        assert identity is not None
        found.append(identity.versions)
    assert found == ["mlx 1, mlx-lm 2", "mlx 1, mlx-lm 2, mlx-vlm 3"]


def test_mlx_vlms_states_are_known_where_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("mlx_vlm.models.cache")
    module.ArraysCache = type(  # type: ignore[attr-defined]
        "ArraysCache",
        (),
        {"__module__": module.__name__, "__init__": lambda self, size: setattr(self, "size", size)},
    )
    states = module.ArraysCache(2)
    states.state = [mx.arange(3), None]
    assert can_pack([states])
    notes, packed = pack([states])
    monkeypatch.delitem(sys.modules, module.__name__, raising=False)
    with pytest.raises(KeyError):
        unpack(notes, packed)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    (again,) = unpack(json.loads(json.dumps(notes)), packed)
    assert (type(again), again.size, again.state[1]) == (module.ArraysCache, 2, None)
    assert again.state[0].tolist() == [0, 1, 2]
