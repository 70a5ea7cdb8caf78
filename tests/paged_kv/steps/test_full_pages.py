"""A token attends to its own page in 16 bits and to every earlier page in its final format, however
a prompt is cut into steps."""

import copy
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from benches.step_lengths import difference, read
from paged_kv import PagedCacheFactory, PagedKVCache, PagePool, PoolExhausted, Sequence
from paged_kv.cache.saved_state import page_formats
from paged_kv.kernels.pages.layer_geometry import LayerGeometry
from paged_kv.kernels.pages.page_format import FP16, PageLayout, page_format_named
from paged_kv.pool.window import Window
from paged_kv.prefix import prefix_cache
from tests.support.attended_step import attended
from tests.support.full_pages import full_format, full_formats
from tests.support.zoo import small_model

HEAD = 32
attention = mx.fast.scaled_dot_product_attention


def caches_of(pool: PagePool) -> list[PagedKVCache]:
    sequence = Sequence(pool)
    return [PagedKVCache(pool, layer, [sequence]) for layer in range(pool.num_layers)]


def numbers(count: int, seed: int = 0) -> mx.array:
    return mx.random.normal((1, 1, count, HEAD), key=mx.random.key(seed)).astype(mx.float16)


def write(caches: list[PagedKVCache], count: int, seed: int = 0) -> None:
    for cache in caches:
        cache.update_and_fetch(numbers(count, seed), numbers(count, seed + 1))


def formats(cache: PagedKVCache) -> list[str]:
    return page_formats(cache.pool, cache.layer, cache.sequences[0])


def contents(cache: PagedKVCache) -> mx.array:
    found = mx.concatenate([array + 0 for array in cache.keys_and_values()])
    mx.eval(found)
    return found


def decoded(held: mx.array, name: str, part: str) -> mx.array:
    """The keys or values of a page as that format holds them."""
    page_format = page_format_named(name)
    number_format = page_format.keys if part == "keys" else page_format.values
    return number_format.decode(number_format.encode(held), held.dtype)


def pages_of(cache: PagedKVCache) -> list[mx.array]:
    """The full pages as they are, and the tokens after them."""
    pages = cache.pool.group_of(cache.layer).pages[cache.layer]
    full = cache.offset // 256
    blocks = cache.sequences[0].blocks(cache.pool.group_of(cache.layer))
    raw = [mx.array(pages.page(block)) for block in blocks[:full]]
    rest = cache.offset - 256 * full
    return [*raw, *([contents(cache)[:, :, -rest:]] if rest else [])]


def written_in_steps(
    name: str, keys: mx.array, size: int, last: int = 1
) -> tuple[PagedKVCache, mx.array]:
    """A cache with these keys as keys and values, and what each token attended to, with itself as
    the query. The last tokens are a step of their own."""
    pool = PagePool(1, page_format=name, max_bytes=1 << 24)
    (cache,) = caches_of(pool)
    before = keys.shape[2] - last
    outputs = []
    for start, end in [(at, min(at + size, before)) for at in range(0, before, size)] + [
        (before, keys.shape[2])
    ]:
        outputs.append(attended(cache, keys[:, :, start:end]))
    pool.check()
    return cache, mx.concatenate(outputs, axis=2)


def expected(name: str, keys: mx.array) -> mx.array:
    """What each token attends to, one page after the other."""
    seen = {"keys": keys[:, :, :0], "values": keys[:, :, :0]}
    outputs = []
    for start in range(0, keys.shape[2], 256):
        own = keys[:, :, start : start + 256]
        held = [mx.concatenate([each, own], axis=2) for each in seen.values()]
        outputs.append(attention(own, *held, scale=1.0, mask="causal"))
        seen = {
            part: mx.concatenate([each, decoded(own, full_format(name, start), part)], axis=2)
            for part, each in seen.items()
        }
    return mx.concatenate(outputs, axis=2)


