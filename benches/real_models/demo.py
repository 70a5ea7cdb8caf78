"""Asks SmolLM2 two questions about README: python -m benches.real_models.demo

The second question finds the text of the first one in the prefix cache. mlx-lm's caches are filled
with the same two conversations, each with arrays of its own.
"""

from benches.openblas import BLAS

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import load, stream_generate
from mlx_lm.models.cache import make_prompt_cache

from benches.real_models.folders import RealModelError, make_model
from paged_kv import PagedCacheFactory
from paged_kv.checks import format_size

DOCUMENT = Path(__file__).parents[2] / "README.md"
QUESTIONS = (
    "In one sentence: what is paged_kv?",
    "In one sentence: who is it for?",
)
MOST_TOKENS = 60


def conversation(tokenizer: Any, text: str, question: str) -> list[int]:
    """The tokens of a question about a text."""
    messages = [{"role": "user", "content": f"{text}\n\n{question}"}]
    tokens: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return tokens


def answered(model: Any, tokenizer: Any, tokens: Sequence[int], cache: list[Any]) -> float:
    """Print an answer as it comes; returns the seconds to its first token."""
    began, first = time.perf_counter(), None
    for response in stream_generate(
        model, tokenizer, list(tokens), max_tokens=MOST_TOKENS, prompt_cache=cache
    ):
        first = first or time.perf_counter() - began
        print(response.text, end="", flush=True)
    print()
    return first or 0.0


def main() -> int:
    """1 if the model cannot be fetched."""
    try:
        folder = make_model("smollm2")
    except RealModelError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    print(f"SmolLM2-135M-Instruct in float32, BLAS: {BLAS}\n")
    model, tokenizer = load(str(folder))[:2]
    model.set_dtype(mx.float32)
    text = DOCUMENT.read_text(encoding="utf-8")
    factory = PagedCacheFactory(model, max_bytes="2GB")
    caches = []
    for question in QUESTIONS:
        tokens = conversation(tokenizer, text, question)
        print(f"> {question}")
        cache, cached = factory.fetch_cache(tokens)
        seconds = answered(model, tokenizer, tokens[cached:], cache)
        factory.insert_cache(tokens, cache)
        caches.append(cache)
        print(f"[{cached:,} of {len(tokens):,} tokens cached, first token after {seconds:.2f} s]\n")
    stock = []
    for question in QUESTIONS:
        tokens = conversation(tokenizer, text, question)
        stock.append(make_prompt_cache(model))
        for start in range(0, len(tokens), 512):
            model(mx.array([tokens[start : start + 512]]), cache=stock[-1])
            mx.eval([layer.state for layer in stock[-1]])
    held = sum(layer.nbytes for cache in stock for layer in cache)
    print(
        f"Both conversations hold {format_size(held)} in mlx-lm's caches, and "
        f"{format_size(factory.stats().bytes_held)} in pages."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
