"""Reads a long text in little memory: "auto" requantises the oldest pages when it gets short.

python examples/small_budget.py [MODEL]
"""

import sys

from example_model import load_model
from mlx_lm import generate

from paged_kv import PagedCacheFactory

TEXT = "def add(a, b):\n    return a + b\n\n\n" * 100

if len(sys.argv) > 2:
    sys.exit(__doc__)
model, tokenizer = load_model(*sys.argv[1:])
prompt = tokenizer.encode(TEXT)

exact = PagedCacheFactory(model)
cache = exact.make_cache()
generate(model, tokenizer, prompt, prompt_cache=cache, max_tokens=1)
needed = exact.stats().bytes_mapped
exact.close()

factory = PagedCacheFactory(model, page_format="auto", max_bytes=2 * needed // 3)
cache = factory.make_cache()
print(generate(model, tokenizer, prompt, prompt_cache=cache, max_tokens=20))
stats = factory.stats()
print(f"16 bits would map {needed:,} bytes; these pages map {stats.bytes_mapped:,}")
print(f"requantised: {dict(stats.requantisations)}")