@pytest.mark.parametrize("name", ["q4", "q8"])
@pytest.mark.parametrize("size", [1, 7, 255, 256, 300, 2048])
def test_a_token_sees_the_same_however_the_prompt_is_cut(
    size: int, name: str, backend: str
) -> None:
    keys = numbers(770 if size > 7 else 530, seed=1).astype(mx.float32)
    cache, outputs = written_in_steps(name, keys, size)
    assert float(mx.abs(outputs - expected(name, keys)).max()) < 1e-4
    at_once, _ = written_in_steps(name, keys, 4096)
    assert formats(cache)[:2] == full_formats(name, 2)
    for found, page in zip(pages_of(cache), pages_of(at_once), strict=True):
        assert mx.array_equal(found, page)


def test_a_step_ends_with_at_most_two_pages_of_16_bits() -> None:
    """The page that it ends in, and the one that it began in if that held earlier tokens."""
    pool = PagePool(1, page_format="q4", max_bytes=1 << 24)
    (cache,) = caches_of(pool)
    for size, full in [(2048, 8), (1, 9), (700, 11), (67, 11), (1, 12)]:
        write([cache], size)
        names = formats(cache)
        assert len(names) == full
        assert names[-1] == "fp16"
        assert names.count("fp16") == (2 if size == 700 else 1)
        assert pool.stats().blocks_by_format["fp16"] == names.count("fp16")
    pool.check()


def test_a_batch_is_cut_where_any_of_its_rows_begins_a_page(backend: str) -> None:
    lengths = [100, 256, 300]
    pool = PagePool(1, page_format="q4", max_bytes=1 << 24)
    rows = [numbers(length + 400, seed).astype(mx.float32) for seed, length in enumerate(lengths)]
    singles = []
    for row, length in zip(rows, lengths, strict=True):
        (cache,) = caches_of(pool)
        attended(cache, row[:, :, :length])
        singles.append(cache)
    batch = PagedKVCache.merge(singles)
    step = mx.concatenate([row[:, :, length:] for row, length in zip(rows, lengths, strict=True)])
    together = attended(batch, step)
    for at, row in enumerate(rows):
        apart = mx.abs(together[at] - expected("q4", row)[0, :, -400:])
        assert float(apart.max()) < 1e-4
    pool.check()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_in_no_part(side: str, backend: str) -> None:
    lengths, longest = [600, 290, 3], 600
    pool = PagePool(1, page_format="q4", max_bytes=1 << 24)
    rows = [numbers(length, seed).astype(mx.float32) for seed, length in enumerate(lengths)]
    padding = [longest - length for length in lengths]
    cache = PagedKVCache(pool, 0, [Sequence(pool) for _ in rows])
    if side == "left":
        cache.prepare(left_padding=padding)
    else:
        cache.prepare(lengths=lengths, right_padding=padding)
    sides = [(count, 0) if side == "left" else (0, count) for count in padding]
    step = mx.concatenate(
        [mx.pad(row, [(0, 0), (0, 0), each, (0, 0)]) for row, each in zip(rows, sides, strict=True)]
    )
    outputs = mx.concatenate(
        [attended(cache, step[:, :, :400]), attended(cache, step[:, :, 400:])], axis=2
    )
    cache.finalize()
    for at, (row, (left, _)) in enumerate(zip(rows, sides, strict=True)):
        found = outputs[at, :, left : left + row.shape[2]]
        assert float(mx.abs(found - expected("q4", row)[0]).max()) < 1e-4
    pool.check()


def test_layers_that_share_keys_attend_to_the_same(backend: str) -> None:
    pool = PagePool(1, page_format="q4", max_bytes=1 << 24)
    (cache,) = caches_of(pool)
    keys = numbers(700, seed=2).astype(mx.float32)
    attended(cache, keys[:, :, :100])
    mask = cache.make_mask(600)
    found, _ = cache.update_and_fetch(keys[:, :, 100:], keys[:, :, 100:])
    outputs = [found.read.attend(keys[:, :, 100:], mask, scale=1.0) for _ in range(2)]
    first, second = outputs
    assert first is not None
    assert second is not None
    assert mx.array_equal(first, second)
    assert mx.array_equal(contents(cache)[:, :, -188:], mx.concatenate([keys[:, :, -188:]] * 2))


