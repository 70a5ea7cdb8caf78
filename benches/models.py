"""Loads the models that benches run, and makes texts for them.

Those of this repository were trained on the standard library of CPython 3.11.7 without `MODULES`. A
file is tokens that begin with the end-of-text token, as in training.
"""

import inspect
import json
import random
import sysconfig
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import load
from mlx_lm.generate import generate_step

from benches.real_models.folders import model_folder
from paged_kv import embedded_model

MODULES = (
    "argparse",
    "configparser",
    "csv",
    "fractions",
    "heapq",
    "queue",
    "sched",
    "shlex",
    "statistics",
    "textwrap",
)
MODELS = {
    "stdlib-llama": embedded_model(),
    "stdlib-gemma3": str(Path(__file__).parent.parent / "tests" / "models" / "stdlib-gemma3"),
}
_LIBRARY = Path(inspect.getfile(json)).parents[1]

Caches = list[Any]


def load_model(name: str, dtype: mx.Dtype = mx.float32) -> tuple[Any, Any]:
    """A model of this repository, or a real one, and its tokenizer.

    Raises:
        RealModelError: the real model is not there; the message says how to get it.
    """
    model, tokenizer = load(MODELS.get(name) or str(model_folder(name)))[:2]
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model, tokenizer


def files(tokenizer: Any) -> list[list[int]]:
    """The tokens of each module, in the order of their names."""
    library = Path(sysconfig.get_path("stdlib"))
    return [tokenizer.encode((library / f"{name}.py").read_text()) for name in MODULES]


def contexts(tokenizer: Any, tokens: int, count: int) -> list[list[int]]:
    """`count` pieces of `tokens` + 1 tokens, each of one file, spread evenly over all files."""
    pieces = [
        file[start : start + tokens + 1]
        for file in files(tokenizer)
        for start in range(0, len(file) - tokens, tokens)
    ]
    assert len(pieces) >= count, f"{len(pieces)} pieces of {tokens} tokens, {count} are needed"
    return [pieces[index * len(pieces) // count] for index in range(count)]


def source_tokens(
    rng: random.Random, tokenizer: Any, characters: int, least: int = 30_000
) -> list[int]:
    """The tokens of so many characters, from anywhere in a file of Python's standard library that
    has more than `least`."""
    sources = sorted(path for path in _LIBRARY.glob("*.py") if path.stat().st_size > least)
    text = rng.choice(sources).read_text(encoding="utf-8")
    start = rng.randrange(len(text) - characters)
    return list(tokenizer.encode(text[start : start + characters]))


def random_tokens(model: Any, count: int, seed: int = 0) -> list[int]:
    """Tokens that make no text."""
    numbers = random.Random(seed)
    return [numbers.randrange(1, model.args.vocab_size) for _ in range(count)]


def read(model: Any, cache: Caches, tokens: list[int], step: int = 2048) -> Caches:
    """The cache, in which the model has written these tokens, so many in a step."""
    for start in range(0, len(tokens), step):
        model(mx.array([tokens[start : start + step]]), cache=cache)
        mx.eval([layer.state for layer in cache])
    return cache


def filled(model: Any, caches: Caches, batch: int, context: int) -> Caches:
    """Caches for a batch that hold `context` random tokens a row."""
    attention = model.layers[0].self_attn
    shape = (batch, attention.n_kv_heads, context, model.args.head_dim or 64)
    if batch > 1:
        caches = [cache.merge([cache] * batch) for cache in caches]
    for layer, cache in enumerate(caches):
        keys = mx.random.normal(shape, key=mx.random.key(layer)).astype(
            attention.k_proj.weight.dtype
        )
        cache.update_and_fetch(keys, keys)
        mx.eval(cache.state)
    return caches


def first_token(model: Any, prompt: list[int], cache: Caches) -> tuple[int, mx.array]:
    """The token that follows a prompt, and the log probabilities by which it was chosen."""
    token, logprobs = next(generate_step(mx.array(prompt), model, prompt_cache=cache, max_tokens=1))
    return int(token), logprobs


def first_difference(
    model: Any, prompt: list[int], stock: list[int], ours: list[int]
) -> dict[str, Any] | None:
    """At which token two answers to a prompt first differ, and the gap between the best two logits
    there, which says whether that was a tie; None if nowhere."""
    pairs = zip(stock, ours, strict=True)
    at = next((i for i, (theirs, own) in enumerate(pairs) if theirs != own), None)
    if at is None:
        return None
    best = mx.sort(model(mx.array([prompt + stock[:at]]))[0, -1])[-2:]
    return {"token": at, "gap": float(best[1] - best[0])}
