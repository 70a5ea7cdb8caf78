"""Tests the support of each model folder of mlx-vlm: python -m benches.vision_families

The small random language model of every folder that tests/support/vision_zoo.py can build generates
greedily, alone and in a batch padded on the left, on mlx-vlm's caches and on pages. Recorded are:

    gets     "paged": attention read pages, and never gathered them
             "decode": it gathered them in steps of several tokens alone
             "gather": keys and values were gathered from the pages for the model's own attention
             "refused": the factory does not know a class of the model's caches
             "not built": tests/support/vision_zoo.py knows too little of the folder
    layers   the layers with pages, and all layers
    alone    tokens of each prompt alone: equal to mlx-vlm's, or not
    batch    the same for the batch; or who cannot do it, or differs from itself
    gathers  how many there were alone, and in the batch
    reason   why a model is refused or not built
"""

from benches.openblas import BLAS

import inspect
import logging
from importlib.metadata import version
from typing import Any

import mlx.core as mx
from mlx_vlm.generate import ar
from mlx_vlm.models.cache import make_prompt_cache

from benches.model_families import NEW_TOKENS, POOL_BYTES, PREFILL_STEP, PROMPTS, MakeCache
from benches.results_file import write_result
from paged_kv import PagedCacheFactory
from paged_kv.integrations.states.one_by_one import is_separate
from tests.support.vision_zoo import folders, small_language_model


def greedy(
    model: Any, cache: list[Any], tokens: mx.array, attention_mask: mx.array | None = None
) -> list[list[int]]:
    """The tokens that follow the rows [B, T], whose padding the mask [B, T] hides with zeros."""
    positions, deltas = positions_of(model, tokens, attention_mask)
    # What mlx-vlm's generate resets before each prompt.
    for name in ("_position_ids", "_rope_deltas"):
        if hasattr(model, name):
            setattr(model, name, None)
    for at in range(0, tokens.shape[1], PREFILL_STEP):
        columns = slice(at, at + PREFILL_STEP)
        step = {name: ids[..., columns] for name, ids in positions.items()}
        output = model(tokens[:, columns], cache=cache, **step, **deltas)
    generated = []
    for _ in range(NEW_TOKENS):
        column = mx.argmax(output.logits[:, -1:], axis=-1)
        generated.append(column.squeeze(1).tolist())
        output = model(column, cache=cache, **deltas)
    return [list(row) for row in zip(*generated, strict=True)]


def positions_of(
    model: Any, tokens: mx.array, attention_mask: mx.array | None
) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """The position ids [..., B, T] of a padded batch, and by how much they exceed the number of a
    row's tokens: mlx-vlm's batches give both to models that count positions in whole prompts."""
    count = getattr(model, "get_rope_index", None)
    if attention_mask is None or "attention_mask" not in inspect.signature(count or len).parameters:
        return {}, {}
    positions, _ = model.get_rope_index(tokens, attention_mask=attention_mask)
    if positions.shape[-2:] != tokens.shape:
        return {}, {}
    return {"position_ids": positions}, {"rope_deltas": mx.zeros((len(tokens), 1), mx.int32)}


def alone(model: Any, make_cache: MakeCache) -> list[list[int]]:
    return [greedy(model, make_cache(), mx.array([prompt]))[0] for prompt in PROMPTS]


def batched(model: Any) -> list[list[int]]:
    """All prompts, padded on the left, in the batch cache that mlx-vlm makes."""
    longest = max(map(len, PROMPTS))
    padding = [longest - len(prompt) for prompt in PROMPTS]
    rows = [[0] * count + prompt for count, prompt in zip(padding, PROMPTS, strict=True)]
    mask = mx.array([[0] * count + [1] * (longest - count) for count in padding])
    return greedy(model, ar._make_cache(model, padding), mx.array(rows), mask)


def support(folder: str) -> dict[str, Any]:
    """What a folder's model gets from pages."""
    try:
        model = small_language_model(folder)
        expected = alone(model, lambda: make_prompt_cache(model))
    except Exception as error:  # folders raise anything
        return {"gets": "not built", "reason": f"{type(error).__name__}: {str(error)[:120]}"}
    try:
        factory = PagedCacheFactory(model, max_bytes=POOL_BYTES)
    except TypeError as error:
        return {"gets": "refused", "reason": str(error)}
    got = alone(model, factory.make_cache)
    gathers = [factory.stats().gather_fallbacks]
    batch = batch_outcome(model, factory, expected)
    gathers.append(factory.stats().gather_fallbacks - gathers[0])
    gets = "paged"
    if any(gathers):
        gets = "gather" if gathers_to_decode(model, factory) else "decode"
    return {
        "gets": gets,
        "layers": [factory.pool.num_layers, len(make_prompt_cache(model))],
        "alone": "equal" if got == expected else "different",
        "batch": batch,
        "gathers": gathers,
    }


def gathers_to_decode(model: Any, factory: PagedCacheFactory) -> int:
    """How often keys and values are gathered for steps of one token, alone."""
    cache = factory.make_cache()
    greedy(model, cache, mx.array([PROMPTS[-1]]))
    before = factory.stats().gather_fallbacks
    greedy(model, cache, mx.array([PROMPTS[-1][:1]]))
    return factory.stats().gather_fallbacks - before


def batch_outcome(model: Any, factory: PagedCacheFactory, by_itself: list[list[int]]) -> str:
    if is_separate(model, factory.make_cache()):
        # Not run: mlx-vlm's own batch of qwen4_exp writes beside its arrays on a CPU.
        return "refused, as the model handles padding itself"
    try:
        expected = batched(model)
    except Exception:  # folders raise anything
        return "mlx-vlm cannot"
    try:
        with factory:
            got = batched(model)
    except NotImplementedError:
        return "refused, as the model handles padding itself"
    except Exception:
        return "raises"
    if got != expected and expected != by_itself:
        return "mlx-vlm's own batch differs from its prompts alone"
    return "equal" if got == expected else "different"


def main() -> None:
    logging.getLogger("paged_kv").setLevel(logging.ERROR)
    results = {}
    for folder in folders():
        results[folder] = support(folder)
        print(folder, results[folder])
    figures = {"folders": results, "mlx_vlm": version("mlx-vlm"), "blas": BLAS}
    write_result("vision_families", figures)


if __name__ == "__main__":
    main()