def test_attention_that_pages_cannot_express_gathers_the_step_as_it_was_given() -> None:
    pool = PagePool(1, page_format="q4", max_bytes=1 << 24)
    (cache,) = caches_of(pool)
    keys = numbers(900, seed=2).astype(mx.float32)
    attended(cache, keys[:, :, :300])
    cache.make_mask(600)
    found, _ = cache.update_and_fetch(keys[:, :, 300:], keys[:, :, 300:])
    assert found.read.attend(keys[:, :, 300:], None, scale=1.0) is None
    gathered = mx.array(found.read.gather()[0])
    assert mx.array_equal(gathered[:, :, 256:], keys[:, :, 256:])
    assert 1e-2 < float(mx.abs(gathered - keys).max()) < 0.5


@pytest.mark.parametrize("back", [1, 5, 9])
def test_drafted_tokens_that_cross_into_a_page_leave_no_trace(back: int, backend: str) -> None:
    """Those of speculative decoding: a step of ten of which some are trimmed."""
    keys = numbers(300, seed=4).astype(mx.float32)
    pool = PagePool(1, page_format="q4", max_bytes=1 << 24)
    (cache,) = caches_of(pool)
    attended(cache, keys[:, :, :250])
    attended(cache, mx.concatenate([keys[:, :, 250 : 260 - back], keys[:, :, :back]], axis=2))
    cache.trim(back)
    found = attended(cache, keys[:, :, 260 - back :])
    whole = expected("q4", keys)
    assert float(mx.abs(found - whole[:, :, 260 - back :]).max()) < 1e-4
    pool.check()


def test_a_step_that_fails_leaves_the_page_that_it_began_in() -> None:
    layout = PageLayout(FP16, LayerGeometry(1, HEAD, mx.float16, 1, HEAD, mx.float16))
    pool = PagePool(1, page_format="q4", max_bytes=5 * layout.page_bytes)
    (cache,) = caches_of(pool)
    write([cache], 300, seed=3)
    before = contents(cache)
    with pytest.raises(PoolExhausted):
        write([cache], 5000)
    cache.make_mask(300)
    with pytest.raises(ValueError, match="expects"):
        cache.update_and_fetch(mx.zeros((1, 1, 300, 64)), mx.zeros((1, 1, 300, 64)))
    assert (cache.offset, formats(cache)) == (300, ["q8", "fp16"])
    assert mx.array_equal(contents(cache), before)
    pool.check()
    assert pool.stats().blocks_used == 2


@pytest.mark.parametrize("size", [7, 256, 300, 2048])
def test_a_model_writes_the_same_text_however_its_prompt_is_cut(size: int) -> None:
    model: Any = small_model("llama")
    prompt = [(7 * i * i + 3 * i + 1) % 97 for i in range(700)]

    def text(step: int) -> list[int]:
        cache = PagedCacheFactory(model, page_format="q4", max_bytes=64 << 20).make_cache()
        found = generate_step(
            mx.array(prompt), model, max_tokens=40, prompt_cache=cache, prefill_step_size=step
        )
        return [int(token) for token, _ in found]

    assert text(size) == text(4096)


@pytest.mark.parametrize("model_name", ["stdlib-llama", "stdlib-gemma3"])
@pytest.mark.parametrize("page_format", ["q8", "q4"])
@pytest.mark.parametrize("step", [7, 200, 300])
def test_the_lengths_of_steps_show_only_by_rounding_of_the_models_own(
    step: int, page_format: str, model_name: str, trained: Any, source_text: str
) -> None:
    """Given the keys and values that it computed in one step, bit for bit, a model says the same in
    other steps: pages have the same codes, and attention sees them alike."""
    model, tokenizer = trained(model_name)
    text = tokenizer.encode(source_text[20000:22500])[:530]
    whole = read(model, text, page_format, len(text))
    assert difference(read(model, text, page_format, step, whole.written), whole) < 1e-4


def test_a_page_waits_for_all_layers() -> None:
    pool = PagePool(2, page_format="q4", max_bytes=1 << 24)
    caches = caches_of(pool)
    for _ in range(2):
        write(caches, 50)
    write(caches[:1], 200)
    write(caches[:1], 1)
    assert formats(caches[0]) == ["fp16", "fp16"]
    write(caches[1:], 201, seed=7)
    assert mx.array_equal(caches[1].keys_and_values()[0][:, :, 100:], numbers(201, 7))
    write(caches, 1)
    assert formats(caches[0]) == formats(caches[1]) == ["q8", "fp16"]


def test_layers_may_take_a_long_step_one_after_the_other() -> None:
    pool = PagePool(2, page_format="q4", max_bytes=1 << 24)
    caches = caches_of(pool)
    write(caches, 100, seed=3)
    write(caches[:1], 700, seed=5)
    write(caches[:1], 10, seed=5)
    assert mx.array_equal(contents(caches[1])[:1], numbers(100, 3))
    write(caches[1:], 710, seed=7)
    write(caches, 1)
    assert formats(caches[0]) == ["q8", "q4", "q4", "fp16"]
    held = [mx.array(cache.keys_and_values()[0])[:, :, :-1] for cache in caches]
    for found, steps in zip(held, [[(700, 5), (10, 5)], [(710, 7)]], strict=True):
        written = mx.concatenate([numbers(100, 3), *(numbers(*each) for each in steps)], axis=2)
        assert float(mx.abs(found - written).max()) < 0.5
    pool.check()


def test_a_shared_page_is_recoded_once_for_all() -> None:
    pool = PagePool(1, page_format="q4", max_bytes=1 << 24)
    (cache,) = caches_of(pool)
    write([cache], 512)
    forks = [copy.deepcopy(cache) for _ in range(3)]
    for seed, fork in enumerate(forks):
        write([fork], 1, seed)
    assert formats(cache) == ["q8", "q4"]
    assert all(formats(fork) == ["q8", "q4", "fp16"] for fork in forks)
    stats = pool.stats()
    assert stats.blocks_by_format == {"fp16": 3, "q8": 1, "q4": 1}
    assert stats.blocks_shared == 2


def test_what_is_found_is_what_the_sequence_itself_goes_on_with() -> None:
    model: Any = small_model("llama")
    factory = PagedCacheFactory(model, page_format="q4", max_bytes=64 << 20)
    prompt = [(7 * i * i + 3 * i + 1) % 97 for i in range(600)]
    cache = factory.make_cache()
    for part in (prompt[:200], prompt[200:]):
        mx.eval(model(mx.array([part]), cache=cache))
    full = [layer for layer in cache if factory.pool.group_of(layer.layer).window is None]
    assert all(formats(layer) == ["fp16", "q4", "fp16"] for layer in full)
    factory.insert_cache(prompt, cache)
    assert all(formats(layer) == ["q8", "q4", "fp16"] for layer in full)
    found, cached = factory.fetch_cache([*prompt, 1])
    assert cached == 600
    expected = model(mx.array([[1]]), cache=cache)
    assert mx.array_equal(model(mx.array([[1]]), cache=found), expected)


@pytest.mark.parametrize("kept", [300, 200])
def test_what_could_not_be_recoded_is_not_resumed_within_its_page(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is too short when a prompt is inserted. Its next step recodes a page that another
    prompt would have begun within."""
    model: Any = small_model("llama")
    factory = PagedCacheFactory(model, page_format="q4", max_bytes=64 << 20)
    prompt = [(7 * i * i + 3 * i + 1) % 97 for i in range(300)]
    cache = factory.make_cache()
    for part in (prompt[:200], prompt[200:]):
        mx.eval(model(mx.array([part]), cache=cache))
    layer = next(each for each in cache if factory.pool.windows.get(each.layer) is None)
    assert formats(layer) == ["fp16", "fp16"]
    with monkeypatch.context() as patch:
        patch.setattr(prefix_cache, "recode_sequence", exhausted)
        assert factory.insert_cache(prompt[:kept], cache) == (300 if kept == 300 else 0)
    other = [*prompt[:190], 1, 2, 3]
    found, cached = factory.fetch_cache(other)
    mx.eval(model(mx.array([[1]]), cache=cache))
    assert formats(layer) == ["q8", "fp16"]
    outputs = model(mx.array([other[cached:]]), cache=found)[0, -1]
    cold = PagedCacheFactory(model, page_format="q4", max_bytes=64 << 20).make_cache()
    assert float(mx.abs(outputs - model(mx.array([other]), cache=cold)[0, -1]).max()) < 1e-4


def exhausted(*_: Any) -> None:
    raise PoolExhausted(needed=1, free=0, evictable=0, budget=1, block_bytes=1)


def test_a_step_that_cannot_recode_changes_no_token() -> None:
    layout = PageLayout(FP16, LayerGeometry(1, HEAD, mx.float16, 1, HEAD, mx.float16))
    pool = PagePool(1, page_format="q4", max_bytes=8 * layout.page_bytes)
    (cache,) = caches_of(pool)
    other = PagedKVCache(pool, 0, [Sequence(pool, FP16)])
    write([cache], 256)
    write([other], 7 * 256)
    before, stats = contents(cache), pool.stats()
    for _ in range(2):
        with pytest.raises(PoolExhausted):
            write([cache], 1)
    assert (cache.offset, formats(cache)) == (256, ["fp16"])
    assert mx.array_equal(contents(cache), before)
    assert pool.stats().bytes_mapped == stats.bytes_mapped
    pool.check()
    other.trim(7 * 256)
    write([cache], 1)
    assert formats(cache) == ["q8", "fp16"]


def test_a_conversion_that_ran_out_of_memory_leaves_to_others_what_they_share() -> None:
    layout = PageLayout(FP16, LayerGeometry(1, HEAD, mx.float16, 1, HEAD, mx.float16))
    pool = PagePool(1, max_bytes=8 * layout.page_bytes)
    (cache,), (other,) = caches_of(pool), caches_of(pool)
    write([cache], 600)
    fork = copy.deepcopy(cache)
    write([other], 5 * 256)
    before = contents(fork)
    with pytest.raises(PoolExhausted):
        cache.to_quantized(bits=4)
    other.trim(5 * 256)
    write([cache], 1)
    assert formats(fork) == ["fp16"] * 3
    assert mx.array_equal(contents(fork), before)
    cache.to_quantized(bits=4)
    assert (formats(cache), formats(fork)) == (["q8", "q4", "fp16"], ["fp16"] * 3)


@pytest.mark.parametrize("step", [1, 300, 700])
def test_rings_keep_16_bits(step: int) -> None:
    """Their pages are written over; the pool converts none."""
    pool = PagePool(1, page_format="q4", windows={0: Window(600, 256)}, max_bytes=1 << 24)
    (cache,) = caches_of(pool)
    write([cache], 1500)
    for at in range(3):
        write([cache], step, seed=at)
    cache.to_quantized(bits=8)
    assert formats(cache) == ["fp16"] * 4
    steps = [numbers(1500), *(numbers(step, at) for at in range(3))]
    written = mx.concatenate(steps, axis=2)
    assert mx.array_equal(contents(cache)[:1, :, -500:], written[:, :, -500:])
    assert pool.stats().blocks_by_format == {"fp16": 4}


@pytest.mark.parametrize("name", ["q4", "q8", "q8/q4"])
def test_32k_tokens_take_3_percent_more_than_if_all_were_quantised(name: str) -> None:
    geometry = LayerGeometry(1, HEAD, mx.float16, 1, HEAD, mx.float16)
    pool = PagePool(1, page_format=name, max_bytes=1 << 28)
    (cache,) = caches_of(pool)
    for _ in range(16):
        write([cache], 2048)
    write([cache], 1)
    cache.trim(1)
    whole = sum(
        PageLayout(page_format_named(each), geometry).page_bytes for each in full_formats(name, 128)
    )
    assert whole == cache.nbytes
    write([cache], 100)
    cache.trim(100 - 1)
    assert whole < cache.nbytes
    write([cache], 255)
    assert cache.nbytes <= 1.03 * 129 / 128 * whole


@pytest.mark.parametrize("pages", [6, 13, pytest.param(40, marks=pytest.mark.slow)])
def test_what_is_admitted_fits(pages: int) -> None:
    """In steps of any size that mlx-lm takes, beside another sequence."""
    layout = PageLayout(FP16, LayerGeometry(1, HEAD, mx.float16, 1, HEAD, mx.float16))
    pool = PagePool(1, page_format="q4", max_bytes=pages * layout.page_bytes)
    (other,) = caches_of(pool)
    write([other], 300)
    most = max(tokens for tokens in range(1, 40_000, 255) if pool.can_admit(tokens))
    for step in (2048, 700, 256, 1):
        (cache,) = caches_of(pool)
        left = min(most, 600) if step == 1 else most
        while left:
            write([cache], min(step, left))
            left -= min(step, left)
        del cache
    pool.check()
